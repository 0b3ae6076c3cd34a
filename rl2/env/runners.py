"""Runs the functions of an env file in threads of this process.

A runner has `run(name, function, arguments)`. It returns the checked result, or it raises EnvError
when the call fails or takes too long.
"""

import asyncio
import concurrent.futures
import contextlib
import copy
import ctypes
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from rl2.env.contract import EnvError
from rl2.env.results import check_result, raising_env_error
from rl2.progress import expecting

# Seconds after which a thread that computes gives Python's lock to one that waits. An engine takes
# the lock hundreds of times a step: with Python's 0.005 it would wait for busy threads most of the
# time. benchmarks/env_threads.py measures it.
SWITCH_SECONDS = 0.0001
# An event loop is blocked if it does not respond between so many looks.
NUM_LOOKS = 10
LOOK_SECONDS = 0.1
END_SECONDS = 5.0  # between two attempts to end the thread of a call that took too long

logger = logging.getLogger(__name__)


class CallEnded(BaseException):
    """Raised inside a call that takes too long, so that its thread ends."""


class CallThread(threading.Thread):
    """Runs a function. `result` is done when it has ended. It does not delay the process's exit."""

    def __init__(self, name: str, function: Callable[[], Any]):
        super().__init__(name=name, daemon=True)
        self.result: concurrent.futures.Future = concurrent.futures.Future()
        # The future cannot be cancelled from here on, so a result that comes too late is no error.
        self.result.set_running_or_notify_cancel()
        self._function = function
        self._lock = threading.Lock()

    def run(self) -> None:
        try:
            value = self._function()
            with self._lock:
                self.result.set_result(value)
        except BaseException as error:
            with self._lock:
                if not self.result.done():
                    self.result.set_exception(error)

    def end(self) -> None:
        """Raises CallEnded in the function, as soon as it runs Python code."""
        with self._lock:  # it cannot end meanwhile, and its number go to another thread
            if self.is_alive() and not self.result.done():
                number = ctypes.c_ulong(self.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(CallEnded))


class ThreadRunner:
    """Runs each call in a thread of its own.

    A thread pool would not do: calls that hang would occupy it, and the interpreter would wait for
    them at exit. `timeout` is the limit of a call in seconds.
    """

    def __init__(self, timeout: float):
        self._timeout = timeout
        # Threads of calls that took too long, and when each was last told to end.
        self._overdue: dict[CallThread, float] = {}
        self._has_warned = False

    async def run(self, name: str, function: Callable, arguments: dict) -> Any:
        self._end_overdue_calls()
        thread = start_thread(name, partial(_call, name, function, arguments))
        try:
            return await wait_for_result(name, thread.result, self._timeout)
        finally:
            if not thread.result.done():
                thread.end()
                self._overdue[thread] = time.monotonic()

    def _end_overdue_calls(self) -> None:
        """Tries again to end them: an env may catch an exception and go on."""
        num_stuck = 0
        for thread, last_time in list(self._overdue.items()):
            if not thread.is_alive():
                del self._overdue[thread]
            elif time.monotonic() - last_time > END_SECONDS:
                thread.end()
                self._overdue[thread] = time.monotonic()
                num_stuck += 1
        if num_stuck and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%d calls of the environment took too long and still run %g s later: they wait "
                "outside of Python code, or catch every exception. More of them are not told",
                num_stuck,
                END_SECONDS,
            )


