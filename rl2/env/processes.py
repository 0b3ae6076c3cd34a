"""Runs the sync functions of an env file in processes: a call that takes too long is killed.

Each process imports the env file and nothing of the trainer, and runs one call at a time. All
calls of a trajectory go to one process, so that state which the env keeps between them stays.
A process that ends is replaced by a new one. Then the trajectories that had made a call there fail
in their next call, since their state is lost. Other calls go on in the new process.
"""

import asyncio
import concurrent.futures
import json
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rl2.env.contract import EnvError
from rl2.env.runners import start_thread
from rl2.progress import expecting

IMPORT_SECONDS = 300.0  # that the import of the env file may take in a process
ENDING_SECONDS = 10.0  # that a process may take to end when it was killed


class Child:
    """A Python process that runs a function of rl2/env/child.py, and a socket to it."""

    def __init__(self, function: str, *arguments: Any):
        self.socket, theirs = socket.socketpair()
        with theirs:
            text = ", ".join(map(repr, (theirs.fileno(), *arguments)))
            code = f"import sys; sys.path = {list(map(str, sys.path))}; from rl2.env import child"
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"{code}; child.{function}({text})"],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a process group, which is killed as a whole
            )

    def ask(self, request: bytes, seconds: float) -> dict[str, Any]:
        """Sends `request` and returns the answer. TimeoutError after `seconds`.

        Another OSError, or ValueError, if the process ended or its answer is no JSON.
        """
        deadline = time.monotonic() + seconds
        self.socket.settimeout(seconds)
        self.socket.sendall(request)
        answer = bytearray()
        while not answer.endswith(b"\n"):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            self.socket.settimeout(remaining)
            received = self.socket.recv(2**16)
            if not received:
                raise ConnectionResetError
            answer += received
        return json.loads(answer)

    def end(self) -> str:
        """Kills the process and those that it has started. Returns how it ended."""
        with suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.socket.close()
        with suppress(subprocess.TimeoutExpired):  # it may wait for a disk that is lost
            self.process.wait(ENDING_SECONDS)
        status = self.process.returncode
        if status is None or status >= 0:
            return f"exit status {status}"
        memory = ", perhaps for its memory" if status == -signal.SIGKILL else ""
        return f"signal {-status} ({signal.strsignal(-status)}{memory})"


@dataclass
class Home:
    """The process of a trajectory: `child` is the number of the child that ran earlier calls."""

    process: "EnvProcess"
    child: int | None = None


@dataclass
class Call:
    """A call of the function `name` for the trajectory `key`; None: it needs no certain process."""

    name: str
    arguments: dict[str, Any]
    key: Hashable
    result: concurrent.futures.Future = field(default_factory=concurrent.futures.Future)
    home: Home | None = None


