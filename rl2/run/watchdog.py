"""Says when no rank makes progress, which rank is silent, and where each one is.

A thread on each rank compares the marks of rl2/progress.py, and tells the other ranks through the
process group's store. It uses no collective, so it works while the main thread is blocked in one.
It prints, and ends the process if torchrun, which keeps the store, is gone.
"""

import faulthandler
import json
import os
import socket
import sys
import sysconfig
import threading
import time
import traceback
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from rl2 import progress

LONGEST_INTERVAL_SECONDS = 0.5  # between two signs of a rank
INTERVALS_WITHOUT_LIFE = 4  # after this many without a new sign, a rank gives no sign of life
STDERR = 2  # its file descriptor
STORE_TIMEOUT = timedelta(seconds=10)
# Who reads or writes that many bytes makes progress: models are read, and checkpoints written, by
# libraries that do not mark.
IO_BYTES = 8 * 2**20
# One line says where a rank is: at its innermost frame outside of these folders.
LIBRARIES = (sysconfig.get_path("stdlib"), str(Path(torch.__file__).parent), "<frozen")


@dataclass
class Sign:
    """What a rank tells the others. It is alive as long as `number` grows."""

    number: int
    state: str  # its phase, and the place of its main thread
    process: str  # its host and process id
    silent_seconds: float  # since its last progress, when the sign was given
    # When the sign was first seen, by the clock of the process that has read it.
    seen_at: float = field(default=0.0, compare=False)

    def silent_at(self, now: float) -> float:
        """Seconds since its last progress."""
        return self.silent_seconds + now - self.seen_at


