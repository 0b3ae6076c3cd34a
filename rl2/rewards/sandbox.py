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

import fcntl
import functools
import json
import os
import random
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
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
    launcher.STARVED: "starved",  # It timed out, and had waited for a core for most of the time.
}
SYSTEM_PATHS = {"/usr", "/lib", "/lib64", "/dev/null", "/dev/urandom"}
GRACE_SECONDS = 10.0  # that the launcher has to kill what a program has started

# All processes of a user run as many programs at a time as the machine has cores. A process takes a
# core by a lock on its file, in a folder below one of these. The kernel drops the locks when that
# process ends, however it ends.
LOCK_FOLDERS = ("/dev/shm", tempfile.gettempdir())
LOCK_SECONDS = 600.0  # Then a call does not wait any longer: some process may have been stopped.
LOOK_SECONDS = 0.02  # between two looks for a free core
INHERITED = "RL2_SANDBOX"  # in the environment: the process that knows the best strength, and that


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
    """How a program ended, and what it wrote. `status` is one of STATUSES.

    A program that has starved was ready to run, and had no core for most of its time.
    """

    status: str
    stdout: str
    stderr: str


def run(*programs: Program, limits: Limits | None = None, strength: str = "") -> list[Result]:
    """Runs the programs side by side until the last one has ended, and ends the others then.

    The call waits for a free core. `strength` is the best by default. OSError if the sandbox itself
    fails.
    """
    check_platform()
    limits = limits or Limits()
    strength = strength or best_strength()
    sandboxes: list[_Sandbox] = []
    with free_core():
        try:
            for program in programs:
                sandboxes.append(_Sandbox(program, limits, strength))
            with suppress(subprocess.TimeoutExpired):  # the program has stopped its launcher
                sandboxes[-1].process.wait(limits.wall_seconds + GRACE_SECONDS)
        finally:
            for sandbox in reversed(sandboxes):
                sandbox.end()
    return [sandbox.read_result() for sandbox in sandboxes]


def check_platform() -> None:
    """RuntimeError if sandboxes cannot work on this system."""
    if sys.platform != "linux":
        raise RuntimeError(
            f"sandboxes need Linux, and this is {sys.platform}: run in a container or a virtual "
            "machine of Linux"
        )


@contextmanager
def free_core() -> Iterator[None]:
    """Waits until one of the cores that this process may use is free, and keeps it."""
    folder = _lock_folder()
    cores = list(os.sched_getaffinity(0))
    random.shuffle(cores)
    end = time.monotonic() + LOCK_SECONDS
    lock = None
    while lock is None and time.monotonic() < end:
        for core in cores:
            lock = _lock(f"{folder}/{core}")
            if lock is not None:
                break
        else:
            time.sleep(LOOK_SECONDS * random.uniform(0.5, 1.5))
    try:
        yield
    finally:
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_UN)  # A fork of this process may have the file open too.
            os.close(lock)


