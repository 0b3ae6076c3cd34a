"""The lock of a run folder: one run at a time writes there."""

import fcntl
import json
import os
import shutil
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TextIO

import psutil

from rl2 import cleanup

# Whether a run has a folder: no lock, as in a copy; a run has it now; the last run let it go; the
# last run is gone and did not, as it was killed.
Holding = Literal["never", "held", "released", "abandoned"]

BEAT_SECONDS = 2.0  # between two touches of owner.json by the run that has the folder
WATCH_SECONDS = 20.0  # an owner on another machine that does not touch it for so long is gone


class RunLock:
    """`folder`/lock/held, which the system keeps locked until the process of the run ends.

    owner.json beside it names the process, which touches it. It becomes {} when the run ends; after
    a kill the name is left. Some file systems do not show a lock to other machines: there the
    touches tell whether the owner is alive.
    """

    def __init__(self, run_folder: Path):
        self.run_folder = run_folder
        self.path = run_folder / "lock/owner.json"
        self.pid = os.getpid()
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        owner = {"pid": self.pid, "host": socket.gethostname(), "since": since}
        self.text = json.dumps(owner)
        # A process that closes the file loses the lock, whichever of its openings that is. So
        # nobody else opens it: it has no content.
        self.held: TextIO | None = None
        self.is_released = threading.Event()

    def acquire(self) -> None:
        """Takes the folder until `release` or the end of the process.

        ValueError if another run has the folder. OSError if it cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.held = open(self.path.with_name("held"), "w")  # noqa: SIM115
        is_in_use = False
        try:
            fcntl.lockf(self.held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_in_use = True
        except OSError as error:
            print(
                f"warning: {self.held.name} cannot be locked ({error}), so nothing keeps a second "
                "run out of this folder"
            )
        owner = _read_owner(self.path)
        is_elsewhere = bool(owner) and owner["host"] != socket.gethostname()
        if is_in_use or (is_elsewhere and self._is_touched(owner)):
            self.held.close()
            raise ValueError(self._explain(owner))
        self.path.write_text(self.text)
        threading.Thread(target=self._beat, name="lock", daemon=True).start()
        cleanup.register(self.release)

    def _is_touched(self, owner: dict[str, Any]) -> bool:
        """Whether the owner, on another machine, touches its file within WATCH_SECONDS."""
        print(
            f"{self.path} is of process {owner['pid']} on {owner['host']}: waiting "
            f"{WATCH_SECONDS:.0f} s to see whether that run goes on"
        )
        before = self.path.stat().st_mtime_ns
        time.sleep(WATCH_SECONDS)
        return self.path.stat().st_mtime_ns != before

    def _beat(self) -> None:
        while not self.is_released.wait(BEAT_SECONDS):
            with suppress(OSError):
                os.utime(self.path)

    def release(self) -> None:
        """Lets other runs have the folder. Nothing happens in a child, which has a copy of this.

        A folder that has nothing else, as after a failed start, is removed.
        """
        if self.held is None or self.is_released.is_set() or os.getpid() != self.pid:
            return
        self.is_released.set()
        self.held.close()
        if not self.path.exists():  # the folder is gone
            return
        if os.listdir(self.run_folder) == ["lock"]:
            shutil.rmtree(self.run_folder, ignore_errors=True)
        else:
            self.path.write_text("{}")

    def _explain(self, owner: dict[str, Any]) -> str:
        name = "a process that has just started"
        if owner:
            name = f"process {owner['pid']} on {owner['host']}, since {owner['since']}"
        return (
            f"trainer.save_dir={self.run_folder} is in use by another run ({name}): give this run "
            "a folder of its own, trainer.experiment_name=NAME or trainer.save_dir=FOLDER, or kill "
            "that process"
        )


def _read_owner(path: Path) -> dict[str, Any]:
    """The pid, host and since of the process that the file names; {} if it names none."""
    try:
        owner = json.loads(path.read_text())
        return {name: owner[name] for name in ("pid", "host", "since")}
    except (OSError, ValueError, LookupError, TypeError):  # or it is being written
        return {}


def look_at_lock(run_folder: Path) -> Holding:
    """Returns who has the folder."""
    path = RunLock(run_folder).path
    if not path.exists():
        return "never"
    owner = _read_owner(path)
    if not owner:
        return "released"
    is_alive = time.time() - path.stat().st_mtime < WATCH_SECONDS
    if owner["host"] == socket.gethostname():
        is_alive = psutil.pid_exists(owner["pid"])
    return "held" if is_alive else "abandoned"
