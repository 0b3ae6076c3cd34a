"""Calls the environment, so that no call can stop or block the run.

Async functions run on one event loop, in a thread that lives as long as the run, so that sessions
opened there stay usable. Other functions run in a thread for each call. A call that raises, takes
too long or returns a wrong value raises EnvError.
"""

import asyncio
import concurrent.futures
import copy
import inspect
import json
import numbers
import os
import reprlib
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl2.env.contract import EnvError, is_env_message, required_columns, select_arguments
from rl2.progress import expecting

# Sync calls that run at the same time. Python threads share one interpreter lock: with more of
# them, calls would time out while they wait for it.
MAX_SYNC_CALLS = 32
LARGEST_REWARD = 3e38  # float32 overflows above it
# Frames of these files are left out of tracebacks: those of rl2/env and of the import system.
OWN_FILES = (str(Path(__file__).parent) + os.sep, "<frozen importlib")


class Env:
    """The functions of an env file. `score` and `interact` raise no other error than EnvError.

    `interact` is None if the file has no such function. `timeout` is the limit of a call in
    seconds.
    """

    def __init__(
        self, reward_fn: Callable, interact: Callable | None = None, timeout: float = 60.0
    ):
        self.reward_fn = reward_fn
        self.interact_fn = interact
        self.timeout = timeout
        # A semaphore works in one event loop only: `_sync_slots` belongs to `_caller_loop`.
        self._caller_loop: asyncio.AbstractEventLoop | None = None
        self._sync_slots = asyncio.Semaphore(MAX_SYNC_CALLS)
        self._async_loop = asyncio.new_event_loop()
        threading.Thread(target=self._async_loop.run_forever, name="env", daemon=True).start()

    async def score(self, messages: list[dict], row: dict) -> dict[str, float]:
        """The reward parts of a conversation, by name. The reward is their sum.

        A plain number becomes {"reward": number}.
        """
        return _to_reward_parts(await self._call("reward_fn", self.reward_fn, messages, row))

    async def interact(self, messages: list[dict], row: dict) -> list[dict]:
        """The new messages that answer the last turn; an empty list ends the conversation."""
        assert self.interact_fn is not None, "the env file has no interact(messages)"
        return _to_messages(await self._call("interact", self.interact_fn, messages, row))

    async def _call(self, name: str, function: Callable, messages: list[dict], row: dict) -> Any:
        missing = [column for column in required_columns(function) if column not in row]
        if missing:
            raise EnvError(f"{name} needs {', '.join(missing)}, which the row does not have")
        arguments = select_arguments(function, messages, row)
        if _is_async(function):
            coroutine = _run_coroutine(name, function, arguments)
            future = asyncio.run_coroutine_threadsafe(coroutine, self._async_loop)
            return await self._wait(name, future)
        if self._caller_loop is not asyncio.get_running_loop():
            self._caller_loop = asyncio.get_running_loop()
            self._sync_slots = asyncio.Semaphore(MAX_SYNC_CALLS)
        async with self._sync_slots:
            return await self._wait(name, _start_thread(name, function, arguments))

    async def _wait(self, name: str, future: concurrent.futures.Future) -> Any:
        task = asyncio.wrap_future(future)
        with expecting(self.timeout):
            done, _ = await asyncio.wait([task], timeout=self.timeout)
        if not done:
            # This ends a coroutine. A thread cannot be ended: it goes on, but frees its slot.
            task.cancel()
            raise EnvError(f"{name} did not return within rollout.env_timeout={self.timeout:g} s")
        if task.cancelled():
            raise EnvError(f"{name} cancelled itself")
        return task.result()


def user_traceback(error: BaseException) -> tuple[str, str]:
    """The traceback of `error` without the frames of rl2: (its text, "file:line file:line ...")."""
    frame = error.__traceback__
    while frame and frame.tb_frame.f_code.co_filename.startswith(OWN_FILES):
        frame = frame.tb_next
    summaries = traceback.extract_tb(frame)
    locations = " ".join(f"{summary.filename}:{summary.lineno}" for summary in summaries)
    return "".join(traceback.format_exception(type(error), error, frame)), locations


def _is_async(function: Callable) -> bool:
    """Whether calling `function`, or an object with an async `__call__`, gives a coroutine."""
    call_method = type(function).__call__
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call_method)


async def _run_coroutine(name: str, function: Callable, arguments: dict) -> Any:
    try:
        # The env may change its arguments, so it gets a copy.
        return await function(**copy.deepcopy(arguments))
    except (Exception, SystemExit) as error:
        raise _to_env_error(name, error) from error


def _start_thread(name: str, function: Callable, arguments: dict) -> concurrent.futures.Future:
    """Calls `function` in a new thread and returns the future of its result.

    A thread pool would not do: calls that hang would occupy it, and the interpreter would wait for
    them at exit.
    """
    future: concurrent.futures.Future = concurrent.futures.Future()
    # The future cannot be cancelled from here on, so a result that comes too late is no error.
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            # The env may change its arguments, so it gets a copy.
            future.set_result(function(**copy.deepcopy(arguments)))
        except (Exception, SystemExit) as error:
            future.set_exception(_to_env_error(name, error))

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def _to_env_error(name: str, error: BaseException) -> EnvError:
    text, locations = user_traceback(error)
    return EnvError(f"{name} raised:\n{text}", kind=f"{type(error).__name__} {locations}")


def _to_reward_parts(result: Any) -> dict[str, float]:
    """What `reward_fn` returned, as reward parts by name. EnvError unless all are finite."""
    if isinstance(result, list | tuple):
        raise EnvError(
            f"reward_fn: expected the number of one conversation, not a list: {_describe(result)}",
            kind="type of reward",
        )
    parts = result if isinstance(result, dict) else {"reward": result}
    if not parts or not all(isinstance(name, str) for name in parts):
        raise EnvError(
            f"reward_fn: expected a number or a dict of numbers, got {_describe(result)}",
            kind="type of reward",
        )
    for name, value in parts.items():
        is_number = isinstance(value, numbers.Real)
        if not is_number:
            raise EnvError(
                f"reward_fn: expected {name} to be a number, got {_describe(value)}",
                kind=f"type of {name}",
            )
        if not abs(value) <= LARGEST_REWARD:  # NaN compares as false, so it is caught too
            raise EnvError(
                f"reward_fn: expected {name} to be finite, got {_describe(value)}",
                kind=f"range of {name}",
            )
    return {name: float(value) for name, value in parts.items()}


def _to_messages(result: Any) -> list[dict]:
    """What `interact` returned, copied. EnvError unless it is a list of messages and JSON."""
    if not isinstance(result, list) or not all(map(is_env_message, result)):
        raise EnvError(
            "interact: expected a list of new messages {'role': ..., 'content': ...}, none of them "
            f"from the assistant (an empty list ends the conversation), got {_describe(result)}",
            kind="result of interact",
        )
    try:
        # The run folder records messages as JSON. A copy, since the env may change its own later.
        return json.loads(json.dumps(result))
    except (TypeError, ValueError) as error:
        raise EnvError(
            f"interact: {error} in {_describe(result)}", kind="result of interact"
        ) from error


def _describe(value: Any) -> str:
    return f"{reprlib.repr(value)} ({type(value).__name__})"
