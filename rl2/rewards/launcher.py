"""Runs one command after another in a sandbox: rl2/rewards/sandbox.py starts this file.

It enters namespaces, gives up its rights, sets the limits and waits for each command. Then it kills
every process that the command has started, and sends how it ended. A traceback on stderr means that
the sandbox itself does not work.
"""

import ctypes
import json
import os
import resource
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

# How a command ended. One that starved timed out, and had waited for a core for most of its time.
STATUSES = ("succeeded", "failed", "killed", "timed out", "starved")
SUCCEEDED, FAILED, KILLED, TIMED_OUT, STARVED = range(5)
# The trainer comes first: on a core that both want, a program gets a tenth. The launcher keeps its
# priority, since it must be able to end a program on a busy machine.
NICENESS = 10
# Linux keeps these user ids for services that exist only while they run (systemd's DynamicUser).
FIRST_USER, NUM_USERS = 61184, 4336
MAX_FILES = 10_000  # that a program may make in its folders
# A file system in memory is mounted there and becomes the root. Nothing of /proc is needed then.
NEW_ROOT = "/proc"
WORKSPACE = "/workspace"  # below it
MAX_REQUEST_BYTES = 2**17  # of a command

# Constants of Linux
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x8000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
MNT_DETACH = 2

Job = dict[str, Any]  # what rl2/rewards/sandbox.py asks for
LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    job = json.loads(sys.argv[1])
    has_namespaces = job["strength"] == "namespaces"
    os.umask(0o022)
    write("/proc/self/oom_score_adj", "1000")  # where memory runs out, the trainer comes last
    user = os.geteuid()
    if user == 0 and job["strength"] != "process":
        user = FIRST_USER + os.getpid() % NUM_USERS  # so programs cannot end each other
    os.chown(job["folder"], user, -1)
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)  # no path leads there later
    if has_namespaces:
        enter_namespaces(user)
    call("prctl", PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != job["trainer"]:
        sys.exit(KILLED)  # the trainer ended before
    call("prctl", PR_SET_CHILD_SUBREAPER, 1)
    if has_namespaces:
        # When the first process of a namespace ends, all others there are killed.
        first = os.fork()
        if first:
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]))
        call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL)
        build_root(job["paths"], job["limits"]["AS"])
    try:
        enter_folder(job["folder"], user, has_namespaces)
        serve(job, user, proc)
    finally:
        kill_others(user)


def enter_folder(folder: str, user: int, has_namespaces: bool) -> None:
    """Changes to the folder of the sandbox. Its files belong to `user`.

    With namespaces it is a copy of `folder` in memory, where nothing can fill a disk.
    """
    if has_namespaces:
        shutil.copytree(folder, WORKSPACE, symlinks=True, dirs_exist_ok=True)
        folder = WORKSPACE
    if os.geteuid() != user:
        for parent, _, names in os.walk(folder):
            os.chown(parent, user, -1)
            for name in names:
                os.chown(os.path.join(parent, name), user, -1, follow_symlinks=False)
    os.chdir(folder)
    os.environ["HOME"] = folder


def serve(job: Job, user: int, proc: int) -> None:
    """Runs the commands of a sandbox until the other end of its socket closes.

    A message is the JSON of a command and its limit of time, with the files of its standard input,
    output and errors. The answer is one byte, how it ended.
    """
    channel = socket.socket(fileno=job["channel"])
    channel.set_inheritable(False)
    while True:
        message, files, _, _ = socket.recv_fds(channel, MAX_REQUEST_BYTES, 3)
        if not message:
            return
        for file in files:
            os.set_inheritable(file, False)
        try:
            status = supervise(job | json.loads(message), user, proc, files)
        except OSError as error:  # there is no such command
            os.write(files[2], f"{error}\n".encode())
            status = FAILED
        kill_others(user)
        for file in files:
            os.close(file)
        channel.send(bytes([status]))


