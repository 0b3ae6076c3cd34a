r"""Environments of verifiers (github.com/PrimeIntellect-ai/verifiers) by the name of their taskset:
pip install 'verifiers>=0.4,<0.5', and the package of the taskset.

Row: {"messages": [...], "taskset": "my_taskset", "settings": {}, "index": 7, "key": "..."}.
`settings` are those of the taskset. The key is that of the task, which is loaded again from its
index. This file writes the rows, with the prompts of the tasks:

    python envs/verifiers_tasks.py my_taskset 1000 train.jsonl NAME=VALUE

The `run` of the environment plays: each turn that it asks of its agent is one of the policy, and
what it answers is the next message. The rewards of the trace are the reward parts, with their
weights. An environment of several agents is refused, and so is a task that needs a container or a
server of tools. Hooks of a task get no runtime.

One step on a CPU, with a small model in the folder MODEL. The taskset of these rows is a file that
Python must find, as an installed one is: PYTHONPATH=examples/rows

    python -m rl2.trainer.ppo rollout.env_path=verifiers_tasks actor.model_name=MODEL \
        data.path=examples/rows/verifiers_tasks.jsonl trainer.max_steps=1 \
        data.prompts_per_rollout=3 data.responses_per_prompt=2 \
        rollout.train_sampling_params.max_new_tokens=16 rollout.max_turns=4
"""

import argparse
import asyncio
import contextlib
import functools
import itertools
import json
import threading

LOCK = threading.Lock()


class make_env:
    """An episode. `run` of the environment waits while the policy writes a turn."""

    async def reset(self, taskset, settings, index, key):
        self.player = None
        # The import takes seconds, in which other calls of the event loop continue.
        loaded = await asyncio.to_thread(load, taskset, json.dumps(settings, sort_keys=True))
        task = loaded.task(index)
        if task.key != key:
            raise ValueError(f"{taskset}: task {index} has changed: write the rows again")
        self.questions = asyncio.Queue()  # of the environment; None when it has ended
        self.episode = asyncio.create_task(self._run(loaded.env, task))
        return await self._next_question()

    async def step(self, action):
        self.player.replies.put_nowait(action)
        question = await self._next_question()
        return {"done": True} if question is None else question

    async def reward(self):
        if not self.episode.done():  # the limit of turns has come first
            self.player.replies.put_nowait(None)
            await self.episode
        rewards = self.player.trace.rewards
        return {name: reward.value for name, reward in rewards.items() if reward} or 0.0

    async def close(self):
        if hasattr(self, "episode"):
            self.episode.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self.episode

    async def _run(self, env, task):
        import verifiers.v1 as vf

        def make_player(name, config):
            self.player = Player(self.questions, config)
            return self.player

        try:
            await env.run(task, vf.Agents(env.config, make=make_player))
        finally:
            self.questions.put_nowait(None)

    async def _next_question(self):
        """What the environment says before the next turn of the policy; None if it has ended."""
        question = await self.questions.get()
        if question is None:
            await self.episode  # raises what it has raised
        return question


class Player:
    """What the environment takes for its agent. It has `run` and `interaction` of an agent."""

    def __init__(self, questions, config):
        self.questions, self.config = questions, config
        self.replies = asyncio.Queue()  # of the policy; None if there is no further turn
        self.is_over = False

    async def run(self, task, **options):
        async with self.interaction(task) as interaction:
            await interaction.turn()
        return self.trace

    @contextlib.asynccontextmanager
    async def interaction(self, task, **options):
        import verifiers.v1 as vf
        from verifiers.v1.state import state_cls

        if task.NEEDS_CONTAINER or task.toolsets(task.config):
            raise ValueError(f"{type(task).__name__} needs a container or tools")
        data = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        self.trace = vf.Trace(
            task=data, state=state_cls(type(task))(), agent=vf.AgentInfo(config=self.config)
        )
        for message in prompt_of(task):
            self.add(message)
        await task.setup(self.trace, None)
        yield self
        await task.finalize(self.trace, None)
        self.trace.ok = True
        self.trace.stop("agent_completed")
        await task.score(self.trace)

    async def turn(self, message=None):
        """Returns the policy's answer to a message, as a segment of verifiers."""
        from verifiers.v1.agent import Segment
        from verifiers.v1.types import AssistantMessage

        if self.is_over:
            raise RuntimeError("the environment asks for a turn after the last one")
        if message is not None:
            self.add({"role": "user", "content": message})
        self.questions.put_nowait(message or "")
        reply = await self.replies.get()
        if reply is None:
            self.is_over = True
            return Segment([], terminated=True)
        self.add({"role": "assistant", "content": reply}, sampled=True)
        return Segment([AssistantMessage(content=reply)])

    def add(self, message, sampled=False):
        from verifiers.v1.graph import MessageNode

        nodes = self.trace.nodes
        parent = len(nodes) - 1 if nodes else None
        nodes.append(MessageNode(parent=parent, message=message, sampled=sampled))


class Loaded:
    """An environment and its tasks, which are read as far as they are asked for."""

    def __init__(self, taskset, settings):
        from verifiers.v1.configs.agent import agent_config_fields
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        config = resolve_env_config({"taskset": {"id": taskset, **settings}})
        if len(agent_config_fields(config)) != 1:
            raise ValueError(f"{taskset}: expected one agent, {[*agent_config_fields(config)]}")
        self.env = load_environment(config)
        self.rest = iter(self.env.taskset)
        self.tasks = []

    def task(self, index):
        self.tasks += itertools.islice(self.rest, max(0, index + 1 - len(self.tasks)))
        return self.tasks[index]


def load(taskset, settings):
    """Returns the taskset with these settings, which is loaded once."""
    with LOCK:
        return load_once(taskset, settings)


@functools.cache
def load_once(taskset, settings):
    return Loaded(taskset, json.loads(settings))


def prompt_of(task):
    """Returns the messages of a task; none if the user opens the conversation."""
    messages, data = [], task.data
    if data.system_prompt is not None:
        messages.append({"role": "system", "content": data.system_prompt})
    if isinstance(data.prompt, str):
        messages.append({"role": "user", "content": data.prompt})
    else:
        messages += [m.model_dump(exclude_none=True) for m in data.prompt or []]
    return messages


def make_rows(taskset, settings, count):
    loaded = Loaded(taskset, settings)
    for index, task in enumerate(itertools.islice(loaded.env.taskset, count)):
        messages = prompt_of(task)
        if task.data.prompt is None:
            messages.append({"role": "user", "content": ""})  # the first question is added to it
        row = {"messages": messages, "taskset": taskset, "settings": settings}
        yield row | {"index": index, "key": task.key}


def read_setting(word):
    """name=value, where the value is JSON or else a text."""
    name, equals, value = word.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{word!r}: expected NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def main():
    parser = argparse.ArgumentParser(description="Writes rows of a taskset of verifiers.")
    parser.add_argument("taskset", help="the name of its package")
    parser.add_argument("count", type=int)
    parser.add_argument("file", help="JSON lines")
    parser.add_argument("settings", nargs="*", type=read_setting, help="NAME=VALUE of the taskset")
    arguments = parser.parse_args()
    rows = make_rows(arguments.taskset, dict(arguments.settings), arguments.count)
    with open(arguments.file, "w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
