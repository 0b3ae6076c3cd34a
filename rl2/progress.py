"""How far this process has come. Every room may mark its work here; the watchdog reads it.

The values belong to the process. Marks only count: nothing is computed from them.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

num_marks = 0  # units of work done: a layer, a step of the engine, a tensor, some rows
phase = "loading"  # what the process is doing
deadlines: dict[object, float] = {}  # of the calls that are expected, by the monotonic clock


def mark() -> None:
    """Counts a unit of work. It costs about a tenth of a microsecond."""
    global num_marks
    num_marks += 1


def enter(name: str) -> None:
    """Begins the phase `name`, such as update."""
    global phase
    phase = name
    mark()


@contextmanager
def expecting(seconds: float) -> Iterator[None]:
    """A call that has a limit of its own, or may rightly be silent, for so many seconds."""
    call = object()
    deadlines[call] = time.monotonic() + seconds
    try:
        yield
    finally:
        del deadlines[call]
        mark()


def is_expecting() -> bool:
    """Whether such a call is running that is within its time."""
    return any(deadline > time.monotonic() for deadline in list(deadlines.values()))
