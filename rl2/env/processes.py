"""Runs the sync functions of an env file in processes: a call that takes too long is killed.

Each process imports the env file and nothing of the trainer, and runs one call at a time. All
calls of a trajectory go to one process, so that state which the env keeps between them stays.
A process that ends is replaced by a new one. The trajectories that keep state there fail in their
next call, since that state is lost. All others continue in the new process. The call that ended
the process runs once more if its trajectory keeps no state: it may not have been the cause.
"""

import asyncio
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rl2.env.contract import EnvError, LateError
from rl2.env.runners import start_thread
from rl2.env.session import CLOSE
from rl2.progress import expecting

IMPORT_SECONDS = 300.0  # that the import of the env file may take in a process
# How often to look whether a killed process has ended. It may hang, as on a lost disk.
ENDING_LOOKS = 1000
LOOK_SECONDS = 0.01


class Child:
    """A Python process that runs a function of rl2/env/child.py, and a socket to it."""

    def __init__(self, function: str, *arguments: Any):
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        with theirs:
            text = ", ".join(map(repr, (theirs.fileno(), *arguments)))
            code = f"import sys; sys.path = {list(map(str, sys.path))}; from rl2.env import child"
            self.process = subprocess.Popen(
                [sys.executable, "-c", f"{code}; child.{function}({text})"],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a process group, which is killed as a whole
            )

    async def ask(self, request: bytes) -> dict[str, Any]:
        """Sends `request` and returns the answer.

        OSError or ValueError if the process ends or its answer is not JSON.
        """
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self.socket, request)
        answer = bytearray()
        while not answer.endswith(b"\n"):
            received = await loop.sock_recv(self.socket, 2**16)
            if not received:
                raise ConnectionResetError
            answer += received
        return json.loads(answer)

    async def end(self) -> str:
        """Kills the process and those that it has started. Returns how it ended."""
        with suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.socket.close()
        for _ in range(ENDING_LOOKS):
            if self.process.poll() is not None:
                break
            await asyncio.sleep(LOOK_SECONDS)
        status = self.process.returncode or 0
        if status < 0:
            return f"signal {-status} ({signal.strsignal(-status)})"
        return f"exit status {status}"


class EnvProcess:
    """A process of the pool. When its child ends, the next call starts a new one."""

    def __init__(self, pool: "ProcessPool"):
        self.lock = asyncio.Lock()  # held by the call that runs
        self._pool = pool
        self._child: Child | None = None
        self._num_ended = 0  # children that have ended

    async def run(self, name: str, arguments: dict, key: Hashable, home: "Home") -> Any:
        """Returns the checked result of a call, after those that wait here.

        EnvError if it fails.
        """
        async with self.lock:
            if self._child is not None and self._child.process.poll() is not None:
                await self.end_child()  # it has ended between two calls
            if home.keeps_state and not self.has_state(home) and home.num_ended is not None:
                if name == CLOSE:
                    return None  # nothing is left to close
                raise EnvError(
                    f"{name}: the process of this trajectory has ended, in a call of another one, "
                    "so the state of its earlier calls is lost"
                )
            try:
                request = pickle.dumps((name, key, pickle.dumps(arguments)))
            except Exception as error:
                raise EnvError(f"{name}: a process cannot get its arguments: {error}") from None
            try:
                return await self._call(name, request, home)
            except ProcessEndedError:
                if home.keeps_state:
                    raise
                return await self._call(name, request, home)

    def has_state(self, home: "Home") -> bool:
        """Returns whether the state of a trajectory is in the child that runs now."""
        return home.process is self and home.keeps_state and home.num_ended == self._num_ended

    async def _call(self, name: str, request: bytes, home: "Home") -> Any:
        if self._child is None:
            await self._start_child()
        home.num_ended = self._num_ended
        limit = self._pool.timeout
        return await self._ask(name, request, limit, f"rollout.env_timeout={limit:g} s", home)

    async def end_child(self) -> str:
        """Ends the child, if there is one. Returns how it ended."""
        if self._child is None:
            return ""
        child, self._child = self._child, None
        self._num_ended += 1
        how = await child.end()
        self._pool.toggle_group(child.process.pid)
        return how

    async def _start_child(self) -> None:
        try:
            self._child = Child("serve", os.getpid(), self._pool.path)
        except OSError as error:
            raise EnvError(f"a process of the environment cannot start: {error}") from None
        self._pool.toggle_group(self._child.process.pid)
        try:
            name = "the import of the env file in a process"
            await self._ask(name, b"", IMPORT_SECONDS, f"{IMPORT_SECONDS:g} s")
        except EnvError:
            await self.end_child()
            raise

    async def _ask(
        self, name: str, request: bytes, seconds: float, limit: str, home: "Home | None" = None
    ) -> Any:
        """The value that the child answers. EnvError if there is none; the child may be ended.

        If the call is cancelled, the child is ended, unless another trajectory than that of `home`
        keeps state there. Then the call keeps the process busy until it returns or is late.
        """
        assert self._child is not None
        answering = asyncio.ensure_future(self._child.ask(request))
        deadline = asyncio.get_running_loop().time() + seconds
        with expecting(seconds):
            try:
                await asyncio.wait([answering], timeout=seconds)
            except asyncio.CancelledError:
                if self._pool.keep_state(self, other_than=home):
                    left = deadline - asyncio.get_running_loop().time()
                    await asyncio.wait([answering], timeout=max(left, 0.0))
                if not answering.done() or answering.exception():
                    await self._stop(answering)
                raise
        if not answering.done():
            await self._stop(answering)
            raise LateError(f"{name} did not return within {limit}")
        try:
            answer = answering.result()
        except (OSError, ValueError):
            how = await self.end_child()
            raise ProcessEndedError(f"{name} ended its process: {how}") from None
        if "reason" in answer:
            raise EnvError(answer["reason"], answer["kind"])
        return answer["value"]

    async def _stop(self, answering: asyncio.Future) -> None:
        """Ends the child, from which nobody reads an answer any more."""
        answering.cancel()
        await asyncio.gather(answering, return_exceptions=True)
        await self.end_child()