def supervise(job: Job, user: int, proc: int, files: Sequence[int]) -> int:
    """Runs the program until it ends, its time is up, or SIGTERM comes. Returns how it ended.

    `proc` is the folder /proc. `files` are the program's standard input, output and errors. OSError
    if the program cannot be started.
    """
    signals = {signal.SIGCHLD, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    reader, writer = os.pipe()  # Both ends close when the program starts.
    program = os.fork()
    if program == 0:
        start_program(job, user, writer, files)
    os.close(writer)
    if error := os.read(reader, 1000):
        raise OSError(error.decode())
    end = time.monotonic() + job["wall_seconds"]
    while True:
        event = signal.sigtimedwait(signals, max(0.0, end - time.monotonic()))
        if event is None or event.si_signo == signal.SIGTERM:
            return STARVED if waited(proc) > job["wall_seconds"] / 2 else TIMED_OUT
        process, status = os.waitpid(program, os.WNOHANG)
        if process and os.WIFSIGNALED(status):
            return KILLED
        if process:
            return FAILED if status else SUCCEEDED


def waited(proc: int) -> float:
    """Returns the seconds for which the program was ready to run and got no core.

    0 if the kernel does not tell, and for a program that has started others, which may be what it
    waits for.
    """

    def read(path: str) -> list[str]:
        with open(os.open(path, os.O_RDONLY, dir_fd=proc)) as file:
            return file.read().split()

    try:
        [program] = read("thread-self/children")
        if read(f"{program}/task/{program}/children"):
            return 0.0
        return int(read(f"{program}/schedstat")[1]) / 1e9
    except (OSError, ValueError):
        return 0.0


def start_program(job: Job, user: int, errors: int, files: Sequence[int]) -> NoReturn:
    """Becomes the program, without rights and with its limits. Writes to `errors` if it cannot."""
    try:
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.nice(NICENESS)
        become(user)
        call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        for name, value in job["limits"].items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execvp(job["command"][0], job["command"])
    except Exception as error:
        os.write(errors, f"{job['command'][0]} does not start: {error!r}".encode())
    finally:
        os._exit(FAILED)


def kill_others(user: int) -> None:
    """Kills all processes below this one, which inherits orphans. They belong to `user`."""
    is_first = os.getpid() == 1  # of a namespace: it kills all others at once, so none starts more
    if is_first:
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
    elif os.geteuid() != user:
        while not kill_user(user):
            pass
    with suppress(ChildProcessError):  # none is left
        while True:
            if not is_first:
                with open(f"/proc/self/task/{os.getpid()}/children") as children:
                    for child in children.read().split():
                        os.kill(int(child), signal.SIGKILL)
            os.waitpid(-1, 0)


def kill_user(user: int) -> bool:
    """Kills all processes of another user at once, so none can start another one.

    Returns False if a process of that user was faster to kill the one that does this.
    """
    killer = os.fork()
    if killer == 0:
        try:
            become(user)
            with suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)  # all that this user may kill, but for itself
        finally:
            os._exit(0)
    return os.waitpid(killer, 0)[1] == 0


def become(user: int) -> None:
    """Gives up the rights of root, if this process has them."""
    if os.geteuid() != user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def enter_namespaces(user: int) -> None:
    """Its processes, mounts, shared memory and network are its own. The network has no device."""
    flags = CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWNET
    if LIBC.unshare(flags) == 0:
        return
    # Only root may, and not in every container. Other users may in a user namespace of their own.
    become(user)
    call("prctl", PR_SET_DUMPABLE, 1)  # else the files of /proc/self belong to root
    group = os.getegid()
    call("unshare", flags | CLONE_NEWUSER)
    write("/proc/self/setgroups", "deny")
    write("/proc/self/uid_map", f"{user} {user} 1")
    write("/proc/self/gid_map", f"{group} {group} 1")


def build_root(paths: list[str], num_bytes: int) -> None:
    """Changes to a root in memory that has `paths`, read-only, and folders for temporary files."""
    mount("none", "/", MS_REC | MS_PRIVATE)
    options = f"size={num_bytes},nr_inodes={MAX_FILES},mode=755"
    call("mount", b"tmpfs", NEW_ROOT.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options.encode())
    for path in paths:
        target = NEW_ROOT + path
        if os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            write(target, "")
        mount(path, target, MS_BIND | MS_REC)
        locked = os.statvfs(path).f_flag & (MS_NODEV | MS_NOEXEC)
        mount(path, target, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | locked)
    for folder in ("/tmp", "/dev/shm"):
        os.makedirs(NEW_ROOT + folder, exist_ok=True)
        os.chmod(NEW_ROOT + folder, 0o1777)
    os.chdir(NEW_ROOT)
    call("pivot_root", b".", b".")
    call("umount2", b".", MNT_DETACH)  # the former root
    os.chdir("/tmp")


def mount(source: str, target: str, flags: int) -> None:
    call("mount", source.encode(), target.encode(), None, flags, None)


def call(name: str, *arguments: object) -> None:
    """Calls a function of the C library. OSError if it fails."""
    if getattr(LIBC, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


if __name__ == "__main__":
    main()
