"""The garbage collector passes over the objects of the imports once, not in each collection."""

import gc

gc.disable()  # until all test files are imported


def pytest_collection_finish():
    gc.freeze()
    gc.enable()
