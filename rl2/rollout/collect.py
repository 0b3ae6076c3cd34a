"""Collects the trajectories of a step from all engines."""

import asyncio
import pickle
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

from torch.distributed.distributed_c10d import _get_default_store

from rl2.data.examples import Prompt, Prompts
from rl2.engine.base import SamplingParams
from rl2.parallel.mesh import all_gather_objects, gather_objects
from rl2.rollout.trajectory import Group, Player, Trajectory, begin_group

SPLITS = ("train", "test")  # their numbers are part of the seed of each answer
POLL_SECONDS = 0.05  # between two looks at how many groups the other engines have finished


class Collector:
    """Plays prompts on all processes. All processes make the same calls.

    The prompts know the position in the data. With `partial`, a step takes the prompts of the next
    step too and ends when it has its groups; the others wait in `carried_over`, the same on every
    process, and go on in the next step.

    `deterministic` assigns groups to engines in advance. Otherwise an engine takes the next group
    from a counter that all share, so that a slow one delays nobody.
    """

    def __init__(
        self,
        player: Player,
        *,
        prompts: Prompts | None = None,
        params: SamplingParams,
        samples_per_prompt: int = 1,
        num_steps: int = 1,
        seed: int = 0,
        deterministic: bool = True,
        partial: bool = False,
    ):
        self.player = player
        self.prompts = prompts
        self.params = params
        self.samples_per_prompt = samples_per_prompt
        self.num_steps = num_steps
        self.seed = seed
        self.deterministic = deterministic
        self.partial = partial
        self.carried_over: list[Group] = []

    def collect(self, step: int) -> list[Trajectory]:
        """The trajectories of training step 1, 2, ..., of all processes on every process.

        Their messages are on the first process only, which writes them.
        """
        assert self.prompts is not None
        batch_size = self.prompts.batch_size
        num_batches = 2 if self.partial and step < self.num_steps else 1
        num_prompts = max(0, num_batches * batch_size - len(self.carried_over))
        prompts = self.prompts.next_items(num_prompts)
        num_groups = batch_size if self.partial else None
        return self.play(
            prompts, self.params, self.samples_per_prompt, "train", step, num_groups=num_groups
        )

    def play(
        self,
        prompts: list[Prompt],
        params: SamplingParams,
        num_samples: int,
        split: str,
        step: int,
        num_groups: int | None = None,
    ) -> list[Trajectory]:
        """Plays each prompt `num_samples` times, shared among the engines.

        `split` (train | test) and `step` name the randomness. With `num_groups` the groups that an
        earlier call carried over come first, and the call returns when that many groups are done.
        The others pause where they stand. Returns what `collect` returns.

        RuntimeError if the environment failed on more trajectories than it may.
        """
        groups = list(self.carried_over) if num_groups else []
        first_id = max((group.id for group in groups), default=-1) + 1
        for i, prompt in enumerate(prompts):
            groups.append(begin_group(first_id + i, prompt.row, prompt.tokens, num_samples))
        rollout = self._play_groups(groups, params, split, step, num_groups or len(groups))
        played = self.player.engine.loop.run_until_complete(rollout)
        if num_groups:
            trajectories = self._split_off_done(groups, played, num_groups)
        else:
            trajectories = _gather_trajectories(played)
        num_failed = sum(trajectory.finish_reason == "failed" for trajectory in trajectories)
        self.player.failures.check(num_failed, len(trajectories))
        return trajectories

    def _split_off_done(
        self, groups: list[Group], played: list[Group], num_groups: int
    ) -> list[Trajectory]:
        """The first `num_groups` groups that are done. All others are carried over.

        Every process keeps them, so that whichever engine is free goes on with them.
        """
        newest = {group.id: group for part in all_gather_objects(played) for group in part}
        groups = [newest.get(group.id, group) for group in groups]
        done = [group for group in groups if group.is_done][:num_groups]
        done_ids = {group.id for group in done}
        self.carried_over = [group for group in groups if group.id not in done_ids]
        return [trajectory for group in done for trajectory in group.trajectories]

    async def _play_groups(
        self, groups: list[Group], params: SamplingParams, split: str, step: int, num_needed: int
    ) -> list[Group]:
        """Plays this engine's groups until `num_needed` groups of all engines are done."""
        counter = f"rl2/{split}/{step}"
        store = _get_default_store()
        may_pause = num_needed < len(groups)
        queue = self._own_groups(groups, counter)
        played: list[Group] = []
        self.player.is_pausing = False

        async def play_queue() -> None:
            for group in queue:
                await self._play_group(group, params, split, step)
                played.append(group)
                if group.is_done and may_pause:
                    store.add(f"{counter}/done", 1)

        players = asyncio.gather(*(play_queue() for _ in range(self._groups_in_flight(groups))))
        while may_pause and not players.done():
            await asyncio.sleep(POLL_SECONDS)
            if self.player.is_pausing or store.add(f"{counter}/done", 0) >= num_needed:
                self.player.is_pausing = True
                self.player.engine.abort()  # repeated: a request may have been on its way
        await players
        return played

    def _groups_in_flight(self, groups: list[Group]) -> int:
        """Enough groups to fill the engine twice, so that no slot waits for an environment."""
        if self.deterministic:
            return len(groups)
        group_size = len(groups[0].trajectories)
        return 1 + 2 * self.player.engine.max_running_requests // group_size

    def _own_groups(self, groups: list[Group], counter: str) -> Iterator[Group]:
        """The groups that this process's engine plays, as it gets to them.

        A process that only serves its tensors to the engine of another one has none.
        """
        engine = self.player.engine
        if engine.index is None:
            return
        if self.deterministic:
            yield from groups[engine.index :: engine.count]
            return
        store = _get_default_store()
        while not self.player.is_pausing:
            number = store.add(counter, 1) - 1
            if number >= len(groups):
                return
            yield groups[number]

    async def _play_group(
        self, group: Group, params: SamplingParams, split: str, step: int
    ) -> None:
        plays = []
        for i, trajectory in enumerate(group.trajectories):
            seed = (self.seed, SPLITS.index(split), step, group.id, i)
            plays.append(self.player.play(trajectory, group.row, params, seed))
        await asyncio.gather(*plays)

    @property
    def rows_done(self) -> int:
        """The training prompts whose groups are done, over all epochs."""
        assert self.prompts is not None
        return self.prompts.rows_done - len(self.carried_over)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        assert self.prompts is not None
        return {**self.prompts.state_dict(), "carried_over": pickle.dumps(self.carried_over)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert self.prompts is not None
        self.prompts.load_state_dict(state)
        self.carried_over = pickle.loads(state["carried_over"])


def _gather_trajectories(played: list[Group]) -> list[Trajectory]:
    """The trajectories of all processes, in order of process and then of the data."""
    trajectories = [trajectory for group in played for trajectory in group.trajectories]
    trajectories.sort(key=lambda trajectory: trajectory.id)
    texts = gather_objects([(trajectory.messages, trajectory.row) for trajectory in trajectories])
    without_texts = [replace(trajectory, messages=[], row={}) for trajectory in trajectories]
    gathered = [t for part in all_gather_objects(without_texts) for t in part]
    # The first process has the texts of all, in the same order; the others have none.
    for trajectory, (messages, row) in zip(gathered, chain.from_iterable(texts), strict=False):
        trajectory.messages = messages
        trajectory.row = row
    return gathered
