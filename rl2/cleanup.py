"""What has to be done when a run ends, however it ends: to release its lock, to end its processes.

A trainer that is a program ends with its process. `rl2.train` runs inside a process that goes on,
such as a notebook: there the run has a scope.
"""

import atexit
import ctypes
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

Callback = Callable[[], object]
# Of Linux: the signal that a process gets when the thread that has started it ends.
PR_SET_PDEATHSIG = 1

_scope: list[Callback] | None = None  # None: the run ends with its process


def register(callback: Callback, at_exit: bool = True) -> None:
    """Calls `callback()` at the end of the scope or, if there is none, of the process.

    `at_exit=False` is for what the end of a process undoes by itself, such as a thread.
    """
    if _scope is not None:
        _scope.append(callback)
    elif at_exit:
        atexit.register(callback)


def unregister(callback: Callback) -> None:
    """Forgets the callback, which need not be registered."""
    if _scope is not None and callback in _scope:
        _scope.remove(callback)
    atexit.unregister(callback)


@contextmanager
def scope() -> Iterator[None]:
    """At its end, calls what was registered inside, the last one first, whichever of them fail."""
    global _scope
    assert _scope is None, "in_process.py has one run at a time"
    _scope = []
    try:
        yield
    finally:
        callbacks, _scope = _scope, None
        with ExitStack() as stack:
            for callback in callbacks:
                stack.callback(callback)


def end_with_parent() -> None:
    """Makes the kernel kill this process when the thread that has started it ends, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
