"""Trajectories: turns between the engine and the user's environment, and the training samples they become."""

import asyncio
import pickle
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from .. import chat
from ..batch import Sample
from ..parallel.mesh import gather_objects
from .env import EnvError


@dataclass
class Trajectory:
    """One conversation of the policy with the environment. It stays on the process that made it, unless it is paused."""

    id: int
    group: int
    messages: list[dict]
    samples: list[Sample] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)  # the parts; their sum is the reward
    finish_reason: str = ""  # stop | length of the last turn, or failed: the environment did; "" while it goes on
    num_turns: int = 0
    versions: list[tuple[int, int]] = field(default_factory=list)  # (of the weights, tokens they sampled), in order
    partial: int = 0  # tokens of a turn that a pause cut short

    @property
    def reward(self) -> float:
        return sum(self.rewards.values())

    @property
    def length(self) -> int:
        """Tokens the policy sampled."""
        return sum(sum(sample.mask) for sample in self.samples)

    def record(self) -> dict:
        """What is told of it beside its tokens."""
        keys = ("id", "group", "messages", "rewards", "reward", "length", "num_turns", "finish_reason", "versions")
        return {key: getattr(self, key) for key in keys}


@dataclass
class Group:
    """A row with the trajectories that start from it."""

    id: int
    row: dict
    trajectories: list[Trajectory]

    @property
    def done(self) -> bool:
        return all(trajectory.finish_reason for trajectory in self.trajectories)


@dataclass
class Rollout:
    """How trajectories are made: the engine, the environment and their limits. `max_length` bounds the tokens of one
    training sequence; `deterministic` assigns groups to engines in advance."""

    engine: object
    env: object
    tokenizer: object
    failures: object
    max_turns: int
    max_length: int
    seed: int
    deterministic: bool
    paused: list[Group] = field(default_factory=list)  # the same on every process
    pausing: bool = False

    def __call__(
        self, prompts: list, params: dict, num_samples: int, purpose: str, step: int, wanted: int | None = None
    ) -> list[Trajectory]:
        """Plays every prompt `num_samples` times, shared among the engines. Returns this process's trajectories.
        `purpose` (train | test) and `step` name the randomness.

        With `wanted` (partial rollouts) the groups that an earlier call paused come first, and the call returns when so
        many groups are done, dealt out among the processes; the others pause where they stand, for the next call.
        """
        held = self.paused if wanted else []
        first = max((group.id for group in held), default=-1) + 1
        groups = held + [self._begin(first + i, prompt, num_samples) for i, prompt in enumerate(prompts)]
        coroutine = self._play_all(groups, params, purpose, step, wanted or len(groups))
        played = self.engine.loop.run_until_complete(coroutine)
        if wanted:
            played = self._pause(groups, played, wanted)
        return sorted((t for group in played for t in group.trajectories), key=lambda trajectory: trajectory.id)

    def _begin(self, number, prompt, num_samples):
        messages = prompt.row["messages"]
        messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        ids = range(number * num_samples, (number + 1) * num_samples)
        group = Group(number, prompt.row, [Trajectory(id, number, list(messages)) for id in ids])
        for trajectory in group.trajectories:
            _append(_begin_sample(trajectory), prompt.tokens, 0)
        return group

    def _pause(self, groups, played, wanted):
        """Our part of the first `wanted` groups that are done. All others are kept, on every process, so that whichever
        engine is free goes on with them."""
        told = {group.id: group for part in gather_objects(played) for group in part}
        groups = [told.get(group.id, group) for group in groups]
        done = [group for group in groups if group.done][:wanted]
        ids = {group.id for group in done}
        self.paused = [group for group in groups if group.id not in ids]
        return done[dist.get_rank() :: dist.get_world_size()]

    async def _play_all(self, groups, params, purpose, step, wanted):
        counter, played, store = f"rl2/{purpose}/{step}", [], _get_default_store()
        queue, self.pausing = self._queue(len(groups), counter), False
        stream = ("train", "test").index(purpose)

        async def play_groups():
            for group in map(groups.__getitem__, queue):
                seeds = [(self.seed, stream, step, group.id, i) for i in range(len(group.trajectories))]
                plays = map(self._play, group.trajectories, [group.row] * len(seeds), [params] * len(seeds), seeds)
                await asyncio.gather(*plays)
                played.append(group)
                if group.done and wanted < len(groups):
                    store.add(counter + "/done", 1)

        # Enough groups in flight to fill the engine twice, so that a slot never waits for an environment.
        each = 1 + 2 * self.engine.max_running // len(groups[0].trajectories)
        in_flight = len(groups) if self.deterministic else each
        players = asyncio.gather(*(play_groups() for _ in range(in_flight)))
        while wanted < len(groups) and not players.done():
            await asyncio.sleep(0.05)
            if self.pausing or store.add(counter + "/done", 0) >= wanted:
                self.pausing = True
                self.engine.abort()  # again and again: a request may have been on its way
        await players
        return played

    def _queue(self, num_groups, counter):
        """The groups of our engine: every so-manyth, or the next from a counter all engines share, so that a slow one
        delays nobody. A process that only serves its tensors to another's engine has none."""
        if self.engine.index is None:
            return
        if self.deterministic:
            yield from range(self.engine.index, num_groups, self.engine.count)
        else:
            store = _get_default_store()
            while not self.pausing and (group := store.add(counter, 1) - 1) < num_groups:
                yield group

    async def _play(self, trajectory, row, params, seed) -> None:
        """On from where the trajectory stands, to its end or until the rollout pauses."""
        if trajectory.finish_reason:
            return
        try:
            while not trajectory.finish_reason and not self.pausing:
                await self._turn(trajectory, row, params, (*seed, trajectory.num_turns))
            if trajectory.finish_reason:
                trajectory.rewards = await self.env.score(trajectory.messages, row)
                _reward(trajectory)
        except EnvError as error:
            self.failures.record(error)
            trajectory.finish_reason = "failed"
            for sample in trajectory.samples:
                sample.mask = [0] * len(sample.mask)

    async def _turn(self, trajectory, row, params, seed):
        """What the engine says, unless it is aborted, and what the environment answers."""
        sample, messages = trajectory.samples[-1], trajectory.messages
        left = {**params, "max_new_tokens": params["max_new_tokens"] - trajectory.partial}
        out = await self.engine.generate(sample.tokens, left, seed)
        assert out.version == self.engine.version, "sampled from other weights than the ones loaded"
        _append(sample, out.tokens, 1, out.logps)
        trajectory.versions.append((out.version, len(out.tokens)))
        trajectory.partial += len(out.tokens)
        if out.finish_reason == "abort":
            return
        said = chat.decode(self.tokenizer, sample.tokens[-trajectory.partial :])
        messages.append({"role": "assistant", "content": said})
        trajectory.partial, trajectory.num_turns = 0, trajectory.num_turns + 1
        answer = []
        if out.finish_reason == "stop" and trajectory.num_turns < self.max_turns:
            answer = await self.env.interact(messages, row)
        if not answer:
            trajectory.finish_reason = out.finish_reason
            return
        told, new = self._continue(sample.tokens, messages, answer, row.get("tools"))
        if len(told) + len(new) + params["max_new_tokens"] > self.max_length:
            trajectory.finish_reason = "length"
            return
        messages.extend(answer)
        _append(sample if told else _begin_sample(trajectory), new, 0)

    def _continue(self, tokens, messages, answer, tools) -> tuple[list[int], list[int]]:
        """The tokens the next turn goes on from, and the new ones. Where the template rewrites what came before, the
        first are none, and what follows trains as a sequence of its own."""
        try:
            new = chat.extend(self.tokenizer, tokens, messages, answer, tools)
            return (
                (tokens, new) if new is not None else ([], chat.encode_prompt(self.tokenizer, messages + answer, tools))
            )
        except ValueError as error:  # the template refuses the environment's messages
            raise EnvError(str(error)) from error

    def state_dict(self) -> dict:
        """What a resumed run needs: the paused groups."""
        return {"paused": pickle.dumps(self.paused)}

    def load_state_dict(self, state: dict) -> None:
        self.paused = pickle.loads(state["paused"])


