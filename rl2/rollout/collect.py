"""Collects the trajectories of a step from all engines."""

import asyncio
import itertools
import math
import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

from torch.distributed.distributed_c10d import _get_default_store

from rl2.data.examples import Prompt, Prompts
from rl2.engine.base import SamplingParams
from rl2.parallel.mesh import all_gather_objects, gather_objects
from rl2.rollout.stats import to_records
from rl2.rollout.trajectory import Group, Player, Trajectory, begin_group

SPLITS = ("train", "test")  # their numbers are part of the seed of each answer
# Requests that an engine gets for each of its slots. Those that wait fill free slots without delay.
# More of them could have begun earlier in another engine.
REQUESTS_PER_SLOT = 1.25
POLL_SECONDS = 0.05  # between two looks at how many groups the other engines have finished
WriteRecords = Callable[[str, int, Iterable[dict[str, Any]]], None]  # of split, step, records

_rollout_numbers = itertools.count()  # of this process group: every process makes the same rollouts


class Collector:
    """Plays prompts on all processes. All processes make the same calls.

    The prompts know the position in the data. With `partial`, a step plays the prompts of the next
    step too and ends when its own groups are done; the others wait in `carried_over`, the same on
    every process, and go on in the next step.

    `deterministic` assigns groups to engines in advance, and an engine gets all of them at once.
    Otherwise an engine takes the next group from a counter that all share as soon as its slots have
    room, so that neither a slow engine nor a slow environment delays the others.

    `write_records` gets the transcripts of a rollout that ends the run.
    """

    has_other_policy = False  # the actor itself samples, up to the lag of partial rollouts

    def __init__(
        self,
        player: Player,
        *,
        prompts: Prompts | None = None,
        params: SamplingParams,
        write_records: WriteRecords,
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
        self.write_records = write_records
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
        earlier call carried over come first, and the call returns when the first `num_groups` are
        done: short answers that end early do not replace long ones. The others pause where they
        stand. Returns what `collect` returns.

        RuntimeError if the environment failed on more trajectories than it may.
        """
        groups = list(self.carried_over) if num_groups else []
        first_id = max((group.id for group in groups), default=-1) + 1
        # Those carried over may be of a run with other samples_per_prompt.
        ids = [trajectory.id for group in groups for trajectory in group.trajectories]
        next_trajectory = max(ids, default=-1) + 1
        for i, prompt in enumerate(prompts, start=first_id):
            groups.append(begin_group(i, prompt.row, prompt.tokens, num_samples, next_trajectory))
            next_trajectory += num_samples
        rollout = self._play_groups(groups, params, split, step, num_groups or len(groups))
        played = self.player.engine.loop.run_until_complete(rollout)
        if num_groups:
            trajectories = self._split_off_done(groups, played, num_groups)
        else:
            trajectories = _gather_trajectories(played)
        assert all(trajectory.finish_reason for trajectory in trajectories), "a play was cancelled"
        num_failed = sum(trajectory.finish_reason == "failed" for trajectory in trajectories)
        try:
            self.player.failures.check(num_failed, len(trajectories))
        except RuntimeError:
            self.write_records(split, step, to_records(trajectories))
            raise
        return trajectories

    def _split_off_done(
        self, groups: list[Group], played: list[Group], num_groups: int
    ) -> list[Trajectory]:
        """The trajectories of the first `num_groups` groups. All other groups are carried over.

        Every process keeps them, so that whichever engine is free goes on with them.
        """
        first_ids = {group.id for group in groups[:num_groups]}
        others = [group for group in played if group.id not in first_ids]
        newest = {group.id: group for part in all_gather_objects(others) for group in part}
        self.carried_over = [newest.get(group.id, group) for group in groups[num_groups:]]
        return _gather_trajectories([group for group in played if group.id in first_ids])

    async def _play_groups(
        self, groups: list[Group], params: SamplingParams, split: str, step: int, num_needed: int
    ) -> list[Group]:
        """Plays this engine's groups until the first `num_needed` of all groups are done."""
        player = self.player
        player.is_pausing = False
        store = _get_default_store()
        counter = f"rl2/rollout/{next(_rollout_numbers)}"
        needed = {group.id: len(group.trajectories) for group in groups[:num_needed]}
        may_pause = num_needed < len(groups)
        played: list[Group] = []

        async def play(trajectory: Trajectory, number: int) -> None:
            seed = (self.seed, SPLITS.index(split), step, trajectory.group, number)
            await player.play(trajectory, params, seed, key=(split, trajectory.id))
            if may_pause and trajectory.group in needed:
                store.add(f"{counter}/done", 1)

        async def play_queue() -> None:
            max_requests = math.inf
            if not self.deterministic:
                max_requests = REQUESTS_PER_SLOT * player.engine.max_running_requests
            num_begun = 0  # trajectories that have not run yet
            async with asyncio.TaskGroup() as tasks:
                for group in self._own_groups(groups, counter):
                    played.append(group)
                    for number, trajectory in enumerate(group.trajectories):
                        tasks.create_task(play(trajectory, number))
                        num_begun += 1
                    if player.num_requests + num_begun >= max_requests:
                        await player.wait_for_room(max_requests)
                        num_begun = 0

        playing = asyncio.ensure_future(play_queue())
        while may_pause and not playing.done():
            await asyncio.sleep(POLL_SECONDS)
            if store.add(f"{counter}/done", 0) >= sum(needed.values()):
                player.is_pausing = True
                player.engine.abort()  # repeated: a request may have been on its way
        try:
            await playing
        except BaseExceptionGroup as errors:  # the first one has ended all tasks
            raise errors.exceptions[0] from None
        return played

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