class ProcessEndedError(EnvError):
    """The process of a call ended, by itself or by something else than its limit of time."""


@dataclass(eq=False)
class Home:
    """The process of a trajectory. `num_ended` is that of the process in the earlier calls."""

    process: EnvProcess
    keeps_state: bool
    num_ended: int | None = None  # None before the first call


class ProcessPool:
    """Runs an env file's sync functions in up to `size` processes, started when needed.

    `path` is the file, `timeout` the limit of a call in seconds, from when it runs.
    """

    def __init__(self, path: str, timeout: float, size: int):
        self.path = path
        self.timeout = timeout
        self._processes = [EnvProcess(self) for _ in range(size)]
        self._homes: dict[Hashable, Home] = {}  # by trajectory
        self._closing: list[Home] = []  # of trajectories that make their last call
        self._waiting: deque[asyncio.Future[EnvProcess]] = deque()  # calls without a home
        self._guard = Child("end_groups")
        # A thread that lives as long as the children: Linux ends a child with the thread that
        # forked it. No function of the env runs there, so nothing blocks it.
        self._loop = asyncio.new_event_loop()
        self._thread = start_thread("env processes", self._loop.run_forever)

    async def run(
        self, name: str, arguments: dict, key: Hashable = None, keeps_state: bool = False
    ) -> Any:
        """Returns the checked result of the file's function `name`. EnvError if the call fails.

        `keeps_state` says whether the trajectory `key` needs what its earlier calls have left.
        """
        work = self._run(name, arguments, key, keeps_state)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def keep_state(self, process: EnvProcess, other_than: "Home | None") -> bool:
        """Returns whether trajectories, other than that of a home, keep state in a process."""
        homes = [*self._homes.values(), *self._closing]
        return any(home is not other_than and process.has_state(home) for home in homes)

    def end(self, key: Hashable) -> None:
        """Forgets the trajectory `key`, which makes no further call."""
        self._homes.pop(key, None)

    def close(self) -> None:
        """Ends all processes. No call may be running."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def toggle_group(self, number: int) -> None:
        """Tells the guard that a process group has started, or that it has ended."""
        with suppress(OSError):  # the guard was killed
            self._guard.socket.send(b"%d\n" % number)

    async def _run(self, name: str, arguments: dict, key: Hashable, keeps_state: bool) -> Any:
        home = self._homes.get(key)
        if home is None:
            home = Home(await self._free_process(keeps_state), keeps_state)
        if name == CLOSE:  # a new trajectory of this key may begin before the call ends
            self._homes.pop(key, None)
            self._closing.append(home)
        elif key is not None:
            self._homes[key] = home
        try:
            return await home.process.run(name, arguments, key, home)
        finally:
            if name == CLOSE:
                self._closing.remove(home)
            self._offer(home.process)

    async def _free_process(self, keeps_state: bool) -> EnvProcess:
        """Returns a process that runs no call: for a trajectory with state one with few others.

        Other calls take the first one, so that no more processes than necessary start.
        """
        free = [process for process in self._processes if not process.lock.locked()]
        if free and keeps_state:
            num_homes = Counter(id(home.process) for home in list(self._homes.values()))
            return min(free, key=lambda process: num_homes[id(process)])
        if free:
            return free[0]
        waiting = self._loop.create_future()
        self._waiting.append(waiting)
        try:
            return await waiting
        except asyncio.CancelledError:
            if not waiting.cancelled():  # it has got a process, which the next one may have
                self._offer(waiting.result())
            raise

    def _offer(self, process: EnvProcess) -> None:
        """Gives a process to the first call that waits for any, if no other call waits for it."""
        while self._waiting and not process.lock.locked():
            waiting = self._waiting.popleft()
            if not waiting.done():  # it was cancelled
                waiting.set_result(process)
                return

    async def _close(self) -> None:
        await asyncio.gather(*(process.end_child() for process in self._processes))
        await self._guard.end()
