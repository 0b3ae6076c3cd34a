"""Records the progress of this process. All modules mark work here, and the watchdog reads it.

Marks are only counted; no result depends on them.
"""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self, TypeVar

from tqdm import tqdm

Item = TypeVar("Item")
BAR_DELAY = 2.0  # seconds before a bar appears
LINE_SECONDS = 30.0  # between two lines where there is no terminal

num_marks = 0  # units of work done: a layer, a step of the engine, a tensor, some rows
phase = "loading"  # what the process is doing
deadlines: dict[object, float] = {}  # of running calls with a limit, by the monotonic clock


def mark() -> None:
    """Counts a unit of work. Takes about a tenth of a microsecond."""
    global num_marks
    num_marks += 1


def enter(name: str) -> None:
    """Begins the phase `name`, such as update."""
    global phase
    phase = name
    mark()


@contextmanager
def expecting(seconds: float) -> Iterator[None]:
    """Tells the watchdog that a call may be silent for this many seconds."""
    call = object()
    deadlines[call] = time.monotonic() + seconds
    try:
        yield
    finally:
        del deadlines[call]
        mark()


def is_expecting() -> bool:
    """Whether a call is running that may still be silent."""
    return any(deadline > time.monotonic() for deadline in list(deadlines.values()))


class Bar:
    """A progress bar on the terminal, with tokens per second if tokens are counted.

    It appears after two seconds and disappears at the end. If stderr is a file or a pipe, it gets a
    line at most every 30 s instead, when units are finished.
    """

    def __init__(self, title: str, total: int | None, unit: str, is_shown: bool = True):
        self.title = title
        self.total = total
        self.unit = unit
        self.num_done = 0
        self.num_tokens = 0
        self.began_at = time.monotonic()
        self.bar = tqdm(
            desc=title,
            total=total,
            unit=f" {unit}",
            delay=BAR_DELAY,
            dynamic_ncols=True,
            leave=False,
            disable=None if is_shown else True,
        )
        self.prints_lines = is_shown and self.bar.disable
        self.line_due_at = self.began_at + LINE_SECONDS

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.close()

    def add(self, count: int, num_tokens: int = 0) -> None:
        """Counts finished units, and tokens."""
        mark()
        self.num_done += count
        self.num_tokens += num_tokens
        if self.num_tokens and not self.bar.disable:
            self.bar.set_postfix_str(self._speed(), refresh=False)
        self.bar.update(count)
        if self.prints_lines and time.monotonic() > self.line_due_at:
            self.line_due_at = time.monotonic() + LINE_SECONDS
            total = "" if self.total is None else f" of {self.total}"
            speed = f", {self._speed()}" if self.num_tokens else ""
            seconds = time.monotonic() - self.began_at
            text = f"{self.title}: {self.num_done}{total} {self.unit}, {seconds:.0f} s{speed}"
            print(text, file=sys.stderr)

    def _speed(self) -> str:
        seconds = max(time.monotonic() - self.began_at, 1e-9)
        return f"{self.num_tokens / seconds:,.0f} tokens/s"


def track(items: Sequence[Item], unit: str = "micro-batches") -> Iterator[Item]:
    """Yields the items and shows a bar of the finished ones. Each counts as progress.

    The title is the phase. Only the first process shows a bar.
    """
    with Bar(phase, len(items), unit, os.environ.get("RANK", "0") == "0") as bar:
        for item in items:
            yield item
            bar.add(1)