class LoopRunner:
    """Runs async functions on one event loop, in a thread that lives as long as the run.

    Sessions that were opened on the loop stay usable in later calls. A loop that a call blocks is
    replaced. `timeout` is the limit of a call in seconds.
    """

    def __init__(self, timeout: float):
        self._timeout = timeout
        self._runner: asyncio.Runner | None = None  # the first call starts it
        self._thread: CallThread | None = None
        self._is_unblocking = False
        self._calls: set[concurrent.futures.Future] = set()  # that have not ended

    async def run(self, name: str, function: Callable, arguments: dict) -> Any:
        while True:
            runner = self._runner or self._start()
            result: concurrent.futures.Future = concurrent.futures.Future()
            work = _run_coroutine(result, name, function, arguments)
            task = asyncio.run_coroutine_threadsafe(work, runner.get_loop())
            self._calls.add(result)
            try:
                return await wait_for_result(name, result, self._timeout)
            except EnvError as error:
                if not result.done():
                    error = await self._find_blocker(runner, error)
                # A call that could not start, since another one blocked the loop, starts again.
                if not result.cancel() and not result.cancelled():
                    raise error from None
            finally:
                self._calls.discard(result)
                task.cancel()  # ends the call, if it has not ended

    def close(self) -> None:
        """Ends the loop and what runs on it."""
        runner, self._runner = self._runner, None
        if runner:
            runner.get_loop().call_soon_threadsafe(runner.get_loop().stop)

    def _start(self) -> asyncio.Runner:
        runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        runner.get_loop().set_default_executor(_DaemonExecutor())

        def serve() -> None:
            while True:
                # A task of the env may raise SystemExit or stop the loop. The other tasks go on.
                with contextlib.suppress(BaseException):
                    runner.get_loop().run_forever()
                if self._runner is not runner:
                    return runner.close()

        self._thread = start_thread("env", serve)
        self._runner = runner
        return runner

    async def _find_blocker(self, runner: asyncio.Runner, late: EnvError) -> EnvError:
        """`late`, or where a call blocks the loop of `runner`. The loop is then freed or replaced.

        Replacing it fails all calls that have started there.
        """
        loop = runner.get_loop()
        if await _responds(loop):
            return late
        assert self._thread is not None
        frame = sys._current_frames().get(self._thread.ident or 0)
        stack = "".join(traceback.format_stack(frame, limit=3))
        error = EnvError(
            f"{late}: the event loop that all async functions of the env share was blocked. "
            f"Await what takes time, or use asyncio.to_thread. It was blocked here:\n{stack}",
            kind=f"blocked event loop {stack}",
        )
        if runner is self._runner and not self._is_unblocking:
            self._is_unblocking = True
            self._thread.end()
            try:
                if not await _responds(loop):
                    self.close()
                    for result in list(self._calls):
                        if result.running():
                            result.set_exception(error)
            finally:
                self._is_unblocking = False
        return error


class _DaemonExecutor(concurrent.futures.ThreadPoolExecutor):
    """Runs what the env gives to asyncio.to_thread in threads that do not delay the exit."""

    def submit(self, function: Callable, /, *arguments: Any, **named: Any) -> Any:
        return start_thread("env", partial(function, *arguments, **named)).result


def _call(name: str, function: Callable, arguments: dict) -> Any:
    with raising_env_error(name):
        # The env may change its arguments, so it gets a copy.
        return check_result(name, function, function(**copy.deepcopy(arguments)))


async def _run_coroutine(
    result: concurrent.futures.Future, name: str, function: Callable, arguments: dict
) -> None:
    if not result.set_running_or_notify_cancel():
        return
    try:
        with raising_env_error(name):
            returned = await function(**copy.deepcopy(arguments))
            result.set_result(check_result(name, function, returned))
    except EnvError as error:
        if not result.done():
            result.set_exception(error)


async def wait_for_result(name: str, result: concurrent.futures.Future, timeout: float) -> Any:
    """The result of a call that begins now. EnvError if it takes longer than `timeout` seconds."""
    task = asyncio.wrap_future(result)
    with expecting(timeout):
        done, _ = await asyncio.wait([task], timeout=timeout)
    if not done:
        task.cancel()
        raise EnvError(f"{name} did not return within rollout.env_timeout={timeout:g} s")
    return task.result()


async def _responds(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether the loop of another thread responds soon. A closed one does not."""
    response = threading.Event()
    if not loop.is_closed():
        loop.call_soon_threadsafe(response.set)
    # Not one long wait: something may stop both threads for as long.
    for _ in range(NUM_LOOKS):
        await asyncio.sleep(LOOK_SECONDS)
        if response.is_set():
            return True
    return False


def start_thread(name: str, function: Callable[[], Any]) -> CallThread:
    """Runs `function` in a new thread. EnvError if the machine has no room for one."""
    sys.setswitchinterval(SWITCH_SECONDS)
    thread = CallThread(name, function)
    try:
        thread.start()
    except RuntimeError as error:
        raise EnvError(
            f"{name}: {error} (this process has {threading.active_count()}); lower "
            "rollout.env_concurrency, or raise the machine's limits on threads and memory"
        ) from None
    return thread
