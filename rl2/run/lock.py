"""The lock of a run folder: one run at a time writes there.

The lock of a run that is gone is taken.
"""

import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import Enum, auto
from pathlib import Path

from rl2 import cleanup

BEAT_SECONDS = 2.0  # between two touches of the lock by the run that has it
WATCH_SECONDS = 20.0  # a lock of another machine that nobody touches for so long is stale
READ_ATTEMPTS = 10  # 0.1 s apart
CLOCK_SECONDS = 3600.0  # the clocks of two machines differ by less
# What a start writes into a run folder before its first step.
START_FILES = {"lock", "config.yaml", "run.json"}


@dataclass(frozen=True)
class Process:
    """A process, as other processes recognise it. The pid alone may be given to another one."""

    pid: int
    host: str
    machine: str  # the boot and the process namespace in which `pid` has a meaning
    start: str  # when it started, in ticks since the boot; "" for one that is gone
    since: str = field(compare=False)  # the date at which it took the lock


class RunLock:
    """`folder`/lock/N.json names the process that has the folder. The highest N counts.

    A newcomer that finds this process gone creates N + 1, which only one newcomer can do. The file
    with the highest number is never deleted, so no newcomer creates a number twice. A run that ends
    writes {} into its file; one that has made the folder and not begun a step removes it.
    """

    def __init__(self, run_folder: Path):
        self.run_folder = run_folder
        self.folder = run_folder / "lock"
        self.process = this_process()
        self.number = 0
        self.made: list[Path] = []  # by this run: the folder and those that hold it
        self.has_begun = False  # a step
        self.is_released = threading.Event()

    @property
    def path(self) -> Path:
        return self._path_of(self.number)

    def acquire(self) -> None:
        """Takes the folder until `release` or the end of the run.

        ValueError if another run has it. OSError if the folder cannot be written.
        """
        global _held
        folders = (self.run_folder, *self.run_folder.parents)
        self.made = [folder for folder in folders if not folder.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)
        while self.number == 0:
            newest = self._newest()
            if newest:
                self._check_is_free(newest)
            if self._create(newest + 1):
                self.number = newest + 1
        threading.Thread(target=self._beat, daemon=True).start()
        cleanup.register(self.release)
        _held = self

    def release(self) -> None:
        """Lets other runs have the folder."""
        is_child = os.getpid() != self.process.pid  # which has a copy of this object
        if not is_child and not self.is_released.is_set() and self.path.exists():
            if self._is_unused():
                self._remove_folder()
            else:
                self.path.write_text("{}")
        self.is_released.set()

    def _is_unused(self) -> bool:
        """Whether this run has made the folder, and nothing but its start is in it."""
        names = {path.name for path in self.run_folder.iterdir()}
        is_last = self._newest() == self.number
        return bool(self.made) and not self.has_begun and names <= START_FILES and is_last

    def _remove_folder(self) -> None:
        for name in ("config.yaml", "run.json"):
            (self.run_folder / name).unlink(missing_ok=True)
        with suppress(OSError):  # a folder has got other files meanwhile
            self.path.unlink()  # the last file: until then no other run can have the folder
            for folder in (self.folder, *self.made):
                folder.rmdir()

    def _path_of(self, number: int) -> Path:
        return self.folder / f"{number}.json"

    def _newest(self) -> int:
        return max((int(path.stem) for path in self.folder.glob("*.json")), default=0)

    def _create(self, number: int) -> bool:
        """Whether this process got the lock with this number."""
        path = self._path_of(number)
        try:
            with open(path, "x") as file:
                json.dump(asdict(self.process), file)
        except FileExistsError:
            return False
        except OSError:  # such as a full disk
            path.unlink(missing_ok=True)
            raise
        if self._newest() > number:  # others came and went since we looked
            path.unlink()
            return False
        for older in self.folder.glob("*.json"):
            if int(older.stem) < number:
                older.unlink(missing_ok=True)
        return True

    def _check_is_free(self, number: int) -> None:
        """ValueError if the process that has this lock is alive."""
        owner = self._read(number)
        path = self._path_of(number)
        if isinstance(owner, Process) and owner.machine == self.process.machine:
            is_free = owner == self.process or process_start(owner.pid) != owner.start
        else:
            is_free = owner is None or not path.exists() or not _is_touched(path)
        if is_free:
            return
        name = "a process that has just started"
        stop = "stop that run"
        if isinstance(owner, Process):
            name = f"process {owner.pid} on {owner.host}, since {owner.since}"
            stop += f" (kill {owner.pid})"
        raise ValueError(
            f"trainer.save_dir={self.run_folder} is in use by another run ({name}): give this run "
            f"a folder of its own, trainer.experiment_name=NAME or trainer.save_dir=FOLDER, or "
            f"{stop}"
        )

    def _read(self, number: int) -> Process | str | None:
        """The process that has the lock. None: it was released. A text: why it is not readable."""
        problem = ""
        for _ in range(READ_ATTEMPTS):  # it may be written right now
            try:
                content = json.loads(self._path_of(number).read_text())
                return Process(**content) if content else None
            except (OSError, ValueError, TypeError) as error:
                problem = str(error)
                time.sleep(0.1)
        return problem

    def _beat(self) -> None:
        """Touches the lock, for newcomers on other machines. They cannot ask for a process.

        Ends this process when a newcomer took the folder because it was silent for too long.
        """
        while not self.is_released.wait(BEAT_SECONDS):
            newest = self._newest()
            owner = self._read(newest)
            if newest > self.number and isinstance(owner, Process) and owner != self.process:
                print(
                    f"error: this run was silent for so long that process {owner.pid} on "
                    f"{owner.host} took {self.run_folder}; it ends here",
                    file=sys.stderr,
                )
                os._exit(1)
            try:
                os.utime(self.path)
            except OSError:  # the file system is away for a while, or someone deleted the folder
                continue


