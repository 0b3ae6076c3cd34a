"""Keeps a process alive whose stdout or stderr goes away, as in `... | head` or a lost terminal."""

import errno
import io
import os
import select
import sys
import threading
from contextlib import suppress
from typing import Any

NAMES = {1: "stdout", 2: "stderr"}  # by file descriptor
LOST = (errno.EPIPE, errno.EIO)  # a pipe without a reader; a terminal that was closed
_lock = threading.Lock()
_lost: set[int] = set()


class _Output(io.FileIO):
    """stdout or stderr, which takes what nobody reads any more."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in LOST:
                raise
            _lose(self.fileno())
            return len(data)


def outlive_readers(is_told: bool) -> None:
    """From here on, stdout and stderr become /dev/null when they lose their readers.

    That holds for all that this process prints, and for processes that it starts later. Whole lines
    are written, so a kill loses none. `is_told`: the other one of the two says so.
    """
    for descriptor, name in NAMES.items():
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):  # None, or of a test or a notebook
            continue
        if stream is not getattr(sys, f"__{name}__"):
            stream.reconfigure(line_buffering=True, write_through=False)
            continue
        with suppress(BrokenPipeError):
            stream.flush()
        replacement = io.TextIOWrapper(
            io.BufferedWriter(_Output(descriptor, "wb", closefd=False)),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=True,
        )
        setattr(sys, name, replacement)
        # Prints notice a loss by themselves. The thread does so for processes that start later.
        watch = threading.Thread(target=_watch, args=(descriptor, is_told), daemon=True)
        watch.start()


def _watch(descriptor: int, is_told: bool) -> None:
    """Waits until nobody can read what is written."""
    poll = select.poll()
    poll.register(descriptor, 0)
    poll.poll()
    _lose(descriptor)
    if is_told:
        other = 3 - descriptor
        text = f"{NAMES[descriptor]} was closed: the run goes on, and metrics.jsonl has its steps\n"
        with suppress(OSError):
            os.write(other, text.encode())


def _lose(descriptor: int) -> None:
    with _lock:
        if descriptor not in _lost:
            _lost.add(descriptor)
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
