"""How a run ends early: a stop that saves, and errors that are one message."""

import faulthandler
import gc
import io
import os
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from safetensors import SafetensorError

from rl2 import cleanup
from rl2.error_report import report_error, report_to_torchrun
from rl2.output import outlive_readers
from rl2.parallel.mesh import any_rank
from rl2.parallel.rank import is_first_rank
from rl2.run.watchdog import STDERR, Watchdog

PACKAGE = Path(__file__).parent.parent
LIBRARIES = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]
SECONDS_BEFORE_OTHER_RANKS_PRINT = 5.0
# In gloo's words for a connection to a process that is gone.
LOST_CONNECTION = ("by peer", "Pair is not connected")
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# One request may arrive twice: `timeout` signals its child and then the child's group, and a
# terminal and torchrun both forward Ctrl-C.
SECONDS_OF_ONE_REQUEST = 1.0


class StopSignal:
    """Turns Ctrl-C, SIGTERM and SIGHUP into a request, which the loop reads when its step ends.

    `listen` begins that. A second signal does what it did before the run: it ends the process, and
    in a notebook Ctrl-C raises KeyboardInterrupt. Signals that are ignored stay so, as SIGHUP by
    `nohup`. On another thread than the main one, all signals stay as they are: Python lets no other
    thread handle them.
    """

    def __init__(self) -> None:
        self.requested_at: float | None = None  # by the monotonic clock; None: not on this process
        self.process_id = os.getpid()
        self.earlier: dict[int, Any] = {}  # the handlers by signal

    def listen(self) -> None:
        """Handles the signals from here on to the end of the run (`rl2.cleanup`)."""
        if threading.current_thread() is not threading.main_thread():
            return
        cleanup.register(self._end, at_exit=False)
        for number in STOP_SIGNALS:
            handler = signal.getsignal(number)
            if handler not in (None, signal.SIG_IGN):  # None: one that is not Python's
                self.earlier[number] = signal.signal(number, self.handle)

    def _end(self) -> None:
        for number, handler in self.earlier.items():
            signal.signal(number, handler)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal: the first one asks for a stop, the second one ends the run."""
        if os.getpid() != self.process_id:  # an environment's child process, which has no step
            os._exit(128 + number)
        if self.requested_at is None:
            self.requested_at = time.monotonic()
            _print_once_a_node(
                "stopping: this step will be finished and saved. A second signal ends the run at "
                "once, and torchrun kills it after 30 s: then the same command resumes from the "
                "newest checkpoint."
            )
        elif time.monotonic() - self.requested_at >= SECONDS_OF_ONE_REQUEST:
            signal.signal(number, self.earlier[number])
            signal.raise_signal(number)

    def is_requested_anywhere(self, device: torch.device) -> bool:
        """Whether any process was asked to stop. All processes must call."""
        return any_rank(self.requested_at is not None, device)


def end_with_launcher() -> None:
    """Makes the kernel kill this rank when torchrun ends; without torchrun nothing happens.

    A rank in a C function that keeps Python's lock notices nothing itself.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    launcher = os.getppid()
    cleanup.end_with_parent()
    if os.getppid() != launcher:  # it ended before the call
        os._exit(1)


def _print_once_a_node(text: str) -> None:
    """Prints from a signal handler, which may have interrupted a print that holds a lock."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    if isinstance(sys.stderr, io.TextIOWrapper):
        with suppress(OSError):
            os.write(STDERR, f"\n{text}\n".encode())
    else:  # of a notebook, which shows what is printed and not what is written to the descriptor
        print(f"\n{text}", file=sys.stderr, flush=True)


@contextmanager
def guard(watchdog_seconds: float) -> Iterator[None]:
    """What every main runs in: errors end it with one message, and a watchdog.

    Until the run listens to signals they end the process at once: there is nothing to save, and a
    rank may wait for another one in a C function, where no handler of Python runs.

    `watchdog_seconds` is the limit of the watchdog; 0 = none. A crash in native code, which raises
    no error, prints the Python stacks of its process. What is printed is written line by line from
    here on, also to a file, so a kill loses no line; the run outlives who reads it.
    """
    outlive_readers()
    faulthandler.enable(STDERR)
    end_with_launcher()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        with Watchdog(watchdog_seconds), user_errors():
            yield
    finally:
        # At its end Python would look for cycles in all that was imported, which takes seconds. In
        # these a rank that has lost another one is waited for.
        gc.freeze()


def freeze_loaded() -> None:
    """Lets Python's searches for cycles leave out all that has been loaded.

    A search through it takes a third of a second, and a rollout of 4,096 answers makes three.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def user_errors() -> Iterator[None]:
    """Shows an error that a user can fix as one message, and ends the process with status 1.

    These are errors that a `raise` statement of rl2 raises, and files and hubs that are out of
    reach. Any other error keeps its traceback, such as that of an operator of torch: its cause is a
    line of code.
    """
    try:
        yield
    except Exception as error:
        message = _user_message(error)
        if message is None:
            report_to_torchrun(f"{type(error).__name__}: {error} ({_place(error)})")
            raise
        place = ""
        if not is_first_rank():
            place = f" on rank {os.environ['RANK']}"
            # Most errors meet all ranks. The first one prints, and torchrun ends the others.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if not _is_lost_connection(error):  # the first one may be the one that is gone
                time.sleep(SECONDS_BEFORE_OTHER_RANKS_PRINT)
        report_error(f"error{place}: {message}")
        sys.exit(1)


def _user_message(error: Exception) -> str | None:
    """What to print of the error; None if its traceback is needed."""
    if _is_lost_connection(error):
        return (
            "another process ended, which torchrun names below; if it printed nothing above, it "
            "was killed, perhaps for its memory. The same command resumes from the last checkpoint."
        )
    if isinstance(error, ValueError | RuntimeError | OSError) and _is_raised_by_rl2(error):
        return str(error)
    if isinstance(error, OSError | SafetensorError):
        return f"{error} ({_place(error)})"
    return None


def _is_lost_connection(error: Exception) -> bool:
    return any(words in str(error) for words in LOST_CONNECTION)


def _is_raised_by_rl2(error: Exception) -> bool:
    """Whether a `raise` statement of rl2 raised the error.

    Functions in C, such as operators of torch, leave no frame of their own: there the last line is
    one of rl2, too, and another statement.
    """
    last = traceback.extract_tb(error.__traceback__)[-1]
    is_raised = (last.line or "").startswith("raise ")
    return is_raised and PACKAGE in Path(last.filename).parents


def _place(error: Exception) -> str:
    """The last line of the traceback that is in rl2 or in the user's own code."""
    frames = traceback.extract_tb(error.__traceback__)
    place = frames[-1]
    for frame in frames:
        parents = Path(frame.filename).parents
        if PACKAGE in parents or not any(folder in parents for folder in LIBRARIES):
            place = frame
    return f"{place.filename}, line {place.lineno}"
