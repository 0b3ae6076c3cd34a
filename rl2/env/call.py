"""The user's env file: loaded, checked before the model is, and called so that nothing it does can stop the run.

Async functions run on an event loop of their own, which lives as long as the run (as do the sessions they open there);
others run in threads. Whatever goes wrong inside is an EnvError, whose trajectory the caller masks.
"""

import asyncio
import concurrent.futures
import copy
import inspect
import json
import logging
import numbers
import reprlib
import threading
import traceback
from pathlib import Path

from rl2.env.contract import EnvError, _arguments, _is_message, _required

MAX_THREADS = (
    32  # sync calls at a time; more would time out waiting for Python's one interpreter lock
)


LARGEST = 3e38  # a reward must fit float32


logger = logging.getLogger(__name__)


class Env:
    """The functions of an env file. Every method raises EnvError, and nothing else, when the env fails."""

    def __init__(self, reward_fn, interact=None, timeout: float = 60.0):
        self.reward_fn, self.interact_fn, self.timeout = reward_fn, interact, timeout
        self._caller, self._slots = None, None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="env", daemon=True).start()

    async def score(self, messages: list[dict], row: dict) -> dict[str, float]:
        """Reward parts by name, of which the reward is the sum; a plain number is {"reward": number}."""
        result = await self._call("reward_fn", self.reward_fn, messages, row)
        parts = result if isinstance(result, dict) else {"reward": result}
        if not parts or not all(isinstance(name, str) for name in parts):
            raise EnvError(
                f"reward_fn: expected a number or a dict of numbers, got {_show(result)}",
                "type of reward",
            )
        for name, value in parts.items():
            if not isinstance(value, numbers.Real):
                raise EnvError(
                    f"reward_fn: expected {name} to be a number, got {_show(value)}",
                    f"type of {name}",
                )
            if not abs(value) <= LARGEST:  # written so that it catches NaN too
                raise EnvError(
                    f"reward_fn: expected {name} to be finite, got {_show(value)}",
                    f"range of {name}",
                )
        return {name: float(value) for name, value in parts.items()}

    async def interact(self, messages: list[dict], row: dict) -> list[dict]:
        """The new messages that answer the last turn; none ends the trajectory."""
        result = await self._call("interact", self.interact_fn, messages, row)
        if not isinstance(result, list) or not all(map(_is_message, result)):
            raise EnvError(
                "interact: expected a list (empty to end) of new messages {'role': ..., 'content': ...}, none of them "
                f"the assistant's, got {_show(result)}",
                "result of interact",
            )
        try:
            return json.loads(
                json.dumps(result)
            )  # they are written to rollouts/, and the env may change its own
        except (TypeError, ValueError) as error:
            raise EnvError(f"interact: {error} in {_show(result)}", "result of interact") from error

    async def _call(self, name, function, messages, row):
        if missing := [column for column in _required(function) if column not in row]:
            raise EnvError(f"{name} needs {', '.join(missing)}, which the row does not have")
        arguments = _arguments(function, messages, row)
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            type(function).__call__
        ):
            future = asyncio.run_coroutine_threadsafe(
                _awaited(name, function, arguments), self._loop
            )
            return await self._wait(name, future)
        if (
            self._caller is not asyncio.get_running_loop()
        ):  # a semaphore serves the loop it was first used in
            self._caller, self._slots = asyncio.get_running_loop(), asyncio.Semaphore(MAX_THREADS)
        async with self._slots:
            return await self._wait(name, _in_thread(name, function, arguments))

    async def _wait(self, name, future):
        task = asyncio.wrap_future(future)
        done, _ = await asyncio.wait([task], timeout=self.timeout)
        if not done:
            task.cancel()  # ends a coroutine; a thread cannot be ended, and is left behind with its slot free again
            raise EnvError(f"{name} did not return within rollout.env_timeout={self.timeout:g} s")
        if task.cancelled():
            raise EnvError(f"{name} cancelled itself")
        return task.result()


def _show(value) -> str:
    return f"{reprlib.repr(value)} ({type(value).__name__})"


async def _awaited(name, function, arguments):
    try:
        return await function(**copy.deepcopy(arguments))
    except Exception as error:
        raise _failure(name, error) from error


def _in_thread(name, function, arguments) -> concurrent.futures.Future:
    """A thread of its own for each call: a pool would be used up by calls that hang, and would join them at exit."""
    future = concurrent.futures.Future()
    future.set_running_or_notify_cancel()  # from here on a cancel leaves it alone, so a late result is no error

    def run():
        try:
            future.set_result(
                function(**copy.deepcopy(arguments))
            )  # an env may change what it is given
        except Exception as error:
            future.set_exception(_failure(name, error))

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def _failure(name, error) -> EnvError:
    text, places = _traceback(error)
    return EnvError(f"{name} raised:\n{text}", f"{type(error).__name__} {places}")


def _traceback(error) -> tuple[str, str]:
    """(text, places) of the frames below our own: the user's."""
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename.startswith(
        (str(Path(__file__).parent), "<frozen importlib")
    ):
        frames = frames.tb_next
    places = " ".join(f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(frames))
    return "".join(traceback.format_exception(type(error), error, frames)), places


class EnvFailures:
    """Counts failed calls, logs each kind of them once, and stops the run when they are too many.

    The traceback of a failure is logged in full the first time; the same error at the same lines only counts.
    """

    def __init__(self, max_share: float):
        self.max_share = max_share
        self.count = 0
        self.last = None
        self._seen = set()

    def record(self, error: EnvError) -> None:
        self.count += 1
        self.last = error
        if error.kind not in self._seen:
            self._seen.add(error.kind)
            logger.warning(
                "env failure (trajectory masked; more like it are only counted): %s", error
            )

    def check(self, failures: int, total: int) -> None:
        """RuntimeError when too large a share of trajectories failed. Counts are of all ranks, so that all stop."""
        if failures > self.max_share * total:
            reason = self.last or "see the log of the other processes"
            raise RuntimeError(
                f"the env failed on {failures} of {total} trajectories, more than the share "
                f"rollout.max_env_failures={self.max_share:g}. The last failure here: {reason}"
            )
