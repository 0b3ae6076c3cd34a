"""Models and engines for the real vLLM on a CPU, and a process group."""

import pytest
import torch
import torch.distributed as dist
from common import VLLM_SIZES, make_model

from rl2.engine.base import EngineSettings
from rl2.engine.vllm import VLLMEngine
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


@pytest.fixture
def make_engine():
    """Makes an engine, and closes the one before: there is one set of groups."""
    engines = []

    def close():
        if engines:
            engines.pop().close()

    def make(name, dtype=torch.float32, **options):
        close()
        engines.append(VLLMEngine(EngineSettings(name, dtype, torch.device("cpu"), **options)))
        return engines[-1]

    yield make
    close()
