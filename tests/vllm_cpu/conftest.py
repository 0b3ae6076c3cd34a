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
def engine_of():
    """Makes an engine for a worker, and closes the one before: there is one set of groups."""
    engines = []

    def close():
        if engines:
            engines.pop().close()

    def make(worker):
        close()
        name, cpu = worker.config.model_name, torch.device("cpu")
        settings = EngineSettings(name, worker.dtype, cpu, max_running_requests=8)
        engines.append(VLLMEngine(settings))
        return engines[-1]

    yield make
    close()