class Watchdog:
    """A thread that prints when no rank has made progress for `limit` seconds (0 = never).

    It repeats itself after twice that time, four times, and so on. It is a context manager, which
    ends the thread: a thread that runs while the interpreter ends can abort the process.
    """

    def __init__(self, limit: float):
        self.limit = limit
        self.interval = min(LONGEST_INTERVAL_SECONDS, limit / 10)
        self.rank = int(os.environ.get("RANK", "0"))
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self.process = f"(host {socket.gethostname()}, pid {os.getpid()})"
        self.store: Any = None  # a client of this thread's own
        self.num_signs = 0
        self.newest_work = (0, 0)
        self.looked_at = self.progress_at = time.monotonic()
        self.alarm_after = limit  # silent seconds
        self.seen: dict[int, Sign] = {}  # the newest one by rank
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

    def lost_ranks(self) -> list[str]:
        """The ranks that give no sign of life, by name, where one or more of the others ended.

        Takes a few intervals, or fewer if all but one have given a sign.
        """
        if self.store is None:
            return []
        try:
            store = self.store.clone()
            before = _read_signs(store, self.world_size)
            for _ in range(INTERVALS_WITHOUT_LIFE):
                time.sleep(self.interval)
                after = _read_signs(store, self.world_size)
                lost = [rank for rank in after if after[rank] == before.get(rank)]
                if len(lost) == 1 and lost != [self.rank]:
                    break
        except (dist.DistError, RuntimeError):
            return ["the machine that keeps torchrun's store"]
        return [f"rank {rank} {after[rank].process}" for rank in lost]

    def _run(self) -> None:
        while True:
            # This thread cannot run while a C function keeps Python's lock. Then faulthandler
            # prints the stacks, whose thread needs no lock.
            faulthandler.dump_traceback_later(self.limit, file=STDERR)
            try:
                self._look(time.monotonic())
            except (dist.DistError, RuntimeError) as error:
                faulthandler.cancel_dump_traceback_later()
                if self.is_ended.is_set() or not _has_launchers_store():
                    return  # the store of rank 0 goes with it, also at the end of a run
                text = f"watchdog: torchrun is gone, so this process ends: {error}"
                print(text, file=sys.stderr, flush=True)
                os._exit(1)
            if self.is_ended.wait(self.interval):
                return

    def _look(self, now: float) -> None:
        """Gives a sign to the other ranks, and prints if no rank has made progress."""
        self._notice_progress(now)
        silent = now - self.progress_at
        frame = sys._current_frames()[self.watched]
        self.num_signs += 1
        state = f"in phase {progress.phase} at {_place(frame)}"
        self.seen[self.rank] = Sign(self.num_signs, state, self.process, silent, now)
        if self.world_size > 1:
            self.store = self.store or _connect()
            if self.store is None:  # until there is one, a rank may rightly wait for a slow one
                return
            self.store.set(str(self.rank), json.dumps(asdict(self.seen[self.rank])))
        if silent < self.limit / 2:
            return
        for rank, sign in _read_signs(self.store, self.world_size).items():
            if sign != self.seen.get(rank):
                sign.seen_at = now
                self.seen[rank] = sign
        if min(sign.silent_at(now) for sign in self.seen.values()) >= self.alarm_after:
            self.alarm_after *= 2
            stack = "".join(traceback.format_stack(frame))
            name = f"rank {self.rank} {self.process}"
            where = f"{name} is in phase {progress.phase}; its main thread:"
            print(f"{self._summary(now)}\n{where}\n{stack}", file=sys.stderr)

    def _notice_progress(self, now: float) -> None:
        """Sets `progress_at`, the time when this process was last seen to make progress."""
        work = (progress.num_marks, _io_bytes() // IO_BYTES)
        was_stopped = now - self.looked_at > self.limit / 2
        if work != self.newest_work or progress.is_expecting() or was_stopped:
            if self.alarm_after > self.limit:
                silent = now - self.progress_at
                print(f"watchdog: rank {self.rank} moves again after {silent:.0f} s")
            self.progress_at = now
            self.alarm_after = self.limit
            self.seen.clear()
        self.newest_work = work
        self.looked_at = now

    def _summary(self, now: float) -> str:
        """What each rank last did, on the first rank that is alive."""
        silent = now - self.progress_at
        lines = [f"watchdog: no progress for {silent:.0f} s (trainer.watchdog={self.limit:g})"]
        states: dict[str, list[str]] = {}  # in words -> the ranks
        is_first_alive = self.world_size > 1
        for rank in range(self.world_size):
            sign = self.seen.get(rank)
            if sign is None:
                state = ": no sign yet"
            elif now - sign.seen_at <= INTERVALS_WITHOUT_LIFE * self.interval:
                state = f": alive, {sign.state}"
                is_first_alive = is_first_alive and rank >= self.rank
            else:
                state = (
                    f" {sign.process} gives no sign of life; its last progress was "
                    f"{sign.silent_at(now):.0f} s ago {sign.state}. It is stopped, lost, or in a C "
                    "function that keeps Python's lock (in an env file: use "
                    "rollout.env_isolation=process)."
                )
            states.setdefault(state, []).append(str(rank))
        if is_first_alive:
            for state, ranks in states.items():
                plural = "s" if len(ranks) > 1 else ""
                lines.append(f"  rank{plural} {', '.join(ranks)}{state}")
        return "\n".join(lines)


def _has_launchers_store() -> bool:
    """Returns whether the ranks' store is in torchrun, so that it outlives every rank."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _connect() -> dist.Store | None:
    """A client of the ranks' store for the watchdog's thread. None: there is no store yet."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # torchrun's store is there before the process group.
    if _has_launchers_store():
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store: Any = dist.TCPStore(address, port, is_master=False, timeout=STORE_TIMEOUT)
    elif dist.is_initialized():
        default: Any = _get_default_store()
        store = default.clone()
        store.set_timeout(STORE_TIMEOUT)
    else:
        return None
    return dist.PrefixStore(f"rl2/watchdog/{attempt}", store)


def _read_signs(store: Any, world_size: int) -> dict[int, Sign]:
    """The newest sign of each rank that has given one; a lone process has no store."""
    if store is None:
        return {}
    ranks = [rank for rank in range(world_size) if store.check([str(rank)])]
    values = store.multi_get([str(rank) for rank in ranks])
    return {rank: Sign(**json.loads(value)) for rank, value in zip(ranks, values, strict=True)}


def _place(frame: FrameType) -> str:
    """file:line in function of the innermost frame outside of libraries."""
    stack = traceback.extract_stack(frame)
    own = [entry for entry in stack if not entry.filename.startswith(LIBRARIES)]
    entry = (own or stack)[-1]
    return f"{entry.filename}:{entry.lineno} in {entry.name}"


def _io_bytes() -> int:
    """Bytes that this process has read and written, mapped files included; 0 where unknown."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    counts = dict(line.split(": ") for line in lines)
    return sum(int(counts[name]) for name in ("rchar", "wchar", "read_bytes"))
