"""A trajectory: its types, and how it is played turn by turn between engine and environment."""

import asyncio
import json
import math
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any

from rl2.batch import Sample
from rl2.data.chat import ChatTemplate
from rl2.data.examples import Example
from rl2.engine.base import Engine, Generation, SamplingParams, Seed
from rl2.env.call import Env
from rl2.env.contract import EnvError, EnvFailures

MAX_RECORDED_CHARACTERS = 2000  # of a column of a row, in the records


@dataclass
class Trajectory:
    """A conversation of the policy with the environment, and the training sequences it becomes."""

    id: int
    group: int
    messages: list[dict]
    row: dict = field(default_factory=dict)  # of the data; after a rollout, on the first process
    samples: list[Sample] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)  # by name of the part
    weights: dict[str, float] = field(default_factory=dict)  # of parts in the reward; 1 elsewhere
    # stop or length, of the last turn; failed, if the environment did; "" while it is being played.
    finish_reason: str = ""
    num_turns: int = 0  # finished turns of the assistant
    longest_turn: int = 0  # tokens of the longest of these turns
    # (version of the weights, number of tokens that they sampled), in order of time.
    versions: list[tuple[int, int]] = field(default_factory=list)
    partial_tokens: int = 0  # tokens of a turn that a pause interrupted
    row_index: int = -1  # of its row in the data
    # Whether its group is outside rollout.filter, so that it is not trained; None without a filter.
    is_filtered: bool | None = None

    @property
    def reward(self) -> float:
        """The weighted sum of the reward parts."""
        return sum(self.weights.get(name, 1.0) * part for name, part in self.rewards.items())

    @property
    def length(self) -> int:
        """The number of tokens that the policy sampled; 0 if the environment failed."""
        if self.finish_reason == "failed":
            return 0
        return sum(num_tokens for _, num_tokens in self.versions)

    def record(self) -> dict[str, Any]:
        """What the run folder keeps of it: everything but the tokens."""
        return {
            "id": self.id,
            "group": self.group,
            "row": {k: _recorded(v) for k, v in self.row.items() if k != "messages"},
            "messages": self.messages,
            "rewards": self.rewards,
            "weights": self.weights,
            "reward": self.reward,
            "length": self.length,
            "num_turns": self.num_turns,
            "finish_reason": self.finish_reason,
            "versions": self.versions,
            "is_filtered": self.is_filtered,
        }


@dataclass
class Group:
    """A prompt with the trajectories that start from it."""

    id: int
    prompt: Example
    trajectories: list[Trajectory]
    rows_done: int = 0  # the position in the data behind its prompt

    @property
    def is_done(self) -> bool:
        return all(trajectory.finish_reason for trajectory in self.trajectories)


def mean_reward(trajectories: list[Trajectory]) -> float:
    """The mean over the trajectories whose environment did not fail; NaN where all failed."""
    rewards = [t.reward for t in trajectories if t.finish_reason != "failed"]
    return sum(rewards) / len(rewards) if rewards else math.nan


def begin_group(
    group_id: int, prompt: Example, num_samples: int, first_trajectory: int = 0
) -> Group:
    """`num_samples` new trajectories for one prompt.

    `first_trajectory` is the id of the first of them.
    """
    row = prompt.row
    messages = row["messages"]
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    group = Group(group_id, prompt, [])
    for i in range(num_samples):
        trajectory = Trajectory(first_trajectory + i, group_id, list(messages), row)
        trajectory.row_index = prompt.index
        begin_sample(trajectory, prompt.tokens)
        group.trajectories.append(trajectory)
    return group


