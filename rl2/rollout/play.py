"""Plays the groups of a schedule on the engine of this process."""

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

from rl2 import progress
from rl2.engine.base import SamplingParams, Seed
from rl2.rollout.player import Player
from rl2.rollout.schedule import GroupBoard, GroupSchedule
from rl2.rollout.trajectory import Group, mean_score

# Requests that an engine gets for each of its slots. Those that wait fill free slots without delay.
# More of them could have started earlier in another engine.
REQUESTS_PER_SLOT = 1.25
SLOT_SECONDS = 0.01  # between two looks at whether an engine takes more requests
POLL_SECONDS = 0.05  # between two looks at which groups the other engines have finished


@dataclass
class Rollout:
    """This process's part of one rollout. `await play()` plays it."""

    player: Player
    schedule: GroupSchedule
    board: GroupBoard
    get_group: Callable[[int], Group]  # by number
    params: SamplingParams
    seed: Seed  # the same for all groups
    deterministic: bool  # groups are dealt to the engines in advance
    keeps_unused: bool  # the next step continues the groups that this one does not use
    bar: progress.Bar
    begun: dict[int, Group] = field(default_factory=dict)  # by number

    async def play(self) -> None:
        """Plays until all groups are done, or until the step has what it needs.

        Then turns pause. Calls of the environment end, if the next step continues the rest;
        otherwise they are cancelled.
        """
        self.player.is_pausing = False
        playing = asyncio.ensure_future(self._play_groups())
        is_cut = False
        while self.schedule.may_start_unused and not playing.done() and not is_cut:
            await self._catch_up()
            if self.schedule.is_complete:
                self.player.is_pausing = True
                self.player.engine.abort()  # repeated: a request may have been on its way
                if not self.keeps_unused and not self.player.num_requests:
                    is_cut = playing.cancel()
        try:
            await playing
        except BaseExceptionGroup as errors:  # the first one has ended all tasks
            raise errors.exceptions[0] from None
        except asyncio.CancelledError:
            if not is_cut:
                raise
        if self.schedule.may_start_unused and not self.keeps_unused:
            await self._end_unused()

    async def _end_unused(self) -> None:
        """Tells the environment of the groups that nobody needs.

        What takes longer to end continues beside the training step.
        """
        assert self.schedule.num_used is not None
        ends = [
            self.player.end(trajectory)
            for number, group in self.begun.items()
            for trajectory in group.trajectories
            if number >= self.schedule.num_used
        ]
        if ends:
            await asyncio.wait(map(asyncio.ensure_future, ends), timeout=POLL_SECONDS)

    async def _catch_up(self) -> None:
        """Waits a moment, then reads which groups all engines have finished."""
        await asyncio.sleep(POLL_SECONDS)
        self.schedule.mean_scores |= self.board.read()

    async def _play_groups(self) -> None:
        max_requests = math.inf
        if not self.deterministic:
            max_requests = REQUESTS_PER_SLOT * self.player.engine.max_running_requests
        num_begun = 0  # trajectories that have not run yet
        async with asyncio.TaskGroup() as tasks:
            async for number in self._own_numbers():
                group = self.begun[number] = self.get_group(number)
                plays = [
                    tasks.create_task(self._play_trajectory(group, i))
                    for i in range(len(group.trajectories))
                ]
                tasks.create_task(self._finish_group(number, group, plays))
                num_begun += len(plays)
                while self.player.num_requests + num_begun >= max_requests:
                    await asyncio.sleep(SLOT_SECONDS)
                    num_begun = 0  # meanwhile, most have sent their requests

    async def _own_numbers(self) -> AsyncIterator[int]:
        """Yields the numbers of the groups that this engine plays, as it gets to them."""
        engine, schedule = self.player.engine, self.schedule
        if engine.index is None:  # it serves another rank's engine, but must learn the length
            while schedule.num_used is None:
                await self._catch_up()
            return
        numbers: Iterator[int]
        if self.deterministic:  # dealt out in advance
            numbers = itertools.count(engine.index, engine.count)
        else:  # first come, first served
            numbers = self.board.claims()
        for number in numbers:
            while number >= schedule.start_limit:
                if schedule.num_used is not None:
                    return
                await self._catch_up()
            if self.player.is_pausing:
                return
            yield number

    async def _play_trajectory(self, group: Group, i: int) -> None:
        trajectory = group.trajectories[i]
        tokens_before = trajectory.length
        seed = (*self.seed, group.id, i)
        await self.player.play(trajectory, self.params, seed)
        self.bar.add(0, trajectory.length - tokens_before)

    async def _finish_group(self, number: int, group: Group, plays: list[asyncio.Task]) -> None:
        """Scores a group once all its trajectories are done, and posts that it is done."""
        await asyncio.wait(plays)
        if not group.is_done:
            return
        env = self.player.env_of(group.trajectories[0])
        if env.spec.group_reward_fn is not None:
            await self.player.score_group(group)
        self.bar.add(1)
        if self.schedule.may_start_unused:
            self.board.post(number, mean_score(group.trajectories, self.player.score))
