"""Says when no rank makes progress, and where each one is.

A thread on each rank reads the marks of rl2/progress.py, and tells the other ranks through the
process group's store. It uses no collective, so it works while the main thread is blocked in one.
A rank that prints nothing is stopped or lost.
"""

import faulthandler
import os
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from rl2 import progress

LONGEST_INTERVAL_SECONDS = 0.5  # between two looks
STDERR = 2  # its file descriptor
STORE_TIMEOUT = timedelta(seconds=10)
# Who reads or writes that many bytes makes progress: models are read, and checkpoints written, by
# libraries that do not mark.
IO_BYTES = 8 * 2**20


class Watchdog:
    """A thread that prints when no rank has made progress for `limit` seconds (0 = never).

    It repeats itself after twice that time, four times, and so on. It is a context manager, which
    ends the thread: a thread that runs while the interpreter ends can abort the process.
    """

    def __init__(self, limit: float):
        self.limit = limit
        self.interval = min(LONGEST_INTERVAL_SECONDS, limit / 10)
        self.store: dist.Store | None = None  # a client of this thread's own
        self.newest_work = (0, 0)
        self.num_moves = 0  # intervals in which a rank made progress, summed over the ranks
        self.progress_at = time.monotonic()
        self.alarm_after = limit  # seconds without progress
        self.is_ended = threading.Event()
        self.watched = threading.get_ident()  # the thread that trains, usually the main one
        self.thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self.limit:
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.limit:
            self.is_ended.set()
            self.thread.join(STORE_TIMEOUT.total_seconds())
            faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        while True:
            # This thread cannot run while a C function keeps Python's lock. Then faulthandler
            # prints the stacks, whose thread needs no lock.
            faulthandler.dump_traceback_later(self.limit, file=STDERR)
            try:
                self._look(time.monotonic())
            except (dist.DistError, RuntimeError):  # the store went with torchrun or rank 0
                faulthandler.cancel_dump_traceback_later()
                return
            if self.is_ended.wait(self.interval):
                return

    def _look(self, now: float) -> None:
        """Prints the stack of this rank if no rank has made progress."""
        work = (progress.num_marks, _io_bytes() // IO_BYTES)
        has_moved = work != self.newest_work or progress.is_expecting()
        self.newest_work = work
        frame = sys._current_frames()[self.watched]
        num_moves = self._count_moves(has_moved)
        silent = now - self.progress_at
        if num_moves != self.num_moves:
            self.num_moves, self.progress_at, self.alarm_after = num_moves, now, self.limit
        elif silent >= self.alarm_after:
            self.alarm_after *= 2
            text = (
                f"watchdog: no progress for {silent:.0f} s (trainer.watchdog={self.limit:g})\n"
                f"rank {os.environ.get('RANK', '0')} (host {socket.gethostname()}, pid "
                f"{os.getpid()}) is in phase {progress.phase}; its main thread:\n"
            )
            print(text + "".join(traceback.format_stack(frame)), file=sys.stderr)

    def _count_moves(self, has_moved: bool) -> int:
        """Returns in how many intervals a rank has made progress, with this one."""
        if os.environ.get("WORLD_SIZE", "1") == "1":
            return self.num_moves + has_moved
        if self.store is None:
            self.store = _connect()
        if self.store is None:  # until there is one, a rank may rightly wait for a slow one
            return self.num_moves + 1
        return int(self.store.add("moves", int(has_moved)))


def _connect() -> dist.Store | None:
    """A client of the ranks' store for the watchdog's thread. None: there is no store yet."""
    if not dist.is_initialized():
        return None
    store: Any = _get_default_store()
    while isinstance(store, dist.PrefixStore):  # of two worlds, each has a prefix of its own
        store = store.underlying_store
    store = store.clone()
    store.set_timeout(STORE_TIMEOUT)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"rl2/watchdog/{attempt}", store)


def _io_bytes() -> int:
    """Bytes that this process has read and written, mapped files included; 0 where unknown."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    counts = dict(line.split(": ") for line in lines)
    return sum(int(counts[name]) for name in ("rchar", "wchar", "read_bytes"))