class EnvProcess:
    """A process of the pool. When its child ends, the next call starts a new one.

    `calls` are those that wait for it, and `num_calls` counts them and the one that runs. A thread
    runs them. It starts the children too: Linux ends a child with the thread that forked it.
    """

    def __init__(self, pool: "ProcessPool"):
        self.calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self.num_calls = 0
        self._pool = pool
        self._child: Child | None = None
        self._child_number = 0
        self.thread = start_thread("env process", self._run_calls)

    def _run_calls(self) -> None:
        while (call := self.calls.get()) is not None:
            try:
                call.result.set_result(self._run(call))
            except BaseException as error:
                call.result.set_exception(error)
        self._end_child()

    def _run(self, call: Call) -> Any:
        try:
            return self._run_in_child(call)
        finally:
            self._pool.next_call(self)  # before the caller of this one can make another

    def _run_in_child(self, call: Call) -> Any:
        assert call.home is not None
        if self._child is not None and self._child.process.poll() is not None:
            self._end_child()  # it has ended between two calls
        if call.home.child not in (None, self._child_number):
            raise EnvError(
                f"{call.name}: the process of this trajectory has ended in a call of another "
                "trajectory, so the state of its earlier calls is lost"
            )
        try:
            request = pickle.dumps((call.name, pickle.dumps(call.arguments)))
        except Exception as error:
            raise EnvError(f"{call.name}: a process cannot get its arguments: {error}") from None
        if self._child is None:
            self._start_child()
        call.home.child = self._child_number
        limit = self._pool.timeout
        return self._ask(call.name, request, limit, f"rollout.env_timeout={limit:g} s")

    def _start_child(self) -> None:
        try:
            self._child = Child("serve", os.getpid(), self._pool.path)
        except OSError as error:
            raise EnvError(f"a process of the environment cannot start: {error}") from None
        self._pool.toggle_group(self._child.process.pid)
        try:
            name = "the import of the env file in a process"
            self._ask(name, b"", IMPORT_SECONDS, f"{IMPORT_SECONDS:g} s")
        except EnvError:
            self._end_child()
            raise

    def _ask(self, name: str, request: bytes, seconds: float, limit: str) -> Any:
        """The value that the child answers. EnvError if there is none; the child may be ended."""
        assert self._child is not None
        try:
            with expecting(seconds):
                answer = self._child.ask(request, seconds)
        except TimeoutError:
            self._end_child()
            raise EnvError(f"{name} did not return within {limit}") from None
        except (OSError, ValueError):
            how = self._end_child()
            raise EnvError(f"{name} ended its process: {how}") from None
        if "reason" in answer:
            raise EnvError(answer["reason"], answer["kind"])
        return answer["value"]

    def _end_child(self) -> str:
        """Ends the child, if there is one. Returns how it ended."""
        if self._child is None:
            return ""
        child, self._child = self._child, None
        self._child_number += 1
        how = child.end()
        self._pool.toggle_group(child.process.pid)
        return how


class ProcessPool:
    """Runs an env file's sync functions in up to `size` processes, started when needed.

    `path` is the file, `timeout` the limit of a call in seconds, from when it runs.
    """

    def __init__(self, path: str, timeout: float, size: int):
        self.path = path
        self.timeout = timeout
        self._size = size
        self._lock = threading.Lock()  # of all that follows
        self._processes: list[EnvProcess] = []
        self._homes: dict[Hashable, Home] = {}  # by trajectory
        self._waiting: deque[Call] = deque()  # for any process
        self._guard = Child("end_groups")

    async def run(self, name: str, arguments: dict, key: Hashable = None) -> Any:
        """The checked result of the file's function `name`. EnvError if the call fails."""
        call = Call(name, arguments, key)
        call.result.set_running_or_notify_cancel()  # it runs, even if nobody waits any more
        with self._lock:
            home = self._homes.get(key)
            process = home.process if home else self._free_process()
            if process:
                self._give(call, process)
            else:
                self._waiting.append(call)
        return await asyncio.wrap_future(call.result)

    def end(self, key: Hashable) -> None:
        """Forgets the trajectory `key`, which makes no further call."""
        with self._lock:
            self._homes.pop(key, None)

    def close(self) -> None:
        """Ends all processes. No call may be running."""
        self._guard.socket.close()
        for process in self._processes:
            process.calls.put(None)
        for process in self._processes:
            process.thread.join()
        self._guard.process.wait()

    def next_call(self, process: EnvProcess) -> None:
        """A call of `process` has ended. It gets one that waits, if it has no other."""
        with self._lock:
            process.num_calls -= 1
            if self._waiting and not process.num_calls:
                self._give(self._waiting.popleft(), process)

    def toggle_group(self, number: int) -> None:
        """Tells the guard that a process group has started, or that it has ended."""
        with suppress(OSError):  # the guard was killed
            self._guard.socket.sendall(b"%d\n" % number)

    def _free_process(self) -> EnvProcess | None:
        for process in self._processes:
            if not process.num_calls:
                return process
        if len(self._processes) == self._size:
            return None
        try:
            self._processes.append(EnvProcess(self))
        except EnvError:  # no further thread can start
            if not self._processes:
                raise
            return None
        return self._processes[-1]

    def _give(self, call: Call, process: EnvProcess) -> None:
        call.home = Home(process)
        if call.key is not None:
            self._homes[call.key] = call.home = self._homes.get(call.key, call.home)
        call.home.process.num_calls += 1
        call.home.process.calls.put(call)
