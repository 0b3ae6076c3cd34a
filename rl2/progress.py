"""How far this process has come. Every room may mark its work here; the watchdog reads it.

The values belong to the process. Marks only count: nothing is computed from them.
"""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self, TypeVar

from tqdm import tqdm

Item = TypeVar("Item")
BAR_DELAY = 2.0  # seconds before a bar appears

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


class Bar:
    """A bar on the terminal, with the tokens per second if there are any.

    It appears after two seconds and leaves nothing behind. Where stderr is a file or a pipe there
    is none.
    """

    def __init__(self, title: str, total: int | None, unit: str, is_shown: bool = True):
        self.num_tokens = 0
        self.bar = tqdm(
            desc=title,
            total=total,
            unit=f" {unit}",
            delay=BAR_DELAY,
            dynamic_ncols=True,
            leave=False,
            disable=None if is_shown else True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.close()

    def add(self, count: int, num_tokens: int = 0) -> None:
        """Counts units that are done, and tokens."""
        mark()
        self.num_tokens += num_tokens
        if self.num_tokens and not self.bar.disable:
            speed = self.num_tokens / max(self.bar.format_dict["elapsed"], 1e-9)
            self.bar.set_postfix_str(f"{speed:,.0f} tokens/s", refresh=False)
        self.bar.update(count)


def track(items: Sequence[Item], unit: str = "micro-batches") -> Iterator[Item]:
    """The items, with a bar of those that are done. Each counts as progress.

    The title is the phase. Only the first process has a bar.
    """
    with Bar(phase, len(items), unit, os.environ.get("RANK", "0") == "0") as bar:
        for item in items:
            yield item
            bar.add(1)
