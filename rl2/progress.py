"""How far this process has come. Every room may mark its work here; the watchdog reads it.

The values belong to the process. Marks only count: nothing is computed from them.
"""

import time

num_marks = 0  # units of work done: a layer, a step of the engine, a tensor, some rows
phase = "loading"  # what the process is doing
quiet_until = 0.0  # by the monotonic clock: silence before this time is no alarm


def mark() -> None:
    """Counts a unit of work. It costs about a tenth of a microsecond."""
    global num_marks
    num_marks += 1


def enter(name: str) -> None:
    """Begins the phase `name`, such as update."""
    global phase
    phase = name
    mark()


def expect(seconds: float) -> None:
    """A call begins that has a limit of its own and may take so many seconds."""
    global quiet_until
    quiet_until = max(quiet_until, time.monotonic() + seconds)
