"""Trajectories: turns between the engine and the user's environment, and the training samples they become."""

import asyncio
from dataclasses import dataclass, field

from torch.distributed.distributed_c10d import _get_default_store

from .. import chat
from ..batch import Sample
from ..parallel.mesh import gather_objects
from .env import EnvError


@dataclass
class Trajectory:
    """One conversation of the policy with the environment; it stays on the process that made it."""

    id: int
    group: int
    messages: list[dict]
    samples: list[Sample] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)  # the parts; their sum is the reward
    finish_reason: str = ""  # stop | length | abort of the last turn, or failed: the environment did
    num_turns: int = 0
    version: int | None = None  # of the weights that sampled it

    @property
    def reward(self) -> float:
        return sum(self.rewards.values())

    @property
    def length(self) -> int:
        """Tokens the policy sampled."""
        return sum(sum(sample.mask) for sample in self.samples)

    def record(self) -> dict:
        """What is told of it beside its tokens."""
        keys = ("id", "group", "messages", "rewards", "reward", "length", "num_turns", "finish_reason")
        return {key: getattr(self, key) for key in keys}


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

    def __call__(self, prompts: list, params: dict, num_samples: int, purpose: str, step: int) -> list[Trajectory]:
        """Plays every prompt `num_samples` times, shared among the engines. Returns this process's trajectories.
        `purpose` (train | test) and `step` name the randomness."""
        return self.engine.loop.run_until_complete(self._play_all(prompts, params, num_samples, purpose, step))

    async def _play_all(self, prompts, params, num_samples, purpose, step):
        queue, done = self._queue(len(prompts), f"rl2/{purpose}/{step}"), []
        stream = ("train", "test").index(purpose)

        async def play_groups():
            for group in queue:
                seeds = [(self.seed, stream, step, group, sample) for sample in range(num_samples)]
                ids = range(group * num_samples, (group + 1) * num_samples)
                done.extend(
                    await asyncio.gather(
                        *(
                            self._play(prompts[group], group, id, params, seed)
                            for id, seed in zip(ids, seeds, strict=True)
                        )
                    )
                )

        # Enough groups in flight to fill the engine twice, so that a slot never waits for an environment.
        in_flight = len(prompts) if self.deterministic else 1 + 2 * self.engine.max_running // num_samples
        await asyncio.gather(*(play_groups() for _ in range(in_flight)))
        return sorted(done, key=lambda trajectory: trajectory.id)

    def _queue(self, num_groups, counter):
        """The groups of our engine: every so-manyth, or the next from a counter all engines share, so that a slow one
        delays nobody. A process that only serves its tensors to another's engine has none."""
        if self.engine.index is None:
            return
        if self.deterministic:
            yield from range(self.engine.index, num_groups, self.engine.count)
        else:
            store = _get_default_store()
            while (group := store.add(counter, 1) - 1) < num_groups:
                yield group

    async def _play(self, prompt, group, id, params, seed) -> Trajectory:
        row = prompt.row
        messages = row["messages"]
        messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        trajectory = Trajectory(id, group, messages)
        sample = self._begin(trajectory)
        _append(sample, prompt.tokens, 0)
        try:
            for turn in range(self.max_turns):
                out = await self.engine.generate(sample.tokens, params, (*seed, turn))
                _append(sample, out.tokens, 1, out.logps)
                messages.append({"role": "assistant", "content": chat.decode(self.tokenizer, out.tokens)})
                trajectory.finish_reason, trajectory.num_turns = out.finish_reason, turn + 1
                trajectory.version = out.version
                if out.finish_reason != "stop" or turn + 1 == self.max_turns:
                    break
                answer = await self.env.interact(messages, row)
                if not answer:
                    break
                told, new = self._continue(sample.tokens, messages, answer, row.get("tools"))
                if len(told) + len(new) + params["max_new_tokens"] > self.max_length:
                    trajectory.finish_reason = "length"
                    break
                messages.extend(answer)
                sample = sample if told else self._begin(trajectory)
                _append(sample, new, 0)
            trajectory.rewards = await self.env.score(messages, row)
            self._reward(trajectory)
        except EnvError as error:
            self.failures.record(error)
            trajectory.finish_reason = "failed"
            for part in trajectory.samples:
                part.mask = [0] * len(part.mask)
        return trajectory

    def _begin(self, trajectory):
        sample = Sample([], [], [], [], trajectory.group, trajectory.id)
        trajectory.samples.append(sample)
        return sample

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

    def _reward(self, trajectory):
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


def summarise(trajectories: list[Trajectory], failures) -> dict[str, float]:
    """Rewards and lengths over the trajectories of every process; failed ones count as failed and nothing else, and stop
    the run when they are too many."""
    told = [{k: v for k, v in trajectory.record().items() if k != "messages"} for trajectory in trajectories]
    told = [record for part in gather_objects(told) for record in part]
    scored = [record for record in told if record["finish_reason"] != "failed"]
    failures.check(len(told) - len(scored), len(told))

    def mean(values):
        values = list(values)
        return sum(values) / len(values) if values else float("nan")

    reward = mean(r["reward"] for r in scored)
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
        "tokens/sampled": sum(r["length"] for r in told),
    }
