"""Runs the sync functions of an env file in threads of this process.

A runner has `run(name, function, arguments)`. It returns the checked result, or it raises EnvError
when the call fails or takes too long. rl2/env/loops.py runs async ones.
"""

import asyncio
import concurrent.futures
import copy
import logging
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from rl2.env.contract import EnvError, LateError
from rl2.env.results import check_result, raising_env_error
from rl2.progress import expecting
from rl2.thread_exceptions import raise_in_thread

# Seconds after which a thread that computes gives Python's lock to one that waits. An engine takes
# the lock hundreds of times a step: with Python's 0.005 it would wait for busy threads most of the
# time. Beside four of them a decoding step took 23.9 s with it, and 6.1 s with 0.0001.
SWITCH_SECONDS = 0.0001
END_SECONDS = 5.0  # between two attempts to end the thread of a call that took too long

logger = logging.getLogger(__name__)


class CallEnded(BaseException):
    """Raised inside a call that takes too long, so that its thread ends."""


class CallThread(threading.Thread):
    """Runs a function. `result` is done when it has ended. It does not delay the process's exit."""

    def __init__(self, name: str, function: Callable[[], Any]):
        super().__init__(name=name, daemon=True)
        self.result: concurrent.futures.Future = concurrent.futures.Future()
        # The future cannot be cancelled from here on, so a late result is not an error.
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
            if not self.result.done():
                raise_in_thread(self, CallEnded)


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
        """Tries again to end them: an env may catch an exception and continue."""
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


def _call(name: str, function: Callable, arguments: dict) -> Any:
    with raising_env_error(name):
        # The env may change its arguments, so it gets a copy.
        return check_result(name, function, function(**copy.deepcopy(arguments)))


async def wait_for_result(name: str, result: concurrent.futures.Future, timeout: float) -> Any:
    """Returns the result of a call that begins now.

    EnvError if it takes longer than `timeout` seconds.
    """
    task = asyncio.wrap_future(result)
    with expecting(timeout):
        done, _ = await asyncio.wait([task], timeout=timeout)
    if not done:
        task.cancel()
        raise LateError(f"{name} did not return within rollout.env_timeout={timeout:g} s")
    return task.result()


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
