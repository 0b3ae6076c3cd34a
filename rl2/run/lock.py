"""The lock of a run folder: one run at a time writes there."""

import fcntl
import json
import os
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TextIO

from rl2 import cleanup

# Whether a run has a folder: no lock, as in a copy; a run has it now; the last run let it go; the
# last run is gone and did not, as it was killed.
Holding = Literal["never", "held", "released", "abandoned"]


class RunLock:
    """`folder`/lock/held, which the system keeps locked until the process of the run ends.

    owner.json beside it names the process. It becomes {} when the run ends; after a kill the name
    is left. Some file systems do not show a lock to other machines: an owner there is named.
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

    def acquire(self) -> None:
        """Takes the folder until `release` or the end of the process.

        ValueError if another run has the folder. OSError if it cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.held = open(self.path.with_name("held"), "w")  # noqa: SIM115
        owner = _read_owner(self.path)
        try:
            fcntl.lockf(self.held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.held.close()
            raise ValueError(self._explain(owner)) from None
        except OSError as error:
            print(
                f"warning: {self.held.name} cannot be locked ({error}), so nothing keeps a second "
                "run out of this folder"
            )
        if owner and owner["host"] != socket.gethostname():
            print(
                f"{self.run_folder} was last used by process {owner['pid']} on {owner['host']}, "
                "which did not end in order: if it still runs, end this run"
            )
        self.path.write_text(self.text)
        cleanup.register(self.release)

    def release(self) -> None:
        """Lets other runs have the folder. Nothing happens in a child, which has a copy of this.

        A folder that has nothing else, as after a failed start, is removed.
        """
        if self.held is None or self.held.closed or os.getpid() != self.pid:
            return
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
    """Returns who has the folder. The process of its run must not ask: it would lose the lock."""
    path = RunLock(run_folder).path
    if not path.with_name("held").exists():
        return "never"
    with open(path.with_name("held")) as held, suppress(OSError):  # some file systems have no locks
        try:
            os.lockf(held.fileno(), os.F_TEST, 0)
        except (BlockingIOError, PermissionError):
            return "held"
    return "abandoned" if _read_owner(path) else "released"
