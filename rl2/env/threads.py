"""Calls functions of an env file in threads of this process, each with a limit of time.

A call of a sync function has a thread of its own, which later calls use too. Async ones share one
event loop, in a thread that lives as long as the run: sessions that were opened on the loop stay
usable in later calls.
"""

import asyncio
import concurrent.futures
import contextlib
import copy
import ctypes
import selectors
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from contextvars import Context
from functools import partial
from itertools import dropwhile
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rl2.env.contract import EnvError, LateError
from rl2.env.results import check_result, raising_env_error
from rl2.progress import expecting

# Seconds after which a thread that computes gives Python's lock to one that waits. An engine takes
# the lock hundreds of times a step: with Python's 0.005 it would wait for busy threads most of the
# time. Beside four of them a decoding step took 23.9 s with it, and 6.1 s with 0.0001.
SWITCH_SECONDS = 0.0001
# A stack is shown without the frames of these folders above the env's own.
OUTSIDE = (
    str(Path(asyncio.__file__).parent),
    str(Path(__file__).parent),
    threading.__file__,
    selectors.__file__,  # where an idle loop waits
)


class CallEnded(BaseException):
    """Raised inside a call that takes too long, so that its thread ends."""


class CallThread(threading.Thread):
    """Runs functions, one at a time. It does not delay the process's exit."""

    def __init__(self, name: str):
        super().__init__(name=name, daemon=True)
        self._calls: SimpleQueue[tuple[Callable[[], object], asyncio.Future] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self.is_running = False  # a function

    def call(
        self, function: Callable[[], object], loop: asyncio.AbstractEventLoop
    ) -> asyncio.Future:
        """Runs a function when the last one has ended. Returns its result, a future of the loop."""
        self.is_running = True
        result = loop.create_future()
        self._calls.put((function, result))
        return result

    def finish(self) -> None:
        """Ends the thread when its function has ended."""
        self._calls.put(None)

    def run(self) -> None:
        while call := self._calls.get():
            function, result = call
            try:
                # Without the variables of earlier calls.
                settle = partial(_settle, result.set_result, Context().run(function))
                self._stop_running()
            except BaseException as error:
                settle = partial(_settle, result.set_exception, error)
                self._stop_running()
            # The loop may be closed: then nobody waits for the result.
            with contextlib.suppress(RuntimeError):
                result.get_loop().call_soon_threadsafe(settle)
            del call, function, result, settle  # a call leaves nothing while the thread waits

    def _stop_running(self) -> None:
        with self._lock:
            self.is_running = False

    def end(self) -> None:
        """Raises CallEnded in the function, as soon as it runs Python code."""
        with self._lock:  # it cannot end meanwhile, and its number go to another thread
            if self.is_running:
                number, error = ctypes.c_ulong(self.ident or 0), ctypes.py_object(CallEnded)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(number, error)


def _settle(set_outcome: Callable[[Any], None], outcome: object) -> None:
    """Sets the result or the error of a future, unless it was cancelled: nobody waits for it."""
    with contextlib.suppress(asyncio.InvalidStateError):
        set_outcome(outcome)


def start_thread(name: str) -> CallThread:
    """Returns a new thread that runs. EnvError if the machine has no room for one."""
    sys.setswitchinterval(SWITCH_SECONDS)
    thread = CallThread(name)
    try:
        thread.start()
    except RuntimeError as error:
        raise EnvError(
            f"{name}: {error} (this process has {threading.active_count()}); lower "
            "rollout.env_concurrency, or raise the machine's limits on threads and memory"
        ) from None
    return thread


class LoopThread:
    """An event loop in a thread of its own. EnvError if there is no room for the thread."""

    def __init__(self) -> None:
        self._is_closing = False
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self.loop = self._runner.get_loop()
        self.loop.set_default_executor(_DaemonExecutor())
        self.thread = start_thread("env")
        self.thread.call(self._serve, self.loop)
        self.thread.finish()

    def submit(self, coroutine: Coroutine) -> concurrent.futures.Future:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def close(self) -> None:
        """Ends the loop and what runs on it, as soon as it is not blocked. Does not wait."""
        self._is_closing = True
        self.loop.call_soon_threadsafe(self.loop.stop)

    def describe_work(self) -> str:
        """The function of the env that runs on the loop now, its file and lines; empty if none."""
        frame = sys._current_frames().get(self.thread.ident or 0)
        stack = list(dropwhile(_is_outside, traceback.extract_stack(frame)))
        if not stack:
            return ""
        lines = "".join(traceback.format_list(stack[:2]))
        return f"{stack[0].name} of {stack[0].filename}:\n{lines}"

    def _serve(self) -> None:
        while not self._is_closing:
            # A task of the env may raise SystemExit or stop the loop. The other tasks continue.
            with contextlib.suppress(BaseException):
                self.loop.run_forever()
        self._runner.close()


class Threads:
    """Calls functions with a limit of `timeout` seconds each."""

    def __init__(self, timeout: float):
        self._timeout = timeout
        self._kept: set[CallThread] = set()  # for further calls, as no call was late
        self._idle: list[CallThread] = []  # those of them that run no call
        self._loop: LoopThread | None = None  # the first call of an async function starts it
        self._blocked_at = 0.0  # when a late call last saw that the loop was blocked
        self._blocker = ""  # by what it was blocked then

    async def run(self, name: str, function: Callable, arguments: dict, is_async: bool) -> Any:
        """Returns the checked result of a call. EnvError if it fails or takes too long."""
        if is_async:
            return await self._run_async(name, function, arguments)
        call = partial(_call, name, function, arguments)
        if self._idle:
            thread = self._idle.pop()
        else:
            thread = start_thread(name)
            self._kept.add(thread)
        result = thread.call(call, asyncio.get_running_loop())
        try:
            return await self._wait(name, result)
        except LateError as error:
            raise LateError(
                f"{error}: it is told to end, and goes on if it waits outside of Python code; "
                "rollout.env_isolation=process kills such calls"
            ) from None
        finally:
            if not thread.is_running and thread in self._kept:
                self._idle.append(thread)
            else:
                self._kept.discard(thread)
                thread.finish()
                thread.end()

    def close(self) -> None:
        """Ends the threads, and the loop and what runs on it."""
        for thread in self._kept:  # also those whose call nobody waits for any more
            thread.finish()
        self._kept.clear()
        self._idle.clear()
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()

    async def _run_async(self, name: str, function: Callable, arguments: dict) -> Any:
        if self._loop is None:
            self._loop = LoopThread()
        loop = self._loop
        began_at = time.monotonic()
        coroutine = _call_async(name, function, arguments)
        result = loop.submit(coroutine)
        try:
            value = await self._wait(name, asyncio.wrap_future(result))
        except LateError as error:
            # Another late call may have seen the block before, and ended it.
            if self._blocked_at < began_at and (work := loop.describe_work()):
                self._blocked_at, self._blocker = time.monotonic(), work
            if self._blocked_at < began_at:
                raise
            task = asyncio.current_task(loop.loop)
            if task is not None and task.get_coro() is coroutine:
                loop.thread.end()  # the call itself blocks the loop
            raise LateError(
                f"{error}: the event loop that all async functions of the env share was blocked; "
                "await what takes time, use asyncio.to_thread, or set "
                f"rollout.env_isolation=process. It was blocked by {self._blocker}",
                kind=f"blocked event loop {self._blocker}",
            ) from None
        finally:
            result.cancel()  # ends the call, if it has not ended
        if isinstance(value, EnvError):
            raise value
        return value

    async def _wait(self, name: str, result: asyncio.Future) -> Any:
        """The result of a call that begins now. LateError if it is not there in time."""
        try:
            with expecting(self._timeout):
                async with asyncio.timeout(self._timeout):
                    return await result
        except TimeoutError:  # ours: a function that raises one raises EnvError here
            raise LateError(
                f"{name} did not return within rollout.env_timeout={self._timeout:g} s"
            ) from None


def _call(name: str, function: Callable, arguments: dict) -> Any:
    with raising_env_error(name):
        # The env may change its arguments, so it gets a copy.
        return check_result(name, function(**copy.deepcopy(arguments)))


async def _call_async(name: str, function: Callable, arguments: dict) -> Any:
    """Returns the checked result, or the EnvError: asyncio logs errors that nobody waits for."""
    try:
        with raising_env_error(name):
            return check_result(name, await function(**copy.deepcopy(arguments)))
    except EnvError as error:
        return error


def _is_outside(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(OUTSIDE)


class _DaemonExecutor(concurrent.futures.ThreadPoolExecutor):
    """Runs what the env gives to asyncio.to_thread in threads that do not delay the exit."""

    def submit(self, function: Callable, /, *arguments: object, **named: object) -> Any:
        call = partial(function, *arguments, **named)
        thread = start_thread("env")
        result = thread.call(call, asyncio.get_running_loop())
        thread.finish()
        return result
