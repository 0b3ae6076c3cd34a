"""Trajectories: turns between the engine and the user's environment, and the training samples they become."""

import asyncio
import pickle
from dataclasses import dataclass, field, replace

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from rl2.data import chat
from rl2.engine.base import SamplingParams
from rl2.env.contract import EnvError
from rl2.parallel.mesh import all_gather_objects
from rl2.rollout.trajectory import Group, Trajectory, _append, _begin_sample, _reward


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
        self,
        prompts: list,
        params: SamplingParams,
        num_samples: int,
        purpose: str,
        step: int,
        wanted: int | None = None,
    ) -> list[Trajectory]:
        """Plays every prompt `num_samples` times, shared among the engines. Returns this process's trajectories.
        `purpose` (train | test) and `step` name the randomness.

        With `wanted` (partial rollouts) the groups that an earlier call paused come first, and the call returns when so
        many groups are done, dealt out among the processes; the others pause where they stand, for the next call.
        """
        held = self.paused if wanted else []
        first = max((group.id for group in held), default=-1) + 1
        groups = held + [
            self._begin(first + i, prompt, num_samples) for i, prompt in enumerate(prompts)
        ]
        coroutine = self._play_all(groups, params, purpose, step, wanted or len(groups))
        played = self.engine.loop.run_until_complete(coroutine)
        if wanted:
            played = self._pause(groups, played, wanted)
        return sorted(
            (t for group in played for t in group.trajectories),
            key=lambda trajectory: trajectory.id,
        )

    def _begin(self, number, prompt, num_samples):
        messages = prompt.row["messages"]
        messages = (
            [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        )
        ids = range(number * num_samples, (number + 1) * num_samples)
        group = Group(number, prompt.row, [Trajectory(id, number, list(messages)) for id in ids])
        for trajectory in group.trajectories:
            _append(_begin_sample(trajectory), prompt.tokens, 0)
        return group

    def _pause(self, groups, played, wanted):
        """Our part of the first `wanted` groups that are done. All others are kept, on every process, so that whichever
        engine is free goes on with them."""
        told = {group.id: group for part in all_gather_objects(played) for group in part}
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
                seeds = [
                    (self.seed, stream, step, group.id, i) for i in range(len(group.trajectories))
                ]
                plays = map(
                    self._play,
                    group.trajectories,
                    [group.row] * len(seeds),
                    [params] * len(seeds),
                    seeds,
                )
                await asyncio.gather(*plays)
                played.append(group)
                if group.done and wanted < len(groups):
                    store.add(counter + "/done", 1)

        # Enough groups in flight to fill the engine twice, so that a slot never waits for an environment.
        each = 1 + 2 * self.engine.max_running_requests // len(groups[0].trajectories)
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
        left = replace(params, max_new_tokens=params.max_new_tokens - trajectory.partial)
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
        if len(told) + len(new) + params.max_new_tokens > self.max_length:
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
                (tokens, new)
                if new is not None
                else ([], chat.encode_prompt(self.tokenizer, messages + answer, tools))
            )
        except ValueError as error:  # the template refuses the environment's messages
            raise EnvError(str(error)) from error

    def state_dict(self) -> dict:
        """What a resumed run needs: the paused groups."""
        return {"paused": pickle.dumps(self.paused)}

    def load_state_dict(self, state: dict) -> None:
        self.paused = pickle.loads(state["paused"])