_held: RunLock | None = None  # by this process


def release_at_once() -> None:
    """Releases the lock of this process, if it has one, before `os._exit`."""
    if _held is not None:
        with suppress(OSError):
            _held.release()


class Holding(Enum):
    """Whether a run has a folder, as far as one look at its lock can say."""

    NEVER = auto()
    """there is no lock, as in a copy of a run"""
    HELD = auto()
    """a run has it now"""
    RELEASED = auto()
    """the last run let it go at its end"""
    ABANDONED = auto()
    """the process of the last run is gone, and did not let it go: it was killed"""
    UNKNOWN = auto()
    """the lock is of another machine and has not been touched for a while, or it is unreadable"""


def look_at_lock(run_folder: Path) -> Holding:
    """Returns who has the folder. It waits for nothing, unlike `RunLock.acquire`."""
    lock = RunLock(run_folder)
    try:
        newest = lock._newest()
        if not newest:
            return Holding.NEVER
        path = lock._path_of(newest)
        content = json.loads(path.read_text())
        if not content:
            return Holding.RELEASED
        owner = Process(**content)
        silence = time.time() - path.stat().st_mtime
    except (OSError, ValueError, TypeError):
        return Holding.UNKNOWN
    if owner.machine == lock.process.machine:
        is_alive = process_start(owner.pid) == owner.start
        return Holding.HELD if is_alive else Holding.ABANDONED
    if abs(silence) < WATCH_SECONDS:  # it is touched every BEAT_SECONDS
        return Holding.HELD
    return Holding.ABANDONED if silence > CLOCK_SECONDS else Holding.UNKNOWN


def this_process() -> Process:
    """This process, with the present date."""
    host = socket.gethostname()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no Linux: nobody can ask for its processes
        machine = f"{host} {os.getpid()} {time.time()}"
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return Process(os.getpid(), host, machine, process_start(os.getpid()), since)


def process_start(pid: int) -> str:
    """When the process started, in ticks since the boot; "" if there is none.

    A stopped process is there. One that was killed and waits for its parent is not.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    state, *fields = text.rpartition(")")[2].split()
    return "" if state in "ZX" else fields[18]


def _is_touched(path: Path) -> bool:
    """Whether the file changes within WATCH_SECONDS."""
    print(
        f"{path} is from another machine: waiting {WATCH_SECONDS:.0f} s for a sign of life ...",
    )
    first = _last_touch(path)
    deadline = time.monotonic() + WATCH_SECONDS
    while time.monotonic() < deadline:
        time.sleep(min(1.0, WATCH_SECONDS / 10))
        if _last_touch(path) != first:
            return True
    return False


def _last_touch(path: Path) -> int:
    """The time of the last change. The file is opened, so that NFS asks its server."""
    try:
        with open(path) as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:  # replaced by a newer one
        return 0
