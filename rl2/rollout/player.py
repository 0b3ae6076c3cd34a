"""Plays trajectories turn by turn, between the engine and the environment."""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, compress
from typing import Any

from rl2.data.chat import ChatTemplate
from rl2.data.examples import render_prompt
from rl2.data.probe import find_unshown
from rl2.engine.base import Engine, Generation, SamplingParams, Seed
from rl2.env.call import Env
from rl2.env.contract import EnvError, EnvFailures, Turn, add_parts
from rl2.env.found_calls import Found
from rl2.parallel.rank import print_once
from rl2.rollout.calls import CallReader
from rl2.rollout.trajectory import (
    FinishReason,
    Group,
    Trajectory,
    TurnInfo,
    append_tokens,
    begin_sample,
)


@dataclass
class Player:
    """Plays trajectories on one process. Any number of them may be played at a time."""

    engine: Engine
    envs: Mapping[str, Env]  # by source; "" is that of all sources that are not named
    templates: Mapping[str, ChatTemplate]  # by source, as the envs
    failures: EnvFailures
    max_turns: int
    max_length: int  # most tokens of one training sequence
    reward_weights: dict[str, float] = field(default_factory=dict)  # by name of the part
    score: str | None = None  # the part that says success; None is the reward
    is_pausing: bool = False  # then no turn begins, and aborted turns stay as they are
    num_requests: int = 0  # of ours that the engine has

    def __post_init__(self) -> None:
        question = [{"role": "user", "content": "?"}]
        for source, env in self.envs.items():
            if env.tools:
                row = {"messages": question, "tools": env.tools}
                print_once(find_unshown(self.templates[source], row, render_prompt))
                _ = self.call_reader  # warns now

    def env_of(self, trajectory: Trajectory) -> Env:
        """Returns the environment of the trajectory's source."""
        return self.envs.get(trajectory.source) or self.envs[""]

    def template_of(self, trajectory: Trajectory) -> ChatTemplate:
        """Returns the chat template, with the system prompt of the trajectory's source."""
        return self.templates.get(trajectory.source) or self.templates[""]

    async def play(self, trajectory: Trajectory, params: SamplingParams, seed: Seed) -> None:
        """Continues the trajectory to its end, or until the player pauses: calls of the environment
        that run then still end.

        If the environment fails, the trajectory ends and is not trained.
        """
        if trajectory.is_done:
            return
        try:
            if self.env_of(trajectory).has_object and not trajectory.versions:
                await self._begin(trajectory, params)
            last_turn = None
            while last_turn is None:
                if self.is_pausing:
                    return
                turn_seed = (*seed, trajectory.num_turns)
                last_turn = await self._play_turn(trajectory, params, turn_seed)
            await self._score(trajectory, last_turn)
            # The trajectory is done when it has its rewards.
            trajectory.finish_reason = FinishReason(last_turn["finish_reason"])
        except EnvError as error:
            self.fail(trajectory, error)
        await self.end(trajectory)

    def fail(self, trajectory: Trajectory, error: EnvError) -> None:
        """Ends a trajectory whose environment failed. It is not trained."""
        self.failures.record(error)
        trajectory.finish_reason = FinishReason.FAILED
        for sample in trajectory.samples:
            sample.mask = array("b", [0]) * len(sample.mask)

    async def end(self, trajectory: Trajectory) -> None:
        """Tells the environment that the trajectory has ended."""
        try:
            await self.env_of(trajectory).end(trajectory.key)
        except EnvError as error:
            if not trajectory.is_failed:
                self.failures.record(error)

    async def score_group(self, group: Group) -> None:
        """Adds the rewards of `group_reward_fn`, once all trajectories of the group are done."""
        members = [t for t in group.trajectories if not t.is_failed]
        if group.is_scored or not members:
            group.is_scored = True
            return
        records = [t.record() | {"row": t.row} for t in members]
        env = self.env_of(members[0])
        try:
            all_parts = await env.score_group(records)
        except EnvError as error:
            for trajectory in members:
                self.fail(trajectory, error)
        else:
            for trajectory, parts in zip(members, all_parts, strict=True):
                add_parts(trajectory.rewards, parts)
        group.is_scored = True

    async def _begin(self, trajectory: Trajectory, params: SamplingParams) -> None:
        """Makes the environment's object, and the prompt with its tools and its first messages."""
        env = self.env_of(trajectory)
        prompt_messages = await env.begin(trajectory.row, trajectory.key)
        trajectory.messages = list(prompt_messages)
        try:
            tools = self._tools(trajectory)
            prompt = self.template_of(trajectory).encode_prompt(trajectory.messages, tools)
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
        """Returns the schemas that the template shows: those of the row and the environment."""
        tools, env_tools = trajectory.row.get("tools"), self.env_of(trajectory).tools
        return [*(tools or []), *env_tools] if env_tools else tools

    async def _score(self, trajectory: Trajectory, last_turn: TurnInfo) -> None:
        env = self.env_of(trajectory)
        inputs: dict[str, Any] = dict(last_turn)
        if "completion_ids" in env.asked:
            sampled = [compress(sample.tokens, sample.mask) for sample in trajectory.samples]
            inputs["completion_ids"] = list(chain.from_iterable(sampled))
        messages, row = trajectory.messages, trajectory.row
        parts = await env.score(messages, row, trajectory.key, inputs)
        add_parts(trajectory.rewards, parts)
        trajectory.weights = self.reward_weights

    async def _play_turn(
        self, trajectory: Trajectory, params: SamplingParams, seed: Seed
    ) -> TurnInfo | None:
        """Plays one turn of the assistant and the environment's answer to it.

        Returns the turn if it is the last one; None after other turns, and if a pause aborts it. An
        agent plays all turns at once (rl2/agents/player.py).
        """
        turn = await self.sample_turn(trajectory, params, seed)
        if turn is None:
            return None
        is_last = trajectory.num_turns >= self.max_turns
        needs_answer = not is_last or self.env_of(trajectory).has_object
        if turn["finish_reason"] != "stop" or not needs_answer:
            return turn
        answer = await self._answer(trajectory, turn)
        self._add_turn_reward(trajectory, answer.reward)
        if is_last or answer.done or not answer.messages:
            trajectory.messages += answer.messages
            return turn
        has_room = self.append_messages(
            trajectory, turn["num_tokens"], answer.messages, params.max_new_tokens
        )
        return None if has_room else turn | {"finish_reason": "length"}

    async def sample_turn(
        self, trajectory: Trajectory, params: SamplingParams, seed: Seed
    ) -> TurnInfo | None:
        """Samples one turn of the assistant and appends it; None if it is aborted."""
        generation = await self._generate(trajectory, params, seed)
        if generation.finish_reason == "abort":
            return None
        sample = trajectory.samples[-1]
        num_sampled = trajectory.partial_tokens
        sampled = sample.tokens[-num_sampled:]
        reply = self.template_of(trajectory).decode_reply(sampled, params.stop_token_ids)
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

    async def _answer(self, trajectory: Trajectory, turn: TurnInfo) -> Turn:
        """Returns the results of the tools that the last turn calls, or the env's answer to it."""
        env = self.env_of(trajectory)
        if env.tools:
            calls = self.read_calls(trajectory, turn["num_tokens"], env.tools).calls
            if calls:
                return await env.call_tools(calls, trajectory.num_turns, trajectory.key)
        messages, row = trajectory.messages, trajectory.row
        return await env.answer(messages, row, trajectory.key, turn)

    def read_calls(self, trajectory: Trajectory, num_sampled: int, tools: list[dict]) -> Found:
        """Returns the calls of tools in the last turn, which has `num_sampled` tokens."""
        prompt = trajectory.samples[-1].tokens[:-num_sampled]
        return self.call_reader.read(prompt, trajectory.messages[-1]["content"], tools)

    @cached_property
    def call_reader(self) -> CallReader:
        """Reads calls of tools. Made when needed, since it warns if it cannot read the model's."""
        return CallReader(next(iter(self.templates.values())))  # they differ in prompts only

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
        if params.experts_from is not None:
            rest = replace(rest, experts_from=sum(map(len, sample.experts)))
        self.num_requests += 1
        try:
            generation = await self.engine.generate(sample.tokens, rest, seed)
        finally:
            self.num_requests -= 1
        assert generation.version is not None and generation.version == self.engine.version, (
            "sampled with other weights than the engine has"
        )
        append_tokens(sample, generation.tokens, generation.logps, generation.candidates)
        if generation.experts is not None:
            sample.experts.append(generation.experts)
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
        template = self.template_of(trajectory)
        new_prompt: list[int] = []
        try:
            extension = template.extend(sample.tokens, num_sampled, messages, env_messages, tools)
            if extension is None:
                new_prompt = template.encode_prompt(messages + env_messages, tools)
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
