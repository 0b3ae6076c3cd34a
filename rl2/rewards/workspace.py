"""A folder with files in which commands run one after another, for agents that edit and run code.

    with Workspace({"add.py": "def add(a, b): return a - b"}) as workspace:
        workspace.run("sed -i 's/a - b/a + b/' add.py").status  # "succeeded"
        workspace.run("python -c 'from add import add; print(add(1, 2))'").stdout  # "3\\n"
        workspace.read("add.py")

Each command runs in a sandbox with the limits and strengths of rl2/rewards/sandbox.py, and what it
has started ends with it. Files stay until the workspace is closed. With the strength namespaces
they are in memory; a command then sees /usr, Python and the trainer's packages besides.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import IO

from rl2.rewards import launcher
from rl2.rewards.sandbox import (
    GRACE_SECONDS,
    STATUSES,
    Limits,
    Result,
    best_strength,
    check_platform,
    end_launcher,
    free_core,
    launcher_command,
    make_job,
    open_input,
    read_output,
    remove_folder,
)

# The content by the path in the workspace. A file without content, None, is left out: data sets in
# columns give each row the files of all rows.
Files = Mapping[str, str | bytes | None]
# What commands need besides: the shell, and the names that Debian gives to awk and others.
SHELL_PATHS = {"/bin", "/etc/alternatives", "/dev/zero"}
START_SECONDS = 60.0
WRITE = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'


class Workspace:
    """Runs commands in a folder of its own. Its methods may be called from any thread.

    `files` are there at the start; a path to a folder stands for the files in it. The limits of
    time hold for each command. OSError if the sandbox cannot be started, RuntimeError if it cannot
    work on this machine, ValueError for a path of a file that leads outside.
    """

    def __init__(
        self,
        files: Files | str | Path | None = None,
        limits: Limits | None = None,
        strength: str = "",
    ):
        check_platform()
        self.limits = limits or Limits()
        self._lock = threading.Lock()
        folder = tempfile.mkdtemp(prefix="rl2-sandbox-")
        try:
            _fill(Path(folder), files or {})
            self._channel, process, self._errors = _start(
                strength or best_strength(), self.limits, folder
            )
        except BaseException:
            remove_folder(folder)
            raise
        self._close = weakref.finalize(self, _end, self._channel, process, folder)
        self._receive(START_SECONDS)

    def run(self, command: str | Sequence[str], stdin: bytes = b"") -> Result:
        """Runs a line of the shell, or a program with its arguments, and waits for its end.

        The call waits for a free core. OSError if the workspace has been closed, or if it has
        ended, as it may where the machine runs out of memory.
        """
        words = [_shell(), "-c", command] if isinstance(command, str) else list(command)
        request = json.dumps({"command": words, "wall_seconds": self.limits.wall_seconds})
        if len(request) > launcher.MAX_REQUEST_BYTES:
            raise ValueError(
                f"a command may have {launcher.MAX_REQUEST_BYTES} bytes: write its text to a file"
            )
        with (
            self._lock,
            free_core(),
            open_input(stdin) as source,
            tempfile.TemporaryFile() as stdout,
            tempfile.TemporaryFile() as stderr,
        ):
            files = [file.fileno() for file in (source, stdout, stderr)]
            try:
                socket.send_fds(self._channel, [request.encode()], files)
            except OSError as error:
                raise self._ended() from error
            status = self._receive(self.limits.wall_seconds + GRACE_SECONDS)
            return Result(STATUSES[status], read_output(stdout), read_output(stderr))

    def read(self, path: str) -> str:
        """Returns the text of a file. FileNotFoundError if it cannot be read."""
        result = self.run(["cat", "--", path])
        if result.status != "succeeded":
            raise FileNotFoundError(result.stderr.strip() or f"{path}: {result.status}")
        return result.stdout

    def write(self, path: str, content: str | bytes) -> None:
        """Writes a file, and makes its folders. OSError if that is not possible."""
        data = content.encode() if isinstance(content, str) else content
        result = self.run(["/bin/sh", "-c", WRITE, "sh", path], stdin=data)
        if result.status != "succeeded":
            raise OSError(result.stderr.strip() or f"{path}: {result.status}")

    def close(self) -> None:
        """Ends what runs and removes all files. A workspace that nobody refers to is closed too."""
        self._close()

    def __enter__(self) -> "Workspace":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _receive(self, seconds: float) -> int:
        """Waits for the answer of the launcher. OSError if there is none; nothing works then."""
        try:
            self._channel.settimeout(seconds)
            answer = self._channel.recv(1)
        except OSError:  # also of a time that is over
            answer = b""
        if not answer:
            error = self._ended()
            self.close()
            raise error
        return answer[0]

    def _ended(self) -> OSError:
        reason = read_output(self._errors).strip()
        return OSError(f"the workspace has ended{reason and ': '}{reason}")


def shorten(text: str, max_characters: int) -> str:
    """Leaves out the middle of a longer text, such as what a command prints."""
    if len(text) <= max_characters:
        return text
    half = max_characters // 2
    return f"{text[:half]}\n...\n{text[-half:]}"


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


def _start(
    strength: str, limits: Limits, folder: str
) -> tuple[socket.socket, subprocess.Popen, IO[bytes]]:
    """(a socket to the launcher, its process, the file of what it prints if it fails)."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    errors = tempfile.TemporaryFile()
    job = {**make_job(strength, limits, folder, SHELL_PATHS), "channel": theirs.fileno()}
    start = partial(
        subprocess.Popen,
        launcher_command(job),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        cwd=folder,
        env={
            "OMP_NUM_THREADS": "1",
            "PATH": f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        start_new_session=True,
        pass_fds=[theirs.fileno()],
    )
    with theirs:
        return ours, _lasting_thread(os.getpid()).submit(start).result(), errors


def _end(channel: socket.socket, process: subprocess.Popen, folder: str) -> None:
    channel.close()
    end_launcher(process)
    remove_folder(folder)


def _shell() -> str:
    return "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"


@cache
def _lasting_thread(process_id: int) -> ThreadPoolExecutor:
    """A thread that lives as long as this process, and starts its launchers.

    Linux ends a launcher with the thread that has started it, and that of a call of the environment
    ends with the call. A fork has no threads, and another `process_id`.
    """
    return ThreadPoolExecutor(1)
