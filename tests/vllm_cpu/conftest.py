"""Models for the real vLLM on a CPU, and a process group."""

import pytest
import torch.distributed as dist
from common import VLLM_SIZES, make_model

from rl2.parallel.mesh import init_distributed


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "llama", tied=True, **VLLM_SIZES)


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "qwen2", "qwen2", tied=False, **VLLM_SIZES)


@pytest.fixture(scope="module")
def group():
    """A process group of this process, as a trainer has one."""
    init_distributed()
    yield
    dist.destroy_process_group()
