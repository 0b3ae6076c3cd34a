"""Collects the trajectories of a step from all engines."""

import asyncio
import itertools
import math
import pickle
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from rl2 import progress
from rl2.data.examples import Example, Examples
from rl2.engine.base import SamplingParams
from rl2.parallel.mesh import all_gather_objects, gather_objects
from rl2.rewards.text import overlong_score
from rl2.rollout.stats import to_records
from rl2.rollout.trajectory import (
    Group,
    Player,
    Trajectory,
    begin_group,
    group_key,
    mean_reward,
    place_reward,
)

# Requests that an engine gets for each of its slots. Those that wait fill free slots without delay.
# More of them could have begun earlier in another engine.
REQUESTS_PER_SLOT = 1.25
POLL_SECONDS = 0.05  # between two looks at which groups the other engines have finished
ALL_SOLVED = (
    "every training prompt has reached the mean reward rollout.drop_solved: nothing is left to "
    "train on. Use harder prompts, or take the key out"
)
WriteRecords = Callable[[str, int, Iterable[dict[str, Any]]], None]  # of split, step, records

_rollout_numbers = itertools.count()  # of this process group: every process makes the same rollouts


@dataclass(frozen=True)
class RolloutRules:
    """Which groups a training step takes, and what is added to their rewards.

    The fields are keys of the config's section `rollout`, which explains them.
    """

    partial: bool = False
    filter: Sequence[float] = ()  # (low, high), or empty: every group is taken
    max_refills: int = 0
    drop_solved: float | None = None
    max_staleness: int | None = None
    overlong_buffer: int | None = None
    overlong_penalty: float = 1.0

    @classmethod
    def of(cls, section: Any) -> "RolloutRules":
        """The rules of the config's section."""
        return cls(**{name: getattr(section, name) for name in cls.__dataclass_fields__})


@dataclass
class Queue:
    """The groups of one rollout, which all engines share: which begin, and which are taken.

    They are numbered in the order of their prompts. Of the first `most` of them, the first
    `num_needed` whose mean reward is within `bounds` are taken. `num_ahead` more may begin for the
    next step. An engine that has finished a group tells the others in torch's store, so that all
    processes take the same groups.
    """

    make_group: Callable[[int], Group]  # gives the group of a number
    num_needed: int
    most: int
    num_ahead: int = 0
    bounds: Sequence[float] = ()
    # Of the groups known to be done, by number.
    mean_rewards: dict[int, float] = field(default_factory=dict)
    # Index of the only engine that may play a group, by number: calls for it run in that process.
    pins: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.store = _get_default_store()
        self.key = f"rl2/rollout/{next(_rollout_numbers)}"

    def report(self, number: int, group: Group) -> None:
        """Tells all processes that a group is done."""
        line = f"{number} {mean_reward(group.trajectories)!r}\n"
        self.store.append(self.key, line)  # type: ignore[attr-defined]  # torch's stubs lack it

    def read(self) -> None:
        """Reads what all processes have reported."""
        if self.store.check([self.key]):
            for line in self.store.get(self.key).decode().splitlines():
                number, mean = line.split()
                self.mean_rewards[int(number)] = float(mean)

    def takes(self, number: int) -> bool:
        """Whether a group that is done is within the bounds; NaN is in none."""
        return not self.bounds or self.bounds[0] < self.mean_rewards[number] < self.bounds[1]

    @property
    def limit(self) -> int:
        """Groups with a smaller number may begin. As many are in play as are missing, and as many
        more as were not taken so far, up to twice as many.
        """
        num_done = len(self.mean_rewards)
        num_taken = sum(map(self.takes, self.mean_rewards))
        num_missing = max(self.num_needed + self.num_ahead - num_taken, 0)
        num_more = min(num_done - num_taken, num_missing)
        return min(num_done + num_missing + num_more, self.most + self.num_ahead)

    @property
    def end(self) -> int | None:
        """How many groups it takes to have what the step needs; None while that is not known."""
        num_taken = 0
        for number in range(self.most):
            if number not in self.mean_rewards:
                return None
            num_taken += self.takes(number)
            if num_taken == self.num_needed:
                return number + 1
        return self.most


