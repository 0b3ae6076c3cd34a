"""Runs Python programs that nobody has read, for rewards and for environments. Linux only.

    [result] = sandbox.run(sandbox.Program("print(int(input()) + 1)", b"41"))
    result.status, result.stdout  # ("succeeded", "42\\n")

Each program has a session of its own, a private folder, limits and a low priority. When it
ends, all processes that it has started are killed. rl2/rewards/workspace.py runs one command after
another in such a sandbox. How strong the protection is beyond that depends on the machine:

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
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple, Self

from rl2.rewards import launcher

STRENGTHS = ("namespaces", "user", "process")  # the strongest first
# What programs and commands can read with namespaces, besides Python and its packages: /bin and
# what follows it are for the shell, and for the names that Debian gives to awk and others.
SYSTEM_PATHS = {
    "/usr",
    "/lib",
    "/lib64",
    "/dev/null",
    "/dev/urandom",
    "/bin",
    "/etc/alternatives",
    "/dev/zero",
}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PATH": f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
}
GRACE_SECONDS = 10.0  # that the launcher has to start, and to kill what a program has started
END_SECONDS = 1.0  # that the other programs of a call have to end by themselves

# All processes of a user run as many programs at a time as the machine has cores. A process takes a
# core by a lock on its file in this folder. The kernel drops the locks when that process ends,
# however it ends.
LOCK_FOLDER = "/tmp/rl2-cores-{user}"
INHERITED = "RL2_SANDBOX"  # in the environment: the best strength, once a process knows it

# The content by the path in a folder. A file without content, None, is left out: data sets in
# columns give each row the files of all rows.
Files = Mapping[str, str | bytes | None]


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
    stdin: bytes | socket.socket = b""


class Result(NamedTuple):
    """How a program ended, and what it wrote. `status` is one of launcher.STATUSES.

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
    strength = strength or best_strength()
    command = [sys.executable, "-I", "-X", "utf8", "program.py"]
    results: list[Result] = []
    with ExitStack() as stack:
        stack.enter_context(free_core())
        sandboxes: list[Sandbox] = []
        for text, stdin in programs:
            files = {"program.py": text.encode(errors="replace")}
            sandboxes.append(stack.enter_context(Sandbox(files, limits, strength)))
            sandboxes[-1].start(command, stdin)
        for sandbox in reversed(sandboxes):
            results.insert(0, sandbox.wait(END_SECONDS if results else None))
    return results


