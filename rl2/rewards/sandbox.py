"""Runs Python programs that nobody has read, for rewards and for environments. Linux only.

    [result] = sandbox.run(sandbox.Program("print(int(input()) + 1)", b"41"))
    result.status, result.stdout  # ("succeeded", "42\\n")

Each program has a session of its own, a private folder, limits and a low priority. When it
ends, all processes that it has started are killed. How strong the protection is beyond that depends
on the machine:

namespaces: a program sees no network, no other processes, and no files but those of Python and its
    packages, which it cannot change. It can write into folders in memory. Where the trainer is
    root, the program is not.
user: the trainer is root of a container that cannot make namespaces. A program has a user id of its
    own. It cannot stop other processes or change their files. It can use the network, and read the
    files that every user can read.
process: neither is possible. A program can do all that the trainer can do. One that starts threads
    or processes fails, unless the trainer is root.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from typing import IO, NamedTuple

from rl2.rewards import launcher

STRENGTHS = ("namespaces", "user", "process")  # the strongest first
STATUSES = {  # by the exit status of the launcher
    launcher.SUCCEEDED: "succeeded",
    launcher.FAILED: "failed",
    launcher.KILLED: "killed",
    launcher.TIMED_OUT: "timed out",
}
SYSTEM_PATHS = {"/usr", "/lib", "/lib64", "/dev/null", "/dev/urandom"}
GRACE_SECONDS = 10.0  # that the launcher has to kill what a program has started

# So many calls of `run` work at a time, others wait. The ranks of a machine share its cores.
slots = threading.Semaphore(
    max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
)


@dataclass(frozen=True)
class Limits:
    """What a program may use. The seconds of CPU and the memory are those of one process."""

    cpu_seconds: int = 5
    wall_seconds: float = 30.0
    memory_bytes: int = 2**30  # also of the files in its folders
    processes: int = 16  # and threads
    file_bytes: int = 2**24  # of one file, such as its output


class Program(NamedTuple):
    """The text of a program in Python, and its standard input."""

    text: str
    stdin: bytes | socket = b""


class Result(NamedTuple):
    """How a program ended, and what it wrote. `status` is one of STATUSES."""

    status: str
    stdout: str
    stderr: str


def run(*programs: Program, limits: Limits | None = None, strength: str = "") -> list[Result]:
    """Runs the programs side by side until the last one has ended, and ends the others then.

    `strength` is the best by default. OSError if the sandbox itself fails.
    """
    limits = limits or Limits()
    strength = strength or best_strength()
    sandboxes: list[_Sandbox] = []
    with slots:
        try:
            for program in programs:
                sandboxes.append(_Sandbox(program, limits, strength))
            with suppress(subprocess.TimeoutExpired):  # the program has stopped its launcher
                sandboxes[-1].process.wait(limits.wall_seconds + GRACE_SECONDS)
        finally:
            for sandbox in reversed(sandboxes):
                sandbox.end()
    return [sandbox.read_result() for sandbox in sandboxes]


@functools.cache
def best_strength() -> str:
    """The strongest protection in which a program works here. RuntimeError if there is none."""
    for strength in STRENGTHS:
        if works(strength):
            return strength
    raise RuntimeError("no sandbox works on this machine: docs/rewards.md says what they need")


def works(strength: str) -> bool:
    """Whether a program works in such a sandbox on this machine, for this user."""
    if strength == "user" and os.geteuid() != 0:
        return False
    try:
        [result] = run(Program("print('works')"), strength=strength)
    except OSError:
        return False
    return result.stdout == "works\n"


def require(strength: str) -> None:
    """Prints the strength that is in force. RuntimeError if it is weaker than `strength`."""
    actual = best_strength()
    if STRENGTHS.index(actual) > STRENGTHS.index(strength):
        raise RuntimeError(
            f"sandboxes on this machine have the strength {actual!r}, but {strength!r} is required;"
            " docs/rewards.md says what they need"
        )
    if os.environ.get("RANK", "0") == "0":
        print(f"programs run in sandboxes of strength {actual!r}", flush=True)


class _Sandbox:
    """A program that runs."""

    def __init__(self, program: Program, limits: Limits, strength: str):
        self.folder = tempfile.TemporaryDirectory(prefix="rl2-sandbox-", ignore_cleanup_errors=True)
        self.stdout = tempfile.TemporaryFile()
        self.stderr = tempfile.TemporaryFile()
        path = Path(self.folder.name, "program.py")
        path.write_bytes(program.text.encode(errors="replace"))
        path.chmod(0o644)
        paths = {*SYSTEM_PATHS, sys.base_prefix, sys.prefix, self.folder.name}
        job = {
            "trainer": os.getpid(),
            "strength": strength,
            "folder": self.folder.name,
            "paths": sorted(filter(os.path.exists, paths)),  # /usr before /usr/local
            "command": [sys.executable, "-I", "-X", "utf8", str(path)],
            "wall_seconds": limits.wall_seconds,
            "limits": {
                "CPU": limits.cpu_seconds,
                "AS": limits.memory_bytes,
                "NPROC": limits.processes,
                "FSIZE": limits.file_bytes,
                "CORE": 0,
            },
        }
        with _open_input(program.stdin) as stdin:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", launcher.__file__, json.dumps(job)],
                stdin=stdin.fileno(),
                stdout=self.stdout,
                stderr=self.stderr,
                cwd=self.folder.name,
                env={"OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
                start_new_session=True,
            )

    def end(self) -> None:
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE_SECONDS)
        self.process.kill()
        self.process.wait()
        self.folder.cleanup()

    def read_result(self) -> Result:
        """How the program ended. OSError if the launcher has failed."""
        texts = []
        for file in (self.stdout, self.stderr):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        status = self.process.returncode
        if status > 0 and status not in STATUSES:
            raise OSError(f"the sandbox failed: {texts[1]}")
        return Result(STATUSES.get(status, "killed"), *texts)


def _open_input(stdin: bytes | socket) -> IO[bytes] | socket:
    if isinstance(stdin, socket):
        return stdin
    file = tempfile.TemporaryFile()
    file.write(stdin)
    file.seek(0)
    return file
