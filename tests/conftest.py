"""The garbage collector passes over the objects of the imports once, not in each collection.

And a fixture for tests that press Ctrl-C.
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
    """A shell starts background programs with Ctrl-C ignored, and their children inherit it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
