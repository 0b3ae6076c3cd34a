"""Calls the environment, so that no call can stop or block the run.

Async functions run on one event loop, in a thread that lives as long as the run, other functions in
threads, one call at a time in each; or all of them in a pool of processes. A call that raises,
takes too long or returns a wrong value raises EnvError.
"""

import asyncio
import inspect
import os
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from rl2 import cleanup
from rl2.env.call_syntaxes import ToolCall
from rl2.env.contract import (
    API_KEY,
    METHOD,
    PLACEHOLDER_KEY,
    TOOL,
    EnvError,
    TextTurn,
    Turn,
    add_parts,
    required_columns,
    select_arguments,
)
from rl2.env.processes import ProcessPool
from rl2.env.results import to_messages
from rl2.env.session import CLOSE, Sessions
from rl2.env.spec import EnvSpec
from rl2.env.threads import Threads

Key = Hashable


class Env:
    """Calls the functions of an env file. The methods raise no other error than EnvError.

    `timeout` is the limit of a call in seconds, from its start. `concurrency` calls run at a time,
    the others wait. With a `pool`, all functions run there. `path` is the env file, if there is
    one.

    A `key` names the trajectory that a call belongs to. `inputs` are what functions may ask for
    beside the columns of the `row`.
    """

    def __init__(
        self,
        spec: EnvSpec,
        timeout: float = 60.0,
        concurrency: int = 32,
        pool: ProcessPool | None = None,
        path: str = "",
    ):
        if spec.run is not None:
            # Clients of OpenAI need a key to start. It is no secret: the address of a trajectory
            # is, and so is the key that `run` may ask for. Processes that start later inherit it.
            os.environ[API_KEY] = os.environ.get(API_KEY) or PLACEHOLDER_KEY
        self.spec = spec
        self.timeout = timeout
        self.concurrency = concurrency
        self.path = path
        self.has_object = spec.make_env is not None
        self.tools = spec.tool_schemas
        self.asked = spec.parameters()
        self.keeps_state = spec.keeps_state
        # A semaphore works in one event loop only: `_slots` belongs to `_caller_loop`.
        self._caller_loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(concurrency)
        self._threads = Threads(timeout)
        self._pool = pool
        self._sessions = Sessions(spec.functions())
        self.open_keys: set[Key] = set()  # of trajectories with an open object
        cleanup.register(self.close, at_exit=False)
        if self.has_object:
            # A process that ends leaves threads alone: one that wakes up then may crash Python.
            cleanup.register(self._close_objects)

    async def begin(self, row: dict, key: Key) -> list[dict]:
        """Returns the prompt of a trajectory.

        Makes its object; `reset` may add to the prompt.
        """
        messages = row["messages"]
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if self.spec.make_env is None:
            return messages
        await self._run("make_env", self.spec.make_env, {}, key)
        reset = self.spec.methods.get("reset")
        if reset is None:
            return messages
        inputs = {"prompt": messages}
        text = await self._call(METHOD + "reset", reset, messages, row, key, inputs)
        last = messages[-1]
        return messages[:-1] + [last | {"content": last["content"] + text}]

    async def answer(
        self, messages: list[dict], row: dict, key: Key = None, inputs: Mapping[str, object] = {}
    ) -> Turn:
        """The answer of `step` or `interact` to the last turn; without them, an empty one."""
        name, function = "interact", self.spec.interact
        if "step" in self.spec.methods:
            name, function = METHOD + "step", self.spec.methods["step"]
        if function is None:
            return Turn()
        last = messages[-1] if messages else {}
        inputs = dict(inputs) | {"message": last, "action": last.get("content")}
        return Turn(**await self._call(name, function, messages, row, key, inputs))

    async def step(self, state: str, action: str, extra_info: Any, key: Key = None) -> TextTurn:
        """The answer of the file's `step` to a turn, whose prompt is the text `state`."""
        arguments = {"state": state, "action": action, "extra_info": extra_info}
        return TextTurn(**await self._run("step", self.spec.step, arguments, key))

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
            messages.append(message | {"tool_call_id": call_id})
        return Turn(to_messages("the tools", messages))

    async def run_agent(
        self, row: dict, key: Key, inputs: Mapping[str, object]
    ) -> dict[str, float]:
        """The reward parts that `run` or `play` returns, or none.

        `inputs` are what it asks the model with: an address or a function.
        """
        name, function = self.spec.agent, self.spec.run or self.spec.play
        assert name and function, "the env file has neither run nor play"
        available = row | dict(inputs) | {"row": row}
        return await self._call(name, function, row["messages"], available, key, {})

    async def score(
        self, messages: list[dict], row: dict, key: Key = None, inputs: Mapping[str, object] = {}
    ) -> dict[str, float]:
        """Returns the reward parts of a conversation, by name. The reward is their sum.

        A plain number becomes {"reward": number}.
        """
        parts: dict[str, float] = {}
        for name, function in self.spec.reward_functions().items():
            add_parts(parts, await self._call(name, function, messages, row, key, inputs))
        return parts

    async def score_group(self, trajectories: list[dict]) -> list[dict[str, float]]:
        """The reward parts that `group_reward_fn` gives to each of the recorded trajectories."""
        function = self.spec.group_reward_fn
        assert function is not None, "the env file has no group_reward_fn"
        arguments = {"trajectories": trajectories}
        parts = await self._run("group_reward_fn", function, arguments, key=None)
        if len(parts) != len(trajectories):
            raise EnvError(f"group_reward_fn: {len(parts)} rewards of {len(trajectories)} answers")
        return parts

    async def end(self, key: Key) -> None:
        """Closes what is kept for the trajectory `key`, which makes no further call."""
        if key in self.open_keys:
            self.open_keys.discard(key)
            await self._run(CLOSE, self.spec.methods.get("close"), {}, key)

    def in_processes(self, count: int) -> "Env":
        """Returns the same environment with its functions in new processes."""
        pool = ProcessPool(self.path, self.timeout, count)
        return Env(self.spec, self.timeout, count, pool, self.path)

    def close(self) -> None:
        """Closes objects, ends the event loop of the async functions, and the processes."""
        cleanup.unregister(self.close)
        self._close_objects()
        self._threads.close()
        if self._pool:
            self._pool.close()

    def _close_objects(self) -> None:
        """Closes the objects that are left, as a run that fails leaves them."""

        async def end_all() -> None:
            ends = map(self.end, list(self.open_keys))
            await asyncio.gather(*ends, return_exceptions=True)

        cleanup.unregister(self._close_objects)
        asyncio.run(end_all())

    async def _call_tool(self, call: ToolCall, key: Key) -> str:
        if call.error:
            return f"error: {call.error}"
        if call.name not in self.spec.tools:
            return f"error: no tool {call.name!r}; there are {', '.join(self.spec.tools)}"
        tool = self.spec.tools[call.name]
        try:
            inspect.signature(tool).bind(**call.arguments)
            return await self._run(TOOL + call.name, tool, call.arguments, key)
        except TypeError as error:  # of bind: _run raises EnvError only
            return f"error: {call.name}: {error}"
        except EnvError as error:
            if error.kind != TOOL:
                raise
            return str(error)

    async def _call(
        self,
        name: str,
        function: Callable,
        messages: list[dict],
        row: dict,
        key: Key,
        inputs: Mapping[str, object],
    ) -> Any:
        """Returns the checked result of a function, with the arguments that it asks for."""
        missing = [column for column in required_columns(function) if column not in row]
        if missing:
            raise EnvError(f"{name} needs {', '.join(missing)}, which the row does not have")
        arguments = select_arguments(function, messages, row, inputs)
        return await self._run(name, function, arguments, key)

    async def _run(self, name: str, function: Callable | None, arguments: dict, key: Key) -> Any:
        """The checked result of a call. `name` is that of the function in messages and processes.

        CLOSE may have no function: it also ends an object without the method `close`.
        """
        if not self.keeps_state:
            key = None
        if key is not None and name != CLOSE:
            self.open_keys.add(key)
        if self._pool:  # its processes are the slots
            return await self._pool.run(name, arguments, key)
        is_async = function is not None and _is_async(function)
        if self._caller_loop is not asyncio.get_running_loop():
            self._caller_loop = asyncio.get_running_loop()
            self._slots = asyncio.Semaphore(self.concurrency)
        async with self._slots:
            with self._sessions.open(name, key) as bound:
                return await self._threads.run(name, bound, arguments, is_async)


def _is_async(function: Callable) -> bool:
    """Whether calling `function`, or an object with an async `__call__`, gives a coroutine."""
    call_method = type(function).__call__
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call_method)
