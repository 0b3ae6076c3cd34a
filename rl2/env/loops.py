"""Runs the async functions of an env file on one event loop, which is replaced if a call blocks it.

Time in which other calls block the loop does not count as time of a call.
"""

import asyncio
import concurrent.futures
import contextlib
import copy
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from itertools import dropwhile
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from rl2.env.contract import EnvError, LateError
from rl2.env.results import check_result, raising_env_error
from rl2.env.runners import start_thread
from rl2.progress import expecting

# An event loop is blocked if it does not respond between that many looks.
NUM_LOOKS = 10
LOOK_SECONDS = 0.1
BEAT_SECONDS = 0.1  # between two marks that a loop makes while it is not blocked
TOLERATED_SECONDS = 0.1  # of delay of a mark; longer ones are time in which the loop was blocked
# How many times its limit a call gets in addition, at most, for time in which others blocked it.
MAX_EXCUSED = 2.0
MAX_PLAYS = 3  # of a call in loops that are replaced
ADVICE = "await what takes time, use asyncio.to_thread, or set rollout.env_isolation=process"
# A stack is shown without the frames of these folders above the env's own, and shortened.
OUTSIDE = (str(Path(asyncio.__file__).parent), str(Path(__file__).parent), threading.__file__)


@dataclass(eq=False)
class Call:
    """A call of an async function. `result` is running once the function has begun."""

    name: str
    function: Callable
    arguments: dict
    result: concurrent.futures.Future = field(default_factory=concurrent.futures.Future)

    def fail(self, error: EnvError) -> None:
        """Ends the wait for the call, unless it has ended."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self.result.set_exception(error)


class LoopReplacedError(EnvError):
    """The loop of a call was replaced before the call had ended, so it can be played again."""


_current_call: ContextVar[Call] = ContextVar("_current_call")  # also in the tasks that it starts


class EnvLoop:
    """An event loop in a thread of its own. It measures for how long it is blocked."""

    def __init__(self) -> None:
        self.calls: set[Call] = set()  # that have not ended
        self.is_unblocking = False  # one of the waiting calls takes care of that
        self.failure: EnvError | None = None  # why it was replaced
        self.blocker = ""  # what was last found to block it
        self.blocker_found_at = 0.0
        self._is_closing = False
        self._owners: WeakKeyDictionary[asyncio.Task, Call] = WeakKeyDictionary()
        self._last_beat = time.monotonic()
        self._blocked_before = 0.0  # seconds until the last beat
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self.loop = self._runner.get_loop()
        self.loop.set_default_executor(_DaemonExecutor())
        self.loop.set_task_factory(self._make_task)
        self.loop.call_soon(self._beat)
        try:
            self.thread = start_thread("env", self._serve)
        except EnvError:
            self.loop.close()
            raise

    def begin(self, call: Call) -> concurrent.futures.Future:
        """Starts a call. Its coroutine ends if the future is cancelled."""
        self.calls.add(call)
        return asyncio.run_coroutine_threadsafe(self._run(call), self.loop)

    def end(self, call: Call) -> None:
        """Forgets a call. A loop that was replaced ends with the last one."""
        self.calls.discard(call)
        if self.failure and not self.calls:
            self.close()

    def close(self) -> None:
        """Ends the loop and what runs on it, as soon as it is not blocked."""
        if not self._is_closing:
            self._is_closing = True
            self.loop.call_soon_threadsafe(self.loop.stop)

    @property
    def blocked_for(self) -> float:
        """The seconds for which something blocks the loop now."""
        seconds = time.monotonic() - self._last_beat - BEAT_SECONDS
        return seconds if seconds > TOLERATED_SECONDS else 0.0

    @property
    def blocked_seconds(self) -> float:
        """All seconds for which something blocked the loop so far."""
        return self._blocked_before + self.blocked_for

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

    def find_blocker(self) -> tuple[Call | None, str]:
        """(the call that runs now, or None if it is not known; what and where it is)."""
        task = asyncio.current_task(self.loop)
        frame = sys._current_frames().get(self.thread.ident or 0)
        stack = list(dropwhile(_is_outside, traceback.extract_stack(frame)))
        if len(stack) > 4:  # the env's function, and where a library waits
            stack = stack[:2] + stack[-2:]
        call = self._owners.get(task) if task else None
        name = call.name if call else "an async function"
        place = f" of {stack[0].filename}" if stack else ""
        self.blocker = f"{name}{place}:\n{''.join(traceback.format_list(stack))}"
        self.blocker_found_at = time.monotonic()
        return call, self.blocker

    def _serve(self) -> None:
        while not self._is_closing:
            # A task of the env may raise SystemExit or stop the loop. The other tasks continue.
            with contextlib.suppress(BaseException):
                self.loop.run_forever()
        self._runner.close()

    def _beat(self) -> None:
        try:
            self._blocked_before += self.blocked_for
            self._last_beat = time.monotonic()
        finally:  # the exception that ends a late call may arrive here
            self.loop.call_later(BEAT_SECONDS, self._beat)

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any
    ) -> asyncio.Task[Any]:
        task: asyncio.Task = asyncio.Task(coroutine, loop=loop, **options)
        call = _current_call.get(None)
        if call is not None:
            self._owners[task] = call
        return task

    async def _run(self, call: Call) -> None:
        if call.result.done() or not call.result.set_running_or_notify_cancel():
            return
        _current_call.set(call)
        task = asyncio.current_task()
        assert task is not None
        self._owners[task] = call
        try:
            with raising_env_error(call.name):
                # The env may change its arguments, so it gets a copy.
                returned = await call.function(**copy.deepcopy(call.arguments))
                value = check_result(call.name, call.function, returned)
        except EnvError as error:
            call.fail(error)
            return
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # nobody waits any more
            call.result.set_result(value)


class LoopRunner:
    """Runs async functions on one event loop, in a thread that lives as long as the run.

    Sessions that were opened on the loop stay usable in later calls. A call that blocks the loop
    for longer than `timeout`, the limit of a call in seconds, is ended. If that does not help, a
    new loop takes new calls. Calls that the old one has begun are played again there if
    `may_repeat`, and else continue where they are as soon as the old loop is free.
    """

    def __init__(self, timeout: float, may_repeat: bool = True):
        self._timeout = timeout
        self._may_repeat = may_repeat
        self._loop: EnvLoop | None = None  # the first call starts it

    async def run(self, name: str, function: Callable, arguments: dict) -> Any:
        """Returns the checked result of a call.

        EnvError if it fails, takes too long or blocks the loop.
        """
        num_plays = 1
        while True:
            if self._loop is None:
                self._loop = EnvLoop()
            loop, call = self._loop, Call(name, function, arguments)
            task = loop.begin(call)
            try:
                return await self._wait(call, loop)
            except LoopReplacedError:
                num_plays += 1
                if num_plays > MAX_PLAYS:
                    raise
            finally:
                loop.end(call)
                task.cancel()  # ends the call, if it has not ended

    def close(self) -> None:
        """Ends the loop and what runs on it."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()

    async def _wait(self, call: Call, loop: EnvLoop) -> Any:
        """Returns the result of a call that begins now."""
        begin, blocked_before = time.monotonic(), loop.blocked_seconds
        result = asyncio.wrap_future(call.result)
        with expecting(self._timeout):
            while True:
                # A loop that is blocked now will be free or replaced, so that is always excused.
                blocked_now = loop.blocked_for if loop.failure is None else 0.0
                excused = loop.blocked_seconds - blocked_before - blocked_now
                excused = min(excused, MAX_EXCUSED * self._timeout) + blocked_now
                left = begin + self._timeout + excused - time.monotonic()
                if left <= 0 and not call.result.done():
                    break
                # Until the call is late, or the one that blocks the loop now, if there is one.
                until = min(left, self._timeout - loop.blocked_for + LOOK_SECONDS)
                done, _ = await asyncio.wait([result], timeout=max(until, LOOK_SECONDS / 2))
                if done:
                    return result.result()
                if loop.blocked_for > self._timeout:
                    await self._unblock(loop)
        result.cancel()  # a call that has not begun will not
        if loop.failure:
            raise loop.failure
        if loop.blocker_found_at > begin:
            raise self._blocked(call.name, loop.blocker)
        blocked = loop.blocked_seconds - blocked_before
        if blocked > self._timeout:
            reason = f"the event loop that all calls share was blocked for {blocked:.1f} s of that"
            raise LateError(f"{self._late(call.name)}: {reason}; {ADVICE}", "blocked event loop")
        raise LateError(self._late(call.name))

    def _late(self, name: str) -> str:
        return f"{name} did not return within rollout.env_timeout={self._timeout:g} s"

    def _blocked(self, name: str, blocker: str) -> LateError:
        return LateError(
            f"{self._late(name)}: the event loop that all async functions of the env share was "
            f"blocked; {ADVICE}. It was blocked by {blocker}",
            kind=f"blocked event loop {blocker}",
        )

    async def _unblock(self, loop: EnvLoop) -> None:
        """Ends the call that blocks the loop, or replaces the loop if the call cannot be ended."""
        if loop is not self._loop or loop.is_unblocking:
            return
        loop.is_unblocking = True
        try:
            if await loop.responds():
                return
            blocker, place = loop.find_blocker()
            error = self._blocked(blocker.name if blocker else "an async function", place)
            if blocker is not None:
                blocker.fail(error)
            loop.thread.end()
            if not await loop.responds():
                self._replace(loop, error)
        finally:
            loop.is_unblocking = False

    def _replace(self, loop: EnvLoop, error: EnvError) -> None:
        self._loop = None
        loop.failure = error
        for call in list(loop.calls):
            if self._may_repeat or not call.result.running():
                call.fail(LoopReplacedError(str(error), error.kind))


def _is_outside(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(OUTSIDE)


class _DaemonExecutor(concurrent.futures.ThreadPoolExecutor):
    """Runs what the env gives to asyncio.to_thread in threads that do not delay the exit."""

    def submit(self, function: Callable, /, *arguments: Any, **named: Any) -> Any:
        return start_thread("env", partial(function, *arguments, **named)).result