class Sandbox:
    """A folder of its own, in which commands run one after another.

    `files` are there at the start; a path to a folder stands for the files in it. The limits of
    time hold for each command. OSError if the launcher cannot be started, RuntimeError if sandboxes
    cannot work on this machine, ValueError for a path of a file that leads outside. A sandbox that
    nobody refers to is closed.
    """

    def __init__(
        self, files: Files | str | Path, limits: Limits | None = None, strength: str = ""
    ) -> None:
        self.limits = limits or Limits()
        self._errors = tempfile.TemporaryFile()  # what the launcher prints if it fails
        self._outputs: tuple[IO[bytes], IO[bytes]]
        folder = tempfile.mkdtemp(prefix="rl2-sandbox-")
        try:
            _fill(Path(folder), files)
            strength = strength or best_strength()
            self._channel, process = _start_launcher(strength, self.limits, folder, self._errors)
        except BaseException:
            _remove_folder(folder)
            raise
        self.close = weakref.finalize(self, _end, self._channel, process, folder)

    def start(self, command: Sequence[str], stdin: bytes | socket.socket = b"") -> None:
        """Starts a program with its arguments. OSError if the sandbox has ended."""
        request = json.dumps({"command": command, "wall_seconds": self.limits.wall_seconds})
        if len(request) > launcher.MAX_REQUEST_BYTES:
            raise ValueError(
                f"a command may have {launcher.MAX_REQUEST_BYTES} bytes: write its text to a file"
            )
        self._outputs = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        with _open_input(stdin) as source:
            files = [file.fileno() for file in (source, *self._outputs)]
            try:
                socket.send_fds(self._channel, [request.encode()], files)
            except OSError as error:
                raise self._ended() from error

    def wait(self, seconds: float | None = None) -> Result:
        """Waits for the end of what runs. After so many seconds, if given, it is killed.

        OSError if the sandbox has ended instead, or does not work. It is closed then.
        """
        limit = self.limits.wall_seconds + GRACE_SECONDS
        try:
            self._channel.settimeout(limit if seconds is None else seconds)
            answer = self._channel.recv(1)
        except OSError:  # also of a time that is over
            answer = b""
        if not answer:
            self.close()
            if seconds is None:
                raise self._ended()
        status = answer[0] if answer else launcher.KILLED
        stdout, stderr = map(_read, self._outputs)
        return Result(launcher.STATUSES[status], stdout, stderr)

    def _ended(self) -> OSError:
        reason = _read(self._errors).strip()
        return OSError(f"the sandbox has ended{reason and ': '}{reason}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends what runs and removes all files."""
        self.close()


@contextmanager
def free_core() -> Iterator[None]:
    """Waits until one of the cores that this process may use is free, and keeps it."""
    folder = LOCK_FOLDER.format(user=os.geteuid())
    os.makedirs(folder, mode=0o700, exist_ok=True)
    cores = list(os.sched_getaffinity(0))
    random.shuffle(cores)
    with ExitStack() as stack:
        for core in cores:
            file = os.open(f"{folder}/{core}", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            stack.callback(os.close, file)
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
        else:
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # A fork of this process may have the file open too.


@functools.cache
def best_strength() -> str:
    """The strongest protection in which a program works here. RuntimeError if there is none.

    A process that this one starts inherits the answer.
    """
    if sys.platform != "linux":
        raise RuntimeError(
            f"sandboxes need Linux, and this is {sys.platform}: run in a container or a virtual "
            "machine of Linux"
        )
    strength = os.environ.get(INHERITED) or next(filter(works, STRENGTHS), None)
    if strength is None:
        raise RuntimeError("no sandbox works on this machine: docs/rewards.md says what they need")
    os.environ[INHERITED] = strength
    return strength


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
    is_first = os.environ.get("RANK", "0") == "0" and INHERITED not in os.environ
    actual = best_strength()
    if STRENGTHS.index(actual) > STRENGTHS.index(strength):
        raise RuntimeError(
            f"sandboxes on this machine have the strength {actual!r}, but {strength!r} is required;"
            " docs/rewards.md says what they need"
        )
    if is_first:
        print(f"programs run in sandboxes of strength {actual!r}", flush=True)


def _fill(folder: Path, files: Files | str | Path) -> None:
    """Writes the first files."""
    if not isinstance(files, Mapping):
        if not os.path.isdir(files):
            raise FileNotFoundError(f"{files}: expected a folder")
        shutil.copytree(files, folder, symlinks=True, dirs_exist_ok=True)
        return
    for name, content in files.items():
        if content is None:
            continue
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()) or path == folder:
            raise ValueError(f"the path {name!r} leads out of the workspace: give a relative one")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def _start_launcher(
    strength: str, limits: Limits, folder: str, errors: IO[bytes]
) -> tuple[socket.socket, subprocess.Popen]:
    """(a socket to the launcher, its process)."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    paths = SYSTEM_PATHS | {sys.base_prefix, sys.prefix, folder}
    job = {
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
        "channel": theirs.fileno(),
    }
    start = functools.partial(
        subprocess.Popen,
        [sys.executable, "-I", "-S", launcher.__file__, json.dumps(job)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        env=ENVIRONMENT,
        start_new_session=True,
        pass_fds=[theirs.fileno()],
    )
    with theirs:
        return ours, _lasting_thread(os.getpid()).submit(start).result()


@functools.cache
def _lasting_thread(process_id: int) -> ThreadPoolExecutor:
    """A thread that lives as long as this process, and starts its launchers.

    Linux ends a launcher with the thread that has started it, and that of a call of the environment
    ends with the call. A fork has no threads, and another `process_id`.
    """
    return ThreadPoolExecutor(1)


def _end(channel: socket.socket, process: subprocess.Popen, folder: str) -> None:
    """Ends a launcher and what it has started, and removes its folder."""
    channel.close()
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_SECONDS)
    process.kill()
    process.wait()
    _remove_folder(folder)


def _remove_folder(path: str) -> None:
    """Removes a folder, also if folders in it are closed or too deep for a recursion."""
    try:
        shutil.rmtree(path)
    except (OSError, RecursionError):
        for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            subprocess.run(command + [path], stderr=subprocess.DEVNULL)


def _read(file: IO[bytes]) -> str:
    """Returns what a program has written into a file."""
    file.seek(0)
    return file.read().decode(errors="replace")


def _open_input(stdin: bytes | socket.socket) -> IO[bytes] | socket.socket:
    if isinstance(stdin, socket.socket):
        return stdin
    file = tempfile.TemporaryFile()
    file.write(stdin)
    file.seek(0)
    return file
