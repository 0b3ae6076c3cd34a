"""Says when no rank makes progress, which rank is silent, and where each one stands.

A thread on each rank compares the marks of rl2/progress.py, and tells the other ranks through the
process group's store. It uses no collective, so it works while the main thread is blocked in one.
It prints and does nothing else.
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
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from rl2 import progress

LONGEST_INTERVAL_SECONDS = 2.0  # between two signs of a rank
INTERVALS_WITHOUT_LIFE = 3  # after so many without a new sign, a rank gives no sign of life
STDERR = 2  # its file descriptor
STORE_TIMEOUT = timedelta(seconds=10)
# Who reads or writes that many bytes makes progress: models are read, and checkpoints written, by
# libraries that do not mark.
IO_BYTES = 8 * 2**20
# One line says where a rank stands: at its innermost frame outside of these folders.
LIBRARIES = (sysconfig.get_path("stdlib"), str(Path(torch.__file__).parent), "<frozen")


@dataclass
class Sign:
    """What a rank tells the others. It is alive as long as `number` grows."""

    number: int
    silent_seconds: float  # since its last progress
    phase: str
    place: str  # of its main thread
    host: str
    process_id: int


@dataclass
class SeenSign:
    """The newest sign of a rank, and when it came by the clock of this process."""

    sign: Sign
    at: float

    def silent_seconds(self, now: float) -> float:
        return self.sign.silent_seconds + now - self.at


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
        self.store: Any = None  # a client of this thread's own
        self.num_signs = 0
        self.newest_work = (0, 0)
        self.looked_at = self.progress_at = time.monotonic()
        self.alarm_after = limit  # silent seconds
        self.seen: dict[int, SeenSign] = {}  # by rank
        self.is_ended = threading.Event()
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
        """The ranks that give no sign of life, by name. Takes a few intervals."""
        if self.store is None:
            return []
        try:
            store = self.store.clone()
            before = _read_signs(store, self.world_size)
            time.sleep(INTERVALS_WITHOUT_LIFE * self.interval)
            after = _read_signs(store, self.world_size)
        except (dist.DistError, RuntimeError):
            return ["the machine that keeps torchrun's store"]
        return [_name(rank, sign) for rank, sign in after.items() if sign == before.get(rank)]

    def _run(self) -> None:
        while True:
            # This thread cannot run while a C function keeps Python's lock. Then faulthandler
            # prints the stacks, whose thread needs no lock.
            faulthandler.dump_traceback_later(self.limit, file=STDERR)
            try:
                self._look(time.monotonic())
            except (dist.DistError, RuntimeError) as error:
                print(f"watchdog: ends, since the ranks' store is gone: {error}", file=sys.stderr)
                faulthandler.cancel_dump_traceback_later()
                return
            if self.is_ended.wait(self.interval):
                return

    def _look(self, now: float) -> None:
        """Gives a sign to the other ranks, and prints if no rank has made progress."""
        self._notice_progress(now)
        silent = now - self.progress_at
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        self.num_signs += 1
        host, process_id = socket.gethostname(), os.getpid()
        place = _place(frame)
        sign = Sign(self.num_signs, silent, progress.phase, place, host, process_id)
        if self.world_size > 1:
            self._connect()
        if self.store is not None:
            self.store.set(str(self.rank), json.dumps(asdict(sign)))
        self.seen[self.rank] = SeenSign(sign, now)
        if silent < self.limit / 2 or self.world_size > 1 and self.store is None:
            return  # before there is a store, a rank may rightly wait for a slow one
        self._see_signs(now)
        least_silent = min(seen.silent_seconds(now) for seen in self.seen.values())
        if least_silent >= self.alarm_after:
            self.alarm_after *= 2
            stack = "".join(traceback.format_stack(frame))
            where = f"{_name(self.rank, sign)} stands in phase {sign.phase}; its main thread:"
            print(f"{self._summary(now)}\n{where}\n{stack}", file=sys.stderr, flush=True)

    def _see_signs(self, now: float) -> None:
        """Reads the signs of the other ranks, and notes when each one was new."""
        if self.store is None:
            return
        for rank, sign in _read_signs(self.store, self.world_size).items():
            if rank not in self.seen or sign != self.seen[rank].sign:
                self.seen[rank] = SeenSign(sign, now)

    def _notice_progress(self, now: float) -> None:
        """Sets `progress_at`, the time when this process was last seen to make progress."""
        work = (progress.num_marks, _io_bytes() // IO_BYTES)
        was_stopped = now - self.looked_at > self.limit / 2
        if work != self.newest_work or progress.is_expecting() or was_stopped:
            if self.alarm_after > self.limit:
                silent = now - self.progress_at
                print(f"watchdog: rank {self.rank} moves again after {silent:.0f} s", flush=True)
            self.progress_at = now
            self.alarm_after = self.limit
            self.seen.clear()
        self.newest_work = work
        self.looked_at = now

    def _connect(self) -> None:
        """Makes this thread's client of the store, as soon as there is a store."""
        if self.store is not None:
            return
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if (
            os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        ):  # torchrun's, there before the group
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store: Any = dist.TCPStore(address, port, is_master=False, timeout=STORE_TIMEOUT)
        elif dist.is_initialized():
            default: Any = _get_default_store()
            store = default.clone()
            store.set_timeout(STORE_TIMEOUT)
        else:
            return
        self.store = dist.PrefixStore(f"rl2/watchdog/{attempt}", store)

    def _summary(self, now: float) -> str:
        """The silent ranks with what they last did. On one of the ranks that are alive."""
        is_alive = {}
        for rank, seen in sorted(self.seen.items()):
            is_alive[rank] = now - seen.at <= INTERVALS_WITHOUT_LIFE * self.interval
        silent = now - self.progress_at
        lines = [f"watchdog: no progress for {silent:.0f} s (trainer.watchdog={self.limit:g})"]
        if self.world_size == 1 or self.rank != min(rank for rank in is_alive if is_alive[rank]):
            return lines[0]
        places: dict[str, list[str]] = {}
        for rank, seen in sorted(self.seen.items()):
            state = f"in phase {seen.sign.phase} at {seen.sign.place}"
            if is_alive[rank]:
                places.setdefault(state, []).append(str(rank))
                continue
            lines.append(
                f"  {_name(rank, seen.sign)} gives no sign of life; its last progress was "
                f"{seen.silent_seconds(now):.0f} s ago {state}. It is stopped, lost, or in a C "
                "function that keeps Python's lock."
            )
        for rank in sorted(set(range(self.world_size)) - set(self.seen)):
            lines.append(f"  rank {rank} has given no sign yet")
        for state, ranks in places.items():
            plural = "s" if len(ranks) > 1 else ""
            lines.append(f"  rank{plural} {', '.join(ranks)}: alive, {state}")
        return "\n".join(lines)


def _name(rank: int, sign: Sign) -> str:
    return f"rank {rank} (host {sign.host}, pid {sign.process_id})"


def _read_signs(store: Any, world_size: int) -> dict[int, Sign]:
    """The newest sign of each rank that has given one."""
    ranks = [rank for rank in range(world_size) if store.check([str(rank)])]
    values = store.multi_get([str(rank) for rank in ranks])
    return {rank: Sign(**json.loads(value)) for rank, value in zip(ranks, values, strict=True)}


def _place(frame: FrameType) -> str:
    """file:line in function of the innermost frame that is no library's."""
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
