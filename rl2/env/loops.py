"""Runs the async functions of an env file on one event loop, in a thread of its own."""

import asyncio
import concurrent.futures
import contextlib
import copy
import math
import selectors
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from itertools import dropwhile
from pathlib import Path
from typing import Any

from rl2.env.contract import EnvError, LateError
from rl2.env.results import check_result, raising_env_error
from rl2.env.runners import start_thread, wait_for_result

# An event loop is blocked if it does not respond between that many looks.
NUM_LOOKS = 4
LOOK_SECONDS = 0.05
ADVICE = "await what takes time, use asyncio.to_thread, or set rollout.env_isolation=process"
# A stack is shown without the frames of these folders above the env's own, and shortened.
OUTSIDE = (
    str(Path(asyncio.__file__).parent),
    str(Path(__file__).parent),
    threading.__file__,
    selectors.__file__,  # where an idle loop waits
)


class EnvLoop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._is_closing = False
        self.block = -math.inf, ""  # when a block was last found, and what blocked
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self.loop = self._runner.get_loop()
        self.loop.set_default_executor(_DaemonExecutor())
        try:
            self.thread = start_thread("env", self._serve)
        except EnvError:
            self.loop.close()
            raise

    def close(self) -> None:
        """Ends the loop and what runs on it, as soon as it is not blocked. Does not wait."""
        self._is_closing = True
        self.loop.call_soon_threadsafe(self.loop.stop)

    async def responds(self) -> bool:
        """Returns whether the loop responds soon."""
        response = threading.Event()
        self.loop.call_soon_threadsafe(response.set)
        # Not one long wait: something may stop both threads for as long.
        for _ in range(NUM_LOOKS):
            await asyncio.sleep(LOOK_SECONDS)
            if response.is_set():
                return True
        return False

    def describe_work(self) -> str:
        """What runs on the loop now: the function of the env, its file, and the stack.

        Empty if nothing of the env runs.
        """
        frame = sys._current_frames().get(self.thread.ident or 0)
        stack = list(dropwhile(_is_outside, traceback.extract_stack(frame)))
        if not stack:
            return ""
        place = f"{stack[0].name} of {stack[0].filename}"
        if len(stack) > 4:  # the env's function, and where a library waits
            stack = stack[:2] + stack[-2:]
        return f"{place}:\n{''.join(traceback.format_list(stack))}"

    def _serve(self) -> None:
        while not self._is_closing:
            # A task of the env may raise SystemExit or stop the loop. The other tasks continue.
            with contextlib.suppress(BaseException):
                self.loop.run_forever()
        self._runner.close()


class LoopRunner:
    """Runs async functions on one event loop, in a thread that lives as long as the run.

    Sessions that were opened on the loop stay usable in later calls. `timeout` is the limit of a
    call in seconds. A call that blocks the loop blocks all others: those that take too long
    meanwhile fail too, and say what blocked them.
    """

    def __init__(self, timeout: float):
        self._timeout = timeout
        self._loop: EnvLoop | None = None  # the first call starts it

    async def run(self, name: str, function: Callable, arguments: dict) -> Any:
        """Returns the checked result of a call. EnvError if it fails or takes too long."""
        if self._loop is None:
            self._loop = EnvLoop()
        loop = self._loop
        began = time.monotonic()
        coroutine = _call(name, function, arguments)
        result = asyncio.run_coroutine_threadsafe(coroutine, loop.loop)
        try:
            value = await wait_for_result(name, result, self._timeout)
        except LateError as error:
            work = loop.describe_work()
            if work and not await loop.responds():
                loop.block = time.monotonic(), work
                task = asyncio.current_task(loop.loop)
                if task is not None and task.get_coro() is coroutine:
                    loop.thread.end()  # the call itself blocks the loop
            found_at, work = loop.block
            if found_at < began:  # it has ended before this call began
                raise
            raise LateError(
                f"{error}: the event loop that all async functions of the env share was blocked; "
                f"{ADVICE}. It was blocked by {work}",
                kind=f"blocked event loop {work}",
            ) from None
        finally:
            result.cancel()  # ends the call, if it has not ended
        if isinstance(value, EnvError):
            raise value
        return value

    def close(self) -> None:
        """Ends the loop and what runs on it."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()


async def _call(name: str, function: Callable, arguments: dict) -> Any:
    """Returns the checked result, or the EnvError: asyncio logs errors that nobody waits for."""
    try:
        with raising_env_error(name):
            # The env may change its arguments, so it gets a copy.
            return check_result(name, function, await function(**copy.deepcopy(arguments)))
    except EnvError as error:
        return error


def _is_outside(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(OUTSIDE)


class _DaemonExecutor(concurrent.futures.ThreadPoolExecutor):
    """Runs what the env gives to asyncio.to_thread in threads that do not delay the exit."""

    def submit(self, function: Callable, /, *arguments: Any, **named: Any) -> Any:
        return start_thread("env", partial(function, *arguments, **named)).result
