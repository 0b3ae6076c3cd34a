"""Keeps a process alive whose stdout or stderr goes away: a closed pipe, a lost terminal."""

import errno
import io
import os
import sys
from contextlib import suppress
from typing import Any

LOST = (errno.EPIPE, errno.EIO)  # a pipe without a reader; a terminal that was closed


class _Output(io.FileIO):
    """stdout or stderr, which becomes /dev/null when nobody reads it any more."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in LOST:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(data)


def outlive_readers() -> None:
    """From here on, what this process prints may lose its readers.

    Whole lines are written, so a kill loses none.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        is_original = stream is getattr(sys, f"__{name}__")
        if not is_original or stream is None:  # replaced here before, by a test or a notebook
            continue
        with suppress(BrokenPipeError):
            stream.flush()
        replacement = io.TextIOWrapper(
            io.BufferedWriter(_Output(stream.fileno(), "wb", closefd=False)),
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=True,
        )
        setattr(sys, name, replacement)