@dataclass
class Collector:
    """Plays prompts on all processes. All processes make the same calls.

    The prompts know the position in the data. With `rules.partial`, a step plays the prompts of the
    next step too and ends when its own groups are done; the others wait in `carried_over`, the same
    on every process, and go on in the next step.

    With `rules.filter`, groups of further prompts replace those that are not taken. A step takes
    the first groups in the order of the prompts, whichever ends first. So with deterministic
    engines it does not depend on how many groups were in play. What began behind them is dropped,
    and its prompts come again in the next step; with `rules.partial` it is carried over.

    `deterministic` assigns groups to engines in advance, and an engine gets all of them at once.
    Otherwise an engine takes the next group from a counter that all share as soon as its slots have
    room, so that neither a slow engine nor a slow environment delays the others.
    """

    player: Player
    _: KW_ONLY
    params: SamplingParams  # of training
    write_records: WriteRecords  # for the transcripts of a rollout that ends the run
    prompts: Examples | None = None  # of training; None in an evaluation
    samples_per_prompt: int = 1
    num_steps: int = 1
    seed: int = 0
    deterministic: bool = True
    rules: RolloutRules = RolloutRules()
    # During a step, also the groups that it has begun.
    carried_over: list[Group] = field(default_factory=list)
    # Indices of the rows that rules.drop_solved leaves out.
    solved: set[int] = field(default_factory=set)
    part_names: set[str] = field(default_factory=set)  # of the rewards of the first step
    # Training prompts of the steps that are done, over all epochs. Those that were replaced do not
    # count, so that a resumed run has as many steps as one that was not interrupted.
    rows_done: int = 0

    has_other_policy = False  # the actor itself samples, up to the lag of partial rollouts

    def collect(self, step: int) -> list[Trajectory]:
        """The trajectories of training step 1, 2, ..., of all processes on every process.

        Their messages are on the first process only, which writes them. Groups that were replaced
        are among them, without samples.

        RuntimeError if the environment failed on more trajectories than it may, or if no prompt is
        left to train on.
        """
        if self.is_exhausted:
            raise RuntimeError(ALL_SOLVED)
        self.carried_over = [self._begin_again_if_stale(group) for group in self.carried_over]
        num_carried = len(self.carried_over)
        queue = self._make_queue(is_last=step == self.num_steps)
        queue.pins = self._find_pins()
        played = self._play_groups(queue, self.params, "train", step)
        end = queue.end or queue.num_needed  # without a filter another process may still play
        self._put_back(played, end, num_carried)
        own = {number: group for number, group in played.items() if number < end}
        if queue.bounds:
            _mark_filtered(own, queue)
        trajectories = self._gather(list(own.values()), "train", step)
        queue.store.delete_key(queue.key)
        self._note_rewards(trajectories)
        if self.rules.overlong_buffer:
            self._add_overlong(trajectories, self.rules.overlong_buffer)
        self.rows_done += queue.num_needed
        return trajectories

    def _make_queue(self, is_last: bool) -> Queue:
        """The queue of a training step; `is_last` if no step follows."""
        assert self.prompts is not None
        size = self.prompts.batch_size
        return Queue(
            self._make_group,
            num_needed=size,
            most=size * (1 + self.rules.max_refills) if self.rules.filter else size,
            num_ahead=size if self.rules.partial and not is_last else 0,
            bounds=self.rules.filter,
        )

    def _make_group(self, number: int) -> Group:
        """The group of the step's queue: first those carried over, then those of new prompts.

        Every process makes the same ones, in their order and as far as it needs them.
        """
        assert self.prompts is not None
        groups = self.carried_over
        while len(groups) <= number:
            [prompt] = self.prompts.next_items(1)
            while prompt.index in self.solved:
                [prompt] = self.prompts.next_items(1)
            group_id = groups[-1].id + 1 if groups else 0
            first_trajectory = groups[-1].trajectories[-1].id + 1 if groups else 0
            group = begin_group(group_id, prompt, self.samples_per_prompt, first_trajectory)
            group.rows_done = self.prompts.rows_done
            groups.append(group)
        return groups[number]

    def _begin_again_if_stale(self, group: Group) -> Group:
        """The group, or one that begins anew if it has tokens older than rules.max_staleness."""
        limit = self.rules.max_staleness
        version = self.player.engine.version
        assert version is not None, "the engine has no weights"
        lags = [version - sampled_by for t in group.trajectories for sampled_by, _ in t.versions]
        if limit is None or max(lags, default=0) <= limit:
            return group
        self._drop([group])
        trajectories = group.trajectories
        again = begin_group(group.id, group.prompt, len(trajectories), trajectories[0].id)
        return replace(group, trajectories=again.trajectories)

    def _find_pins(self) -> dict[int, int]:
        """The engine of each carried-over group for which calls of the environment run."""
        if not self.rules.partial:
            return {}
        own = {
            number: self.player.engine.index
            for number, group in enumerate(self.carried_over)
            if self.player.has_calls(group, "train")
        }
        return {n: index for part in all_gather_objects(own) for n, index in part.items()}

    def _drop(self, groups: list[Group]) -> None:
        """Ends what runs for groups that are not played any more, and tells the environment.

        What takes longer to end continues beside the training step.
        """
        player = self.player

        async def end_calls() -> None:
            ends = []
            for group in groups:
                ends.append(player.cancel_call(group_key(group)))
                ends += [player.drop(t, ("train", t.id)) for t in group.trajectories]
            await asyncio.wait(map(asyncio.ensure_future, ends), timeout=POLL_SECONDS)

        if groups:
            player.engine.loop.run_until_complete(end_calls())

    def _put_back(self, played: dict[int, Group], end: int, num_carried: int) -> None:
        """Carries over or drops the groups behind the first `end`, and moves the position.

        `num_carried` groups were carried over before. Every process keeps those that are now, so
        that whichever engine is free goes on with them.
        """
        assert self.prompts is not None
        behind = {number: group for number, group in played.items() if number >= end}
        newest: dict[int, Group] = {}
        if self.rules.partial:
            newest = {n: group for part in all_gather_objects(behind) for n, group in part.items()}
            num_seen = max(end, num_carried, *(number + 1 for number in newest))
        else:
            num_seen = end
            self._drop(list(behind.values()))
        self.prompts.rows_done = self._make_group(num_seen - 1).rows_done
        for number, group in newest.items():
            self.carried_over[number] = group
        self.carried_over = self.carried_over[end:num_seen]

    def _note_rewards(self, trajectories: list[Trajectory]) -> None:
        """Notes which prompts are solved.

        ValueError if the rewards of the first step do not have the parts that keys name.
        """
        if not self.part_names:
            self._check_part_names(trajectories)
        if self.rules.drop_solved is None:
            return
        for _, group in itertools.groupby(trajectories, lambda trajectory: trajectory.group):
            members = list(group)
            if mean_reward(members) >= self.rules.drop_solved:
                self.solved.add(members[0].row_index)
        if self.is_exhausted and dist.get_rank() == 0:
            print(ALL_SOLVED)

    def _check_part_names(self, trajectories: list[Trajectory]) -> None:
        self.part_names = {name for t in trajectories for name in t.rewards}
        unknown = self.player.reward_weights.keys() - self.part_names
        if unknown and self.part_names:
            raise ValueError(
                f"rollout.reward_weights.{min(unknown)}: no reward of the first step has a part of "
                f"this name; the parts are {', '.join(sorted(self.part_names))}"
            )
        if self.rules.overlong_buffer and "overlong" in self.part_names:
            raise ValueError(
                "reward_fn returns a part named overlong, and rollout.overlong_buffer adds a part "
                "of this name: rename that of reward_fn"
            )

    def _add_overlong(self, trajectories: list[Trajectory], buffer: int) -> None:
        """Adds the reward part `overlong` to all trajectories that have a reward."""
        longest = self.params.max_new_tokens
        for trajectory in trajectories:
            if trajectory.finish_reason == "failed":
                continue
            score = overlong_score(trajectory.longest_turn, longest, buffer)
            trajectory.rewards["overlong"] = self.rules.overlong_penalty * score
            if not trajectory.is_filtered:
                place_reward(trajectory)

    @property
    def is_exhausted(self) -> bool:
        """Whether every training prompt is solved, so that the run ends with this step."""
        return self.prompts is not None and len(self.solved) == len(self.prompts)

    def play(
        self,
        prompts: list[Example],
        params: SamplingParams,
        num_samples: int,
        split: str,
        step: int,
    ) -> list[Trajectory]:
        """Plays each prompt `num_samples` times, shared among the engines.

        `split` (train | test | test_NAME) and `step` name the randomness. Returns what `collect`
        returns.

        RuntimeError if the environment failed on more trajectories than it may.
        """
        groups = [
            begin_group(i, prompt, num_samples, i * num_samples) for i, prompt in enumerate(prompts)
        ]
        queue = Queue(groups.__getitem__, num_needed=len(groups), most=len(groups))
        played = self._play_groups(queue, params, split, step)
        return self._gather(list(played.values()), split, step)

    def _gather(self, groups: list[Group], split: str, step: int) -> list[Trajectory]:
        """The trajectories of the groups of all processes, if the environment was well enough."""
        trajectories = _gather_trajectories(groups)
        assert all(trajectory.finish_reason for trajectory in trajectories), "a play was cancelled"
        num_failed = sum(trajectory.finish_reason == "failed" for trajectory in trajectories)
        try:
            self.player.failures.check(num_failed, len(trajectories))
        except RuntimeError:
            self.write_records(split, step, to_records(trajectories))
            raise
        return trajectories

    def _play_groups(
        self, queue: Queue, params: SamplingParams, split: str, step: int
    ) -> dict[int, Group]:
        """Plays the groups of the queue until it has ended.

        Returns those of this process's engine by number.
        """
        # Of this process. Where each engine takes the next group, none knows its share.
        num_groups = -(-queue.num_needed // self.player.engine.count)
        title = "rollout" if split == "train" else split
        with progress.Bar(title, num_groups, "groups", dist.get_rank() == 0) as bar:
            rollout = _Rollout(self, queue, params, split, step, bar)
            self.player.engine.loop.run_until_complete(rollout.play())
        return rollout.played

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        assert self.prompts is not None
        return {
            "position": self.prompts.state_dict(),
            "rows_done": self.rows_done,
            "carried_over": pickle.dumps(self.carried_over),
            "solved": pickle.dumps(self.solved),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert self.prompts is not None
        self.prompts.load_state_dict(state["position"])
        self.rows_done = state["rows_done"]
        self.carried_over = pickle.loads(state["carried_over"])
        if self.rules.drop_solved is not None:
            self.solved = pickle.loads(state["solved"])


@dataclass
class _Rollout:
    """Plays the groups of a queue on the engine of this process."""

    collector: Collector
    queue: Queue
    params: SamplingParams
    split: str
    step: int
    bar: progress.Bar
    played: dict[int, Group] = field(default_factory=dict)  # by number

    async def play(self) -> None:
        """Plays until all groups are done, or until the step has what it needs.

        Then the player pauses: turns are aborted, and nobody waits for the environment.
        """
        player, queue = self.collector.player, self.queue
        player.begin_rollout(self.may_end_early)
        playing = asyncio.ensure_future(self._play_queue())
        while self.may_end_early and not playing.done():
            await asyncio.sleep(POLL_SECONDS)
            queue.read()
            if queue.end is not None:
                player.pause()
                player.engine.abort()  # repeated: a request may have been on its way
        try:
            await playing
        except BaseExceptionGroup as errors:  # the first one has ended all tasks
            raise errors.exceptions[0] from None

    @property
    def may_end_early(self) -> bool:
        """Whether groups are played that the step may not need."""
        return bool(self.queue.bounds or self.queue.num_ahead)

    async def _play_queue(self) -> None:
        player = self.collector.player
        max_requests = math.inf
        if not self.collector.deterministic:
            max_requests = REQUESTS_PER_SLOT * player.engine.max_running_requests
        num_begun = 0  # trajectories that have not run yet
        async with asyncio.TaskGroup() as tasks:
            async for number in self._own_numbers():
                group = self.played[number] = self.queue.make_group(number)
                plays = [
                    tasks.create_task(self._play_trajectory(group, i))
                    for i in range(len(group.trajectories))
                ]
                tasks.create_task(self._finish_group(number, group, plays))
                num_begun += len(plays)
                if player.num_requests + num_begun >= max_requests:
                    await player.wait_for_room(max_requests)
                    num_begun = 0

    async def _play_trajectory(self, group: Group, i: int) -> None:
        trajectory = group.trajectories[i]
        tokens_before = trajectory.length
        seed = (self.collector.seed, int(self.split != "train"), self.step, group.id, i)
        key = (self.split, trajectory.id)
        await self.collector.player.play(trajectory, self.params, seed, key)
        self.bar.add(0, trajectory.length - tokens_before)

    async def _finish_group(self, number: int, group: Group, plays: list[asyncio.Task]) -> None:
        """Scores a group and reports it, once all its trajectories are done."""
        await asyncio.wait(plays)
        if not group.is_done:
            return
        player = self.collector.player
        if player.env.spec.group_reward_fn is not None:
            await player.score_group(group)
            if not group.is_scored:
                return
        self.bar.add(1)
        if self.may_end_early:
            self.queue.report(number, group)

    async def _own_numbers(self) -> AsyncIterator[int]:
        """The numbers of the groups that this process's engine plays, as it gets to them.

        A process that only serves its tensors to the engine of another one has none. But it waits
        until it knows where the step ends.
        """
        queue, player = self.queue, self.collector.player
        for number in self._dealt_numbers():
            while number >= queue.limit:
                if not queue.bounds or queue.end is not None:
                    return
                await asyncio.sleep(POLL_SECONDS)
                queue.read()
            if player.is_pausing:
                return
            yield number

    def _dealt_numbers(self) -> Iterator[int]:
        """Ascending numbers for this engine. A pinned group has the engine of its pin."""
        queue, engine = self.queue, self.collector.player.engine
        numbers: Iterator[int]
        if engine.index is None:
            numbers = iter([sys.maxsize])
        elif self.collector.deterministic:
            numbers = itertools.count(engine.index, engine.count)
        else:  # the next one that no engine has
            numbers = iter(lambda: queue.store.add(f"{queue.key}/begun", 1) - 1, None)
        own = sorted(number for number, index in queue.pins.items() if index == engine.index)
        for number in numbers:
            while own and own[0] < number:
                yield own.pop(0)
            if number not in queue.pins:
                yield number


def _mark_filtered(groups: dict[int, Group], queue: Queue) -> None:
    """Notes which trajectories rollout.filter leaves out, and takes their samples."""
    for number, group in groups.items():
        for trajectory in group.trajectories:
            trajectory.is_filtered = not queue.takes(number)
            if trajectory.is_filtered:
                trajectory.samples = []


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
