"""Calls the environment, so that no call can stop or block the run.

Async functions run on one event loop, in a thread that lives as long as the run. Other functions
run in a thread for each call, or in a pool of processes. A call that raises, takes too long or
returns a wrong value raises EnvError.
"""

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from rl2.env.contract import EnvError, required_columns, select_arguments
from rl2.env.processes import ProcessPool
from rl2.env.runners import LoopRunner, ThreadRunner


class Env:
    """The functions of an env file. The methods that call them raise no other error than EnvError.

    `interact` and `extract` are None if the file has no such function. `timeout` is the limit of a
    call in seconds, from its start. `concurrency` calls run at a time, the others wait. A `key`
    names the trajectory that a call belongs to. With a `pool`, sync functions run there. There may
    be several reward functions, by name.
    """

    def __init__(
        self,
        reward_fn: Callable | dict[str, Callable],
        interact: Callable | None = None,
        timeout: float = 60.0,
        concurrency: int = 32,
        pool: ProcessPool | None = None,
        extract: Callable | None = None,
    ):
        self.reward_fns = reward_fn if isinstance(reward_fn, dict) else {"reward_fn": reward_fn}
        self.interact_fn = interact
        self.extract_fn = extract
        self.concurrency = concurrency
        # A semaphore works in one event loop only: `_slots` belongs to `_caller_loop`.
        self._caller_loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(concurrency)
        self._async_runner = LoopRunner(timeout)
        self._thread_runner = ThreadRunner(timeout)
        self._pool = pool

    async def score(self, messages: list[dict], row: dict, key: Any = None) -> dict[str, float]:
        """The reward parts of a conversation, by name. The reward is their sum.

        A plain number becomes {"reward": number}, one of TRL has the name of its function.
        """
        parts: dict[str, float] = {}
        for name, function in self.reward_fns.items():
            parts |= await self._call(name, function, messages, row, key)
        return parts

    async def interact(self, messages: list[dict], row: dict, key: Any = None) -> list[dict]:
        """The new messages that answer the last turn; an empty list ends the conversation."""
        assert self.interact_fn is not None, "the env file has no interact(messages)"
        return await self._call("interact", self.interact_fn, messages, row, key)

    async def extract(self, messages: list[dict], row: dict, key: Any = None) -> str | None:
        """The answer in a conversation, which a majority vote compares; None if it has none."""
        assert self.extract_fn is not None, "the env file has no extract(messages)"
        return await self._call("extract", self.extract_fn, messages, row, key)

    def end(self, key: Any) -> None:
        """The trajectory `key` makes no further call."""
        if self._pool:
            self._pool.end(key)

    def close(self) -> None:
        """Ends the event loop of the async functions, and the processes. No call may be running."""
        self._async_runner.close()
        if self._pool:
            self._pool.close()

    async def _call(
        self, name: str, function: Callable, messages: list[dict], row: dict, key: Any
    ) -> Any:
        missing = [column for column in required_columns(function) if column not in row]
        if missing:
            raise EnvError(f"{name} needs {', '.join(missing)}, which the row does not have")
        arguments = select_arguments(function, messages, row)
        is_async = _is_async(function)
        if self._pool and not is_async:  # its processes are the slots
            return await self._pool.run(name, arguments, key)
        runner = self._async_runner if is_async else self._thread_runner
        if self._caller_loop is not asyncio.get_running_loop():
            self._caller_loop = asyncio.get_running_loop()
            self._slots = asyncio.Semaphore(self.concurrency)
        async with self._slots:
            return await runner.run(name, function, arguments)


def _is_async(function: Callable) -> bool:
    """Whether calling `function`, or an object with an async `__call__`, gives a coroutine."""
    call_method = type(function).__call__
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call_method)