def _recorded(value: Any) -> Any:
    """A column's value as the records have it: what is no JSON as text, and not too long."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
        recorded = json.loads(text)
    except (TypeError, ValueError):  # keys that are no text, or an endless structure
        recorded = repr(value)
    if isinstance(recorded, str):
        text = recorded
    if len(text) <= MAX_RECORDED_CHARACTERS:
        return recorded
    return f"{text[:MAX_RECORDED_CHARACTERS]}... ({len(text)} characters)"


def begin_sample(trajectory: Trajectory, prompt: list[int]) -> None:
    """Starts a new training sequence of the trajectory with tokens that are not trained."""
    sample = Sample((), (), (), (), trajectory.group, trajectory.id)
    append_tokens(sample, prompt)
    trajectory.samples.append(sample)


def append_tokens(
    sample: Sample, tokens: Sequence[int], sampled_logps: Sequence[float] | None = None
) -> None:
    """Appends tokens: trained ones where the log-probabilities of their sampling are given."""
    is_trained = int(sampled_logps is not None)
    zeros = array("f", [0.0]) * len(tokens)
    sample.tokens.extend(tokens)
    sample.mask.extend(array("b", [is_trained]) * len(tokens))
    sample.logps.extend(sampled_logps or zeros)
    sample.rewards.extend(zeros)


def place_reward(trajectory: Trajectory) -> None:
    """Puts the reward on the last sampled token, and drops sequences without a sampled token."""
    trajectory.samples = [sample for sample in trajectory.samples if 1 in sample.mask]
    last_sample = trajectory.samples[-1]
    last_token = last_sample.mask.tobytes().rfind(1)
    last_sample.rewards[last_token] = trajectory.reward


@dataclass
class Player:
    """Plays trajectories on one process. Any number of them may be played at a time."""

    engine: Engine
    env: Env
    template: ChatTemplate
    failures: EnvFailures
    max_turns: int
    max_length: int  # most tokens of one training sequence
    reward_weights: dict[str, float] = field(default_factory=dict)  # by name of the part
    is_pausing: bool = False  # then no turn begins, and aborted turns stay as they are
    num_requests: int = 0  # of ours that the engine has
    request_ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait_for_room(self, max_requests: float) -> None:
        """Waits until the engine has fewer than `max_requests`."""
        await asyncio.sleep(0)  # the trajectories that have just begun send theirs
        while self.num_requests >= max_requests:
            self.request_ended.clear()
            await self.request_ended.wait()

    async def play(
        self,
        trajectory: Trajectory,
        params: SamplingParams,
        seed: Seed,
        key: Hashable,
    ) -> None:
        """Plays on from where the trajectory stands, to its end or until the player pauses.

        The environment knows the trajectory by `key`. If it fails, the trajectory ends and is not
        trained.
        """
        if trajectory.finish_reason:
            return
        reason = ""
        try:
            while not reason and not self.is_pausing:
                turn_seed = (*seed, trajectory.num_turns)
                reason = await self._play_turn(trajectory, params, turn_seed, key)
            if reason:
                samples = trajectory.samples
                sampled = [x for s in samples for x in compress(s.tokens, s.mask)]
                row = {**trajectory.row, "completion_ids": sampled}
                trajectory.rewards = await self.env.score(trajectory.messages, row, key)
                trajectory.weights = self.reward_weights
                place_reward(trajectory)
        except EnvError as error:
            self.failures.record(error)
            reason = "failed"
            for sample in trajectory.samples:
                sample.mask = array("b", [0]) * len(sample.mask)
        if reason:
            trajectory.finish_reason = reason  # its reward is there: its group may be done
            self.env.end(key)

    async def _play_turn(
        self,
        trajectory: Trajectory,
        params: SamplingParams,
        seed: Seed,
        key: Hashable,
    ) -> str:
        """One turn of the assistant, unless it is aborted, and the environment's answer to it.

        Returns why the trajectory ends, or "" if it goes on.
        """
        generation = await self._generate(trajectory, params, seed)
        if generation.finish_reason == "abort":
            return ""
        sampled = trajectory.samples[-1].tokens[-trajectory.partial_tokens :]
        reply = self.template.decode_reply(sampled, params.stop_token_ids)
        trajectory.messages.append({"role": "assistant", "content": reply})
        trajectory.partial_tokens = 0
        trajectory.num_turns += 1
        trajectory.longest_turn = max(trajectory.longest_turn, len(sampled))
        env_messages: list[dict] = []
        if generation.finish_reason == "stop" and trajectory.num_turns < self.max_turns:
            env_messages = await self.env.interact(trajectory.messages, trajectory.row, key)
        if not env_messages:
            return generation.finish_reason
        max_new_tokens = params.max_new_tokens
        fits = self._append_env_messages(trajectory, len(sampled), env_messages, max_new_tokens)
        return "" if fits else "length"

    async def _generate(
        self, trajectory: Trajectory, params: SamplingParams, seed: Seed
    ) -> Generation:
        """Samples the rest of a turn and appends it. A paused turn keeps its earlier tokens."""
        sample = trajectory.samples[-1]
        num_sampled = trajectory.partial_tokens
        rest = replace(
            params,
            max_new_tokens=params.max_new_tokens - num_sampled,
            continued_tokens=num_sampled,
        )
        self.num_requests += 1
        try:
            generation = await self.engine.generate(sample.tokens, rest, seed)
        finally:
            self.num_requests -= 1
            self.request_ended.set()
        assert generation.version is not None and generation.version == self.engine.version, (
            "sampled with other weights than the engine has"
        )
        append_tokens(sample, generation.tokens, generation.logps)
        trajectory.versions.append((generation.version, len(generation.tokens)))
        trajectory.partial_tokens += len(generation.tokens)
        return generation

    def _append_env_messages(
        self,
        trajectory: Trajectory,
        num_sampled: int,
        env_messages: list[dict],
        max_new_tokens: int,
    ) -> bool:
        """Appends the environment's messages as tokens, for another turn of `max_new_tokens`.

        `num_sampled` is the number of tokens of the turn that they answer.
        Where the chat template rewrites what came before, a new training sequence begins. Where the
        next turn could exceed `max_length`, nothing is appended, and the result is False.
        """
        sample = trajectory.samples[-1]
        messages = trajectory.messages
        tools = trajectory.row.get("tools")
        new_prompt: list[int] = []
        try:
            extension = self.template.extend(
                sample.tokens, num_sampled, messages, env_messages, tools
            )
            if extension is None:
                new_prompt = self.template.encode_prompt(messages + env_messages, tools)
        except ValueError as error:  # the template refuses the environment's messages
            raise EnvError(str(error), kind=f"template: {error.__cause__ or error}") from error
        if extension is None:
            length = len(new_prompt)
        else:
            length = len(sample.tokens) + len(extension)
        if length + max_new_tokens > self.max_length:
            return False
        messages.extend(env_messages)
        if extension is None:
            begin_sample(trajectory, new_prompt)
        else:
            append_tokens(sample, extension)
        return True
