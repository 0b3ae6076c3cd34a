"""Runs the functions of an env file in processes: a call that takes too long is killed.

Each process imports the env file and nothing of the trainer, and runs one call at a time. All calls
of a trajectory that keeps state go to one process. If a process ends, the trajectories with state
there fail in their next call, and another one takes its place.
"""

import asyncio
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Hashable
from contextlib import suppress
from typing import Any

from rl2.env.contract import EnvError, LateError
from rl2.env.session import CLOSE
from rl2.env.threads import LoopThread
from rl2.progress import expecting

IMPORT_SECONDS = 300.0  # that the import of the env file may take in a process
# How often to look whether a killed process has ended. It may hang, as on a lost disk.
ENDING_LOOKS = 1000
LOOK_SECONDS = 0.01


class EnvProcess:
    """A process that has imported the env file `path`, and a socket to it.

    It leads a process group, which is killed as a whole. It ends with the thread that starts it.
    """

    def __init__(self, path: str):
        self.is_busy = False  # with a call
        self.has_imported = False
        self.keys: set[Hashable] = set()  # of the trajectories that keep state here
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        with theirs:
            code = (
                f"import sys; sys.path = {list(map(str, sys.path))}; from rl2.env import child; "
                f"child.serve({theirs.fileno()}, {path!r})"
            )
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", code],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except OSError as error:
                self._socket.close()
                text = f"a process of the environment cannot start: {error}"
                raise EnvError(text) from None

    async def ask(self, request: bytes) -> dict[str, Any]:
        """Sends `request` and returns the answer.

        OSError or ValueError if the process ends or its answer is not JSON.
        """
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._socket, request)
        answer = bytearray()
        while not answer.endswith(b"\n"):
            received = await loop.sock_recv(self._socket, 2**16)
            if not received:
                raise ConnectionResetError
            answer += received
        return json.loads(answer)

    async def end(self) -> str:
        """Kills the process and those that it has started. Returns how it ended."""
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._socket.close()
        for _ in range(ENDING_LOOKS):
            if self._process.poll() is not None:
                break
            await asyncio.sleep(LOOK_SECONDS)
        status = self._process.returncode or 0
        if status < 0:
            return f"signal {-status} ({signal.strsignal(-status)})"
        return f"exit status {status}"


class ProcessPool:
    """Runs an env file's functions in up to `size` processes, started when needed.

    `path` is the file, `timeout` the limit of a call in seconds, from when it runs.
    """

    def __init__(self, path: str, timeout: float, size: int):
        self.path = path
        self.timeout = timeout
        self._size = size
        self._processes: list[EnvProcess] = []
        self._lost: set[Hashable] = set()  # trajectories whose state has ended with its process
        # No function of the env runs on this loop, so nothing blocks it.
        self._loop = LoopThread()
        self._freed = asyncio.Event()  # a process has ended its call

    async def run(self, name: str, arguments: dict, key: Hashable = None) -> Any:
        """Returns the checked result of the file's function `name`. EnvError if the call fails.

        `key` names the trajectory, if its calls keep state.
        """
        try:
            request = pickle.dumps((name, key, pickle.dumps(arguments)))
        except Exception as error:
            raise EnvError(f"{name}: a process cannot get its arguments: {error}") from None
        return await asyncio.wrap_future(self._loop.submit(self._run(name, request, key)))

    def close(self) -> None:
        """Ends all processes. No call may be running."""
        self._loop.submit(self._end_all()).result()
        self._loop.close()
        self._loop.thread.join()

    async def _run(self, name: str, request: bytes, key: Hashable) -> Any:
        process = await self._free_process(key)
        if process is None:
            if name != CLOSE:
                raise EnvError(
                    f"{name}: the process of this trajectory has ended, in a call of another one, "
                    "so the state of its earlier calls is lost"
                )
            self._lost.discard(key)
            return None  # nothing is left to close
        process.is_busy = True
        if name == CLOSE:  # a new trajectory of this key may begin before the call ends
            process.keys.discard(key)
        elif key is not None:
            process.keys.add(key)
        try:
            if not process.has_imported:
                await self._import(process)
            limit = f"rollout.env_timeout={self.timeout:g} s"
            return await self._ask(process, name, request, self.timeout, limit)
        finally:
            process.is_busy = False
            self._freed.set()

    async def _free_process(self, key: Hashable) -> EnvProcess | None:
        """A process that runs no call: that of the trajectory, or one with few trajectories.

        None if the process of the trajectory has ended.
        """
        while True:
            if key in self._lost:
                return None
            homes = [process for process in self._processes if key in process.keys]
            free = [process for process in homes or self._processes if not process.is_busy]
            is_crowded = not free or (key is not None and all(process.keys for process in free))
            if is_crowded and not homes and len(self._processes) < self._size:
                self._processes.append(EnvProcess(self.path))
                return self._processes[-1]
            if free:
                return min(free, key=lambda process: len(process.keys))
            self._freed.clear()
            await self._freed.wait()

    async def _import(self, process: EnvProcess) -> None:
        name = "the import of the env file in a process"
        try:
            await self._ask(process, name, b"", IMPORT_SECONDS, f"{IMPORT_SECONDS:g} s")
        except EnvError:
            await self._end(process)
            raise
        process.has_imported = True

    async def _ask(
        self, process: EnvProcess, name: str, request: bytes, seconds: float, limit: str
    ) -> Any:
        """The value that the process answers. EnvError if there is none.

        The process is ended if it does not answer in time, or if the call is cancelled.
        """
        try:
            with expecting(seconds):
                answer = await asyncio.wait_for(process.ask(request), seconds)
        except asyncio.CancelledError:
            await self._end(process)
            raise
        except TimeoutError:
            await self._end(process)
            raise LateError(f"{name} did not return within {limit}") from None
        except (OSError, ValueError):
            how = await self._end(process)
            raise EnvError(f"{name} ended its process: {how}") from None
        if "reason" in answer:
            raise EnvError(answer["reason"], answer["kind"])
        return answer["value"]

    async def _end(self, process: EnvProcess) -> str:
        """Ends a process. Returns how it ended."""
        if process not in self._processes:
            return ""
        self._processes.remove(process)
        self._lost |= process.keys
        return await process.end()

    async def _end_all(self) -> None:
        await asyncio.gather(*map(self._end, list(self._processes)))
