"""A trajectory: its types, and how it is played turn by turn between engine and environment."""

import asyncio
import json
import math
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, compress
from typing import Any

from rl2.batch import Sample
from rl2.data.chat import ChatTemplate
from rl2.data.examples import Example
from rl2.engine.base import Engine, Generation, SamplingParams, Seed
from rl2.env.call import Env
from rl2.env.contract import EnvError, EnvFailures, Turn, add_parts
from rl2.env.syntaxes import Found
from rl2.rollout.calls import CallReader

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
    """Puts the reward on the last sampled token, less what the tokens before have.

    The sum over all tokens is the trajectory's reward. Sequences without a sampled token go.
    """
    trajectory.samples = [sample for sample in trajectory.samples if 1 in sample.mask]
    last_sample = trajectory.samples[-1]
    last_token = last_sample.mask.tobytes().rfind(1)
    last_sample.rewards[last_token] = 0.0
    before = 0.0
    if "turns" in trajectory.rewards:  # of interact or step; other parts lie on the last token
        before = sum(sum(sample.rewards) for sample in trajectory.samples)
    last_sample.rewards[last_token] = trajectory.reward - before


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

    def __post_init__(self) -> None:
        if self.env.tools:
            question = [{"role": "user", "content": "?"}]
            self.template.warn_of_ignored([{"messages": question, "tools": self.env.tools}])
            _ = self.call_reader  # warns now

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
        last_turn: dict[str, Any] | None = None
        try:
            if self.env.has_object and not trajectory.versions:
                await self._begin(trajectory, params, key)
            while last_turn is None and not self.is_pausing:
                last_turn = await self._play_turn(
                    trajectory, params, (*seed, trajectory.num_turns), key
                )
            if last_turn is None:
                return
            await self._score(trajectory, last_turn, key)
            # The trajectory is done when it has its rewards.
            trajectory.finish_reason = last_turn["finish_reason"]
        except EnvError as error:
            self.fail(trajectory, error)
        await self.end(trajectory, key)

    def fail(self, trajectory: Trajectory, error: EnvError) -> None:
        """Ends a trajectory whose environment failed. It is not trained."""
        self.failures.record(error)
        trajectory.finish_reason = "failed"
        for sample in trajectory.samples:
            sample.mask = array("b", [0]) * len(sample.mask)

    async def end(self, trajectory: Trajectory, key: Hashable) -> None:
        """Tells the environment that the trajectory is not played on."""
        try:
            await self.env.end(key)
        except EnvError as error:
            if trajectory.finish_reason != "failed":
                self.failures.record(error)

    async def score_group(self, group: Group) -> None:
        """Adds what `group_reward_fn` gives, once all trajectories of the group are done."""
        members = [t for t in group.trajectories if t.finish_reason != "failed"]
        if not members:
            return
        try:
            all_parts = await self.env.score_group([{**t.record(), "row": t.row} for t in members])
        except EnvError as error:
            for trajectory in members:
                self.fail(trajectory, error)
            return
        for trajectory, parts in zip(members, all_parts, strict=True):
            add_parts(trajectory.rewards, parts)
            place_reward(trajectory)

    async def _begin(self, trajectory: Trajectory, params: SamplingParams, key: Hashable) -> None:
        """Makes the environment's object. Its tools and what it says first belong to the prompt."""
        trajectory.messages = list(await self.env.begin(trajectory.row, key))
        try:
            prompt = self.template.encode_prompt(trajectory.messages, self._tools(trajectory))
        except ValueError as error:
            raise _template_error(error) from error
        if len(prompt) + params.max_new_tokens > self.max_length:
            raise EnvError(
                f"the prompt with the tools and the text of reset has {len(prompt)} tokens, and "
                f"the turn may have {params.max_new_tokens}, more than fit into {self.max_length}",
                kind="the prompt with the tools and the text of reset is too long",
            )
        trajectory.samples = []
        begin_sample(trajectory, prompt)

    def _tools(self, trajectory: Trajectory) -> list | None:
        """The schemas that the template shows: those of the row and of the environment."""
        tools = trajectory.row.get("tools")
        return [*(tools or []), *self.env.tools] if self.env.tools else tools

    async def _score(
        self, trajectory: Trajectory, last_turn: dict[str, Any], key: Hashable
    ) -> None:
        inputs: dict[str, Any] = dict(last_turn)
        if "completion_ids" in self.env.asked:
            sampled = [compress(sample.tokens, sample.mask) for sample in trajectory.samples]
            inputs["completion_ids"] = list(chain.from_iterable(sampled))
        parts = await self.env.score(trajectory.messages, trajectory.row, key, inputs)
        add_parts(trajectory.rewards, parts)
        trajectory.weights = self.reward_weights
        place_reward(trajectory)

    async def _play_turn(
        self,
        trajectory: Trajectory,
        params: SamplingParams,
        seed: Seed,
        key: Hashable,
    ) -> dict[str, Any] | None:
        """One turn of the assistant, unless it is aborted, and the environment's answer to it.

        Returns what the environment may ask about the turn if it is the last one.
        """
        inputs = await self.sample_turn(trajectory, params, seed)
        if inputs is None:
            return None
        num_sampled = inputs["num_tokens"]
        is_last = trajectory.num_turns >= self.max_turns
        if inputs["finish_reason"] != "stop" or (is_last and not self.env.has_object):
            return inputs
        turn = await self._answer(trajectory, inputs, key)
        self._add_turn_reward(trajectory, turn.reward)
        if is_last or turn.done or not turn.messages:
            trajectory.messages += turn.messages
            return inputs
        if self.append_messages(trajectory, num_sampled, turn.messages, params.max_new_tokens):
            return None
        return {**inputs, "finish_reason": "length"}

    async def sample_turn(
        self, trajectory: Trajectory, params: SamplingParams, seed: Seed
    ) -> dict[str, Any] | None:
        """Samples one turn of the assistant and appends it; None if it is aborted.

        Returns what the environment may ask about it.
        """
        generation = await self._generate(trajectory, params, seed)
        if generation.finish_reason == "abort":
            return None
        sample = trajectory.samples[-1]
        num_sampled = trajectory.partial_tokens
        sampled = sample.tokens[-num_sampled:]
        reply = self.template.decode_reply(sampled, params.stop_token_ids)
        trajectory.messages.append({"role": "assistant", "content": reply})
        trajectory.partial_tokens = 0
        trajectory.num_turns += 1
        trajectory.longest_turn = max(trajectory.longest_turn, num_sampled)
        return {
            "finish_reason": generation.finish_reason,
            "num_tokens": num_sampled,
            "max_new_tokens": params.max_new_tokens,
            "turn": trajectory.num_turns,
        }

    async def _answer(self, trajectory: Trajectory, inputs: dict[str, Any], key: Hashable) -> Turn:
        """The results of the tools that the last turn calls, or else the environment's answer."""
        if self.env.tools:
            calls = self.read_calls(trajectory, inputs["num_tokens"], self.env.tools).calls
            if calls:
                return await self.env.call_tools(calls, trajectory.num_turns, key)
        return await self.env.answer(trajectory.messages, trajectory.row, key, inputs)

    def read_calls(self, trajectory: Trajectory, num_sampled: int, tools: list[dict]) -> Found:
        """The calls of tools in the last turn, which has `num_sampled` tokens."""
        prompt = trajectory.samples[-1].tokens[:-num_sampled]
        return self.call_reader.read(prompt, trajectory.messages[-1]["content"], tools)

    @cached_property
    def call_reader(self) -> CallReader:
        """Made when it is needed, since it warns if it cannot read the model's calls."""
        return CallReader(self.template)

    def _add_turn_reward(self, trajectory: Trajectory, reward: float) -> None:
        """Puts the reward of a turn on its last token, which is the last of its sequence."""
        if not reward:
            return
        trajectory.rewards["turns"] = trajectory.rewards.get("turns", 0.0) + reward
        weight = self.reward_weights.get("turns", 1.0)
        trajectory.samples[-1].rewards[-1] += weight * reward

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

    def append_messages(
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
        tools = self._tools(trajectory)
        new_prompt: list[int] = []
        try:
            extension = self.template.extend(
                sample.tokens, num_sampled, messages, env_messages, tools
            )
            if extension is None:
                new_prompt = self.template.encode_prompt(messages + env_messages, tools)
        except ValueError as error:  # the template refuses the environment's messages
            raise _template_error(error) from error
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


def _template_error(error: ValueError) -> EnvError:
    return EnvError(str(error), kind=f"template: {error.__cause__ or error}")