def _lock(path: str) -> int | None:
    """Locks a file, or returns None if it is locked."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return None
    return file


def _lock_folder() -> str:
    """Returns a folder of this user for locks, which all its processes on this machine find."""
    for parent in LOCK_FOLDERS:
        folder = f"{parent}/rl2-cores-{os.geteuid()}"
        with suppress(OSError):
            os.makedirs(folder, mode=0o700, exist_ok=True)
            status = os.lstat(folder)
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                return folder
    raise OSError(f"no folder for locks can be made in {' or '.join(LOCK_FOLDERS)}")


@functools.cache
def best_strength() -> str:
    """The strongest protection in which a program works here. RuntimeError if there is none.

    A process that this one starts inherits the answer.
    """
    check_platform()
    strength = _inherited_strength() or next(filter(works, STRENGTHS), None)
    if strength is None:
        raise RuntimeError("no sandbox works on this machine: docs/rewards.md says what they need")
    os.environ[INHERITED] = f"{os.getpid()} {strength}"
    return strength


def _inherited_strength() -> str | None:
    process, _, strength = os.environ.get(INHERITED, "").partition(" ")
    return strength if process == str(os.getppid()) and strength in STRENGTHS else None


def works(strength: str) -> bool:
    """Returns whether a program works in such a sandbox on this machine, for this user."""
    if strength == "user" and os.geteuid() != 0:
        return False
    try:
        [result] = run(Program("print('works')"), strength=strength)
    except OSError:
        return False
    return result.stdout == "works\n"


def require(strength: str) -> None:
    """Prints the strength that is in force. RuntimeError if it is weaker than `strength`.

    The first process of a run prints it.
    """
    is_first = os.environ.get("RANK", "0") == "0" and _inherited_strength() is None
    actual = best_strength()
    if STRENGTHS.index(actual) > STRENGTHS.index(strength):
        raise RuntimeError(
            f"sandboxes on this machine have the strength {actual!r}, but {strength!r} is required;"
            " docs/rewards.md says what they need"
        )
    if is_first:
        print(f"programs run in sandboxes of strength {actual!r}", flush=True)


class _Sandbox:
    """A program that runs."""

    def __init__(self, program: Program, limits: Limits, strength: str):
        self.folder = tempfile.mkdtemp(prefix="rl2-sandbox-")
        self.stdout = tempfile.TemporaryFile()
        self.stderr = tempfile.TemporaryFile()
        path = Path(self.folder, "program.py")
        path.write_bytes(program.text.encode(errors="replace"))
        path.chmod(0o644)
        job = {
            **make_job(strength, limits, self.folder),
            "command": [sys.executable, "-I", "-X", "utf8", str(path)],
            "wall_seconds": limits.wall_seconds,
        }
        with open_input(program.stdin) as stdin:
            self.process = subprocess.Popen(
                launcher_command(job),
                stdin=stdin.fileno(),
                stdout=self.stdout,
                stderr=self.stderr,
                cwd=self.folder,
                env={"OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
                start_new_session=True,
            )

    def end(self) -> None:
        end_launcher(self.process)
        remove_folder(self.folder)

    def read_result(self) -> Result:
        """How the program ended. OSError if the launcher has failed."""
        texts = [read_output(file) for file in (self.stdout, self.stderr)]
        status = self.process.returncode
        if status > 0 and status not in STATUSES:
            raise OSError(f"the sandbox failed: {texts[1]}")
        return Result(STATUSES.get(status, "killed"), *texts)


def make_job(
    strength: str, limits: Limits, folder: str, further_paths: Collection[str] = ()
) -> dict[str, object]:
    """What the launcher needs to know. With namespaces a program can read `further_paths`, besides
    the system's, Python's and the `folder`.
    """
    paths = {*SYSTEM_PATHS, *further_paths, sys.base_prefix, sys.prefix, folder}
    return {
        "trainer": os.getpid(),
        "strength": strength,
        "folder": folder,
        "paths": sorted(filter(os.path.exists, paths)),  # /usr before /usr/local
        "limits": {
            "CPU": limits.cpu_seconds,
            "AS": limits.memory_bytes,
            "NPROC": limits.processes,
            "FSIZE": limits.file_bytes,
            "CORE": 0,
        },
    }


def launcher_command(job: dict[str, object]) -> list[str]:
    return [sys.executable, "-I", "-S", launcher.__file__, json.dumps(job)]


def end_launcher(process: subprocess.Popen) -> None:
    """Ends a launcher and what it has started."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_SECONDS)
    process.kill()
    process.wait()


def read_output(file: IO[bytes]) -> str:
    """Returns what a program has written into a file."""
    file.seek(0)
    return file.read().decode(errors="replace")


def remove_folder(path: str) -> None:
    """Removes a folder, also if folders in it are closed or too deep for a recursion."""
    try:
        shutil.rmtree(path)
    except (OSError, RecursionError):
        for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            subprocess.run([*command, path], stderr=subprocess.DEVNULL)


def open_input(stdin: bytes | socket) -> IO[bytes] | socket:
    if isinstance(stdin, socket):
        return stdin
    file = tempfile.TemporaryFile()
    file.write(stdin)
    file.seek(0)
    return file
