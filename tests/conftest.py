"""The garbage collector passes over the objects of the imports once, not in each collection.

And fixtures: for tests that press Ctrl-C, and for runs in the process of the tests.
"""

import gc
import signal

import pytest

gc.disable()  # until all test files are imported


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


@pytest.fixture
def hears_ctrl_c():
    """Ctrl-C raises KeyboardInterrupt.

    A shell starts background programs with Ctrl-C ignored, and their children inherit it. A trainer
    that an earlier test ran in this process has signals end it at once.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def base(tmp_path, monkeypatch):
    """The required keys of PPO; the working directory has the FILES of configs.py."""
    from configs import BASE, write_files

    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    write_files(tmp_path)
    return BASE["ppo"]


@pytest.fixture
def runs_here(monkeypatch, tmp_path):
    """A run of `rl2.train` has one thread, as with the command line, and a folder of the test."""
    import torch  # other suites have none

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A model that no test changes."""
    from common import make_model

    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def device():
    """Yields the device of a process group with one process."""
    import torch.distributed as dist

    from rl2.parallel.mesh import init_distributed

    yield init_distributed()
    dist.destroy_process_group()