def _begin_sample(trajectory):
    trajectory.samples.append(Sample([], [], [], [], trajectory.group, trajectory.id))
    return trajectory.samples[-1]


def _reward(trajectory):
    """The reward sits on the last token that was sampled; a sequence the policy said nothing in is dropped."""
    trajectory.samples = [sample for sample in trajectory.samples if any(sample.mask)]
    last = trajectory.samples[-1]
    last.rewards[max(i for i, sampled in enumerate(last.mask) if sampled)] = trajectory.reward


def _append(sample, tokens, mask, logps=None):
    sample.tokens.extend(tokens)
    sample.mask.extend([mask] * len(tokens))
    sample.logps.extend(logps or [0.0] * len(tokens))
    sample.rewards.extend([0.0] * len(tokens))


def gather_samples(trajectories: list[Trajectory]) -> list[Sample]:
    """The training samples of every process, on every process, in the order of the data."""
    parts = gather_objects([sample for trajectory in trajectories for sample in trajectory.samples])
    return sorted((sample for part in parts for sample in part), key=lambda sample: sample.trajectory)


def summarise(trajectories: list[Trajectory], failures, version: int) -> dict[str, float]:
    """Rewards and lengths over the trajectories of every process; failed ones count as failed and nothing else, and stop
    the run when they are too many. Staleness: by how many updates the weights that sampled a token lag `version`."""
    told = [{k: v for k, v in trajectory.record().items() if k != "messages"} for trajectory in trajectories]
    told = [record for part in gather_objects(told) for record in part]
    scored = [record for record in told if record["finish_reason"] != "failed"]
    failures.check(len(told) - len(scored), len(told))

    def mean(values):
        values = list(values)
        return sum(values) / len(values) if values else float("nan")

    reward = mean(r["reward"] for r in scored)
    lags = [(version - sampler) * num for r in told for sampler, num in r["versions"]]
    sampled = sum(r["length"] for r in told)
    parts = sorted({name for r in scored for name in r["rewards"]} - {"reward"})
    return {
        "reward/mean": reward,
        "reward/std": mean((r["reward"] - reward) ** 2 for r in scored) ** 0.5,
        **{f"reward/{name}": mean(r["rewards"].get(name, 0.0) for r in scored) for name in parts},
        "rollout/length": mean(r["length"] for r in told),
        "rollout/longest": max(r["length"] for r in told),
        "rollout/truncated": mean(r["finish_reason"] == "length" for r in told),
        "rollout/failed": mean(r["finish_reason"] == "failed" for r in told),
        "rollout/turns": mean(r["num_turns"] for r in told),
        "rollout/staleness": sum(lags) / max(1, sampled),
        "tokens/sampled": sampled,
    }
