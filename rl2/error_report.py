"""Prints errors that a user can fix where people look for them."""

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError


class Diverged(RuntimeError):
    """The weights are so large, or so far from numbers, that nothing can be computed with them."""


def report_error(text: str) -> None:
    """Prints the message, and makes torchrun repeat it at the end of its own report."""
    print(text, file=sys.stderr)
    report_to_torchrun(text)


def report_to_torchrun(text: str) -> None:
    """Makes the report of torchrun, if it started this process, end with the message.

    That report has some 40 lines of its own, so what is printed above it is easily overlooked.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        details = {"py_callstack": text, "timestamp": str(int(time.time()))}
        Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": details}}))


@contextmanager
def writing(path: str | os.PathLike) -> Iterator[None]:
    """Adds the path and the free space of its disk to errors while writing there.

    The error of a full disk has neither, since it is raised when an open file is written.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        is_torchs_file = "inline_container" in str(error) or "PytorchStreamWriter" in str(error)
        if type(error) is RuntimeError and not is_torchs_file:
            raise
        raise RuntimeError(f"{describe_failed_write(path)}: {error}") from error


def describe_failed_write(path: str | os.PathLike) -> str:
    """Returns a message that the path could not be written, with the free space of its disk."""
    folder = Path(path).absolute().parent
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / 2**30
    return f"{path} could not be written ({free:.1f} GiB are free there)"
