"""Calls the environment, so that no call can stop or block the run.

Async functions run on one event loop, in a thread that lives as long as the run. Other functions
run in a thread for each call, or in a pool of processes. A call that raises, takes too long or
returns a wrong value raises EnvError.
"""

import asyncio
import atexit
import inspect
from collections.abc import Callable, Hashable, Mapping
from copy import copy
from types import MappingProxyType
from typing import Any

from rl2.env.contract import (
    METHOD,
    TOOL,
    EnvError,
    Turn,
    add_parts,
    required_columns,
    select_arguments,
)
from rl2.env.loops import LoopRunner
from rl2.env.processes import ProcessPool
from rl2.env.results import to_messages
from rl2.env.runners import ThreadRunner
from rl2.env.session import CLOSE, Sessions
from rl2.env.syntaxes import ToolCall
from rl2.env.tools import list_tools, object_functions

Key = Hashable
Inputs = Mapping[str, Any]
NO_INPUTS: Inputs = MappingProxyType({})


class Env:
    """The functions of an env file. The methods that call them raise no other error than EnvError.

    There may be several reward functions, by name. The other `functions` have the names that
    rl2/env/contract.py tells, or are None. `timeout` is the limit of a call in seconds, from its
    start. `concurrency` calls run at a time, the others wait. With a `pool`, sync functions run
    there, and async ones too if they share what is kept for a trajectory.

    A `key` names the trajectory that a call belongs to. `inputs` are what functions may ask for
    beside the columns of the `row`.
    """

    def __init__(
        self,
        reward_fn: Callable | dict[str, Callable],
        interact: Callable | None = None,
        timeout: float = 60.0,
        concurrency: int = 32,
        pool: ProcessPool | None = None,
        **functions: Callable | None,
    ):
        self.reward_fns = reward_fn if isinstance(reward_fn, dict) else {"reward_fn": reward_fn}
        functions = {**self.reward_fns, "interact": interact, **functions}
        self.functions = {name: f for name, f in functions.items() if f is not None}
        self.has_object = "make_env" in self.functions
        if self.has_object:
            self.functions |= object_functions(self.functions["make_env"])
            atexit.register(self._close_objects)
        self.tools = list_tools(self.functions)
        self.tool_names = [tool["function"]["name"] for tool in self.tools]
        rewards = [*self.reward_fns, METHOD + "reward", METHOD + "get_reward"]
        self._reward_names = [name for name in rewards if name in self.functions]
        self.judges = bool(self._reward_names) or "group_reward_fn" in self.functions
        signatures = map(inspect.signature, self.functions.values())
        self.asked = {name for signature in signatures for name in signature.parameters}
        # Whether something is kept between the calls of a trajectory.
        self.keeps_state = self.has_object or bool({"state", "base_url"} & self.asked)
        self.concurrency = concurrency
        self.timeout = timeout
        self.path = ""  # of the env file, if there is one
        # A semaphore works in one event loop only: `_slots` belongs to `_caller_loop`.
        self._caller_loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(concurrency)
        self._async_runner = LoopRunner(timeout, may_repeat=not self.keeps_state)
        self._thread_runner = ThreadRunner(timeout)
        self._pool = pool
        self._sessions = Sessions(self.functions)
        self._open_keys: set[Key] = set()  # of trajectories whose object is not closed

    async def begin(self, row: dict, key: Key) -> list[dict]:
        """The prompt of a trajectory. Makes its object, whose `reset` may add to the prompt."""
        messages = row["messages"]
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if not self.has_object:
            return messages
        await self._run("make_env", {}, key)
        name = METHOD + "reset"
        if name not in self.functions:
            return messages
        text = await self._call(name, messages, row, key, {"prompt": messages})
        *before, last = messages
        content = last["content"]
        added = text if isinstance(content, str) else [{"type": "text", "text": text}]
        return [*before, {**last, "content": content + added}] if text else messages

    async def answer(
        self, messages: list[dict], row: dict, key: Key = None, inputs: Inputs = NO_INPUTS
    ) -> Turn:
        """The answer of `step` or `interact` to the last turn; without them, an empty one."""
        for name in (METHOD + "step", "interact"):
            if name in self.functions:
                last = messages[-1] if messages else {}
                inputs = {**inputs, "message": last, "action": last.get("content")}
                return Turn(**await self._call(name, messages, row, key, inputs))
        return Turn()

    async def call_tools(self, calls: list[ToolCall], turn: int, key: Key) -> Turn:
        """The results of the calls, in their order. What is wrong with a call is its result.

        EnvError if they are too long for a turn, or if a tool exits or takes too long.
        """
        messages = []
        for number, call in enumerate(calls):
            result = await self._call_tool(call, key)
            # Templates of Mistral take ids of nine characters only.
            call_id = f"t{turn % 10_000:04}{number % 10_000:04}"
            message = {"role": "tool", "name": call.name, "content": result}
            messages.append({**message, "tool_call_id": call_id})
        return Turn(to_messages("the tools", messages))

    async def run_agent(self, row: dict, key: Key, address: dict[str, str]) -> dict[str, float]:
        """The reward parts that `run` returns, or none. `address` is where it finds the model."""
        available = {**row, **address, "row": row}
        return await self._call("run", row["messages"], available, key, NO_INPUTS)

    async def score(
        self, messages: list[dict], row: dict, key: Key = None, inputs: Inputs = NO_INPUTS
    ) -> dict[str, float]:
        """The reward parts of a conversation, by name. The reward is their sum.

        A plain number becomes {"reward": number}, one of TRL has the name of its function.
        """
        parts: dict[str, float] = {}
        for name in self._reward_names:
            add_parts(parts, await self._call(name, messages, row, key, inputs))
        return parts

    async def score_group(self, trajectories: list[dict]) -> list[dict[str, float]]:
        """The reward parts that `group_reward_fn` gives to each of the recorded trajectories."""
        parts = await self._run("group_reward_fn", {"trajectories": trajectories}, key=None)
        if len(parts) != len(trajectories):
            raise EnvError(f"group_reward_fn: {len(parts)} rewards of {len(trajectories)} answers")
        return parts

    async def extract(
        self, messages: list[dict], row: dict, key: Key = None, inputs: Inputs = NO_INPUTS
    ) -> str | None:
        """The answer in a conversation, which a majority vote compares; None if it has none."""
        return await self._call("extract", messages, row, key, inputs)

    async def end(self, key: Key) -> None:
        """Closes what is kept for the trajectory `key`, which makes no further call."""
        if key in self._open_keys:
            self._open_keys.discard(key)
            await self._run(CLOSE, {}, key)
        elif self._pool:
            self._pool.end(key)

    def in_processes(self, count: int) -> "Env":
        """The same environment, with all functions in processes of its own."""
        env = copy(self)
        env._pool = ProcessPool(self.path, self.timeout, count)
        env.keeps_state = True  # so that async functions run there too
        env._open_keys = set()
        return env

    def close(self) -> None:
        """Ends the event loop of the async functions, and the processes. No call may be running."""
        self._close_objects()
        self._async_runner.close()
        if self._pool:
            self._pool.close()

    def _close_objects(self) -> None:
        """Closes the objects that are left, as a run that fails leaves them."""

        async def end_all() -> None:
            ends = map(self.end, list(self._open_keys))
            await asyncio.gather(*ends, return_exceptions=True)

        asyncio.run(end_all())
        atexit.unregister(self._close_objects)

    async def _call_tool(self, call: ToolCall, key: Key) -> str:
        name = TOOL + call.name
        if call.error:
            return f"error: {call.error}"
        if name not in self.functions:
            return f"error: no tool {call.name!r}; there are {', '.join(self.tool_names)}"
        try:
            inspect.signature(self.functions[name]).bind(**call.arguments)
            return await self._run(name, call.arguments, key)
        except TypeError as error:  # of bind: _run raises EnvError only
            return f"error: {call.name}: {error}"
        except EnvError as error:
            if error.kind != TOOL:
                raise
            return str(error)

    async def _call(
        self, name: str, messages: list[dict], row: dict, key: Key, inputs: Inputs
    ) -> Any:
        """The checked result of a function, with the arguments that it asks for."""
        function = self.functions[name]
        missing = [column for column in required_columns(function) if column not in row]
        if missing:
            raise EnvError(f"{name} needs {', '.join(missing)}, which the row does not have")
        return await self._run(name, select_arguments(function, messages, row, inputs), key)

    async def _run(self, name: str, arguments: dict, key: Key) -> Any:
        function = self.functions.get(name)
        is_async = function is not None and _is_async(function)
        if self.keeps_state and key is not None and name != CLOSE:
            self._open_keys.add(key)
        if self._pool and (self.keeps_state or not is_async):  # its processes are the slots
            return await self._pool.run(name, arguments, key, self.keeps_state)
        runner = self._async_runner if is_async else self._thread_runner
        if self._caller_loop is not asyncio.get_running_loop():
            self._caller_loop = asyncio.get_running_loop()
            self._slots = asyncio.Semaphore(self.concurrency)
        async with self._slots:
            with self._sessions.open(name, key) as bound:
                return await runner.run(name, bound, arguments)


def _is_async(function: Callable) -> bool:
    """Whether calling `function`, or an object with an async `__call__`, gives a coroutine."""
    call_method = type(function).__call__
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call_method)
