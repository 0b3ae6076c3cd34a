"""Collects the trajectories of a step from all engines."""

import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import chain
from typing import Any, ClassVar

import torch.distributed as dist

from rl2 import progress
from rl2.data.examples import DataCursor, Example
from rl2.engine.base import SamplingParams
from rl2.parallel.mesh import all_gather_objects, gather_objects
from rl2.rollout.play import Rollout
from rl2.rollout.player import Player
from rl2.rollout.schedule import GroupBoard, GroupSchedule
from rl2.rollout.shape import Shape
from rl2.rollout.stats import to_records
from rl2.rollout.trajectory import (
    Group,
    Trajectory,
    begin_group,
    in_order,
    place_rewards,
)
from rl2.rounding import ceil_div

WriteRecords = Callable[[str, int, Iterable[dict[str, Any]]], None]  # of split, step, records


@dataclass
class StepGroups:
    """The groups of a step by number: those carried over, then groups of the next prompts.

    Every process makes the same ones, in the same order and as far as it needs them.
    """

    carried_over: Sequence[Group]
    cursor: DataCursor
    samples_per_prompt: int

    def __post_init__(self) -> None:
        self.groups = list(self.carried_over)

    def get(self, number: int) -> Group:
        """Returns the group of a number, and makes those up to it that are missing."""
        while len(self.groups) <= number:
            self.groups.append(self._make_next())
        return self.groups[number]

    def replace(self, number: int, group: Group) -> None:
        """Puts in the group as another process has played it."""
        self.get(number)
        self.groups[number] = group

    def _make_next(self) -> Group:
        prompt = self.cursor.take()
        group_id = first_trajectory = 0
        if self.groups:
            group_id = self.groups[-1].id + 1
            first_trajectory = self.groups[-1].trajectories[-1].id + 1
        return begin_group(group_id, prompt, self.samples_per_prompt, first_trajectory)


@dataclass
class Collector:
    """Plays prompts with the engines of all processes.

    `cursor` has the position in the training data; it is None in an evaluation.

    `deterministic` deals the groups to the engines in advance, and an engine gets all of its own
    that may start. Otherwise an engine claims the next group as soon as its slots have room, so
    that neither a slow engine nor a slow environment delays the others.
    """

    player: Player
    _: KW_ONLY
    params: SamplingParams  # of training
    write_records: WriteRecords  # for the transcripts of a rollout that ends the run
    cursor: DataCursor | None = None
    samples_per_prompt: int = 1
    seed: int = 0
    deterministic: bool = True
    new_schedule: Callable[[int, int], GroupSchedule] = GroupSchedule  # of num_needed, num_ahead
    shapes: Sequence[Shape] = ()  # of the rewards
    keeps_unused: ClassVar[bool] = False  # partial.py has a collector that does
    carried_over: list[Group] = field(default_factory=list)  # what it has kept for the next step
    part_names: set[str] = field(default_factory=set)  # of the rewards of the first step

    def collect(self, step: int) -> list[Trajectory]:
        """Returns the trajectories of training step 1, 2, ..., of all processes on every process.

        They are in order of the process that played them and then of the data. Their messages and
        rows are on the first process only, which writes them. Groups that the filter rejected are
        among them, without samples.

        RuntimeError if the environment failed on more trajectories than it may. ValueError if keys
        name parts of the rewards that there are not, or one that rl2 adds.
        """
        assert self.cursor is not None
        # That of group 0: the prompts of what is carried over are the last ones that were taken.
        first_position = self.cursor.position - len(self.carried_over)
        groups = StepGroups(self.carried_over, self.cursor, self.samples_per_prompt)
        num_needed = self.cursor.examples.batch_size
        schedule = self.new_schedule(num_needed, self.num_ahead(step))
        board = GroupBoard()
        begun = self._play(groups.get, schedule, board, self.params, "train", step)
        num_used = schedule.num_used
        assert num_used is not None
        self.carried_over = self.keep_unused(groups, begun, num_used)
        # The prompts of groups that are not kept come again.
        self.cursor.position = first_position + num_used + len(self.carried_over)
        used = {number: group for number, group in begun.items() if number < num_used}
        schedule.mark_rejected(used)
        own = [trajectory for group in used.values() for trajectory in group.trajectories]
        trajectories = self._gather(own, "train", step)
        board.clear()  # every process has gathered, so none reads it any more
        env_parts = {name for t in trajectories for name in t.rewards}
        for shape in self.shapes:
            shape(trajectories)
        self._check_part_names(trajectories, env_parts)
        place_rewards(trajectories)
        self.cursor.rows_done += num_needed
        return trajectories

    def num_ahead(self, step: int) -> int:
        """How many groups may start in this step for the next one."""
        return 0

    def keep_unused(
        self, groups: StepGroups, begun: dict[int, Group], num_used: int
    ) -> list[Group]:
        """Returns the groups that go on in the next step, of those that this one does not use.

        `begun` are those of this process's engine by number.
        """
        return []

    def _check_part_names(self, trajectories: list[Trajectory], env_parts: set[str]) -> None:
        """ValueError if the first rewards do not have the parts that keys name.

        The score is one of `env_parts`: groups are filtered by it before other parts are added.
        """
        if self.part_names:
            return
        self.part_names = {name for t in trajectories for name in t.rewards}
        for name in sorted(self.player.reward_weights):
            check_part_name(f"rollout.reward_weights.{name}", name, self.part_names)
        check_part_name(f"rollout.score={self.player.score}", self.player.score, env_parts)

    @property
    def rows_done(self) -> int:
        """Training prompts of the finished steps, over all epochs."""
        assert self.cursor is not None
        return self.cursor.rows_done

    def play(
        self,
        prompts: list[Example],
        params: SamplingParams,
        num_samples: int,
        split: str,
        step: int,
    ) -> list[Trajectory]:
        """Plays each prompt `num_samples` times, shared among the engines.

        `split` (train | test | test_NAME) and `step` name the environment's trajectories; all test
        sets have the same random numbers. Returns what `collect` returns, unfiltered.

        RuntimeError if the environment failed on more trajectories than it may.
        """
        groups = [
            begin_group(i, prompt, num_samples, i * num_samples, split)
            for i, prompt in enumerate(prompts)
        ]
        schedule = GroupSchedule(len(groups))
        board = GroupBoard()
        begun = self._play(groups.__getitem__, schedule, board, params, split, step)
        own = [trajectory for group in begun.values() for trajectory in group.trajectories]
        trajectories = self._gather(own, split, step)
        board.clear()
        place_rewards(trajectories)
        return trajectories

    def _play(
        self,
        get_group: Callable[[int], Group],
        schedule: GroupSchedule,
        board: GroupBoard,
        params: SamplingParams,
        split: str,
        step: int,
    ) -> dict[int, Group]:
        """Plays the groups of the schedule. Returns those of this process's engine by number."""
        # An estimate: engines claim groups first come, first served, so none knows its share.
        num_groups = ceil_div(schedule.num_needed, self.player.engine.count)
        title = "rollout" if split == "train" else split
        with progress.Bar(title, num_groups, "groups", dist.get_rank() == 0) as bar:
            rollout = Rollout(
                player=self.player,
                schedule=schedule,
                board=board,
                get_group=get_group,
                params=params,
                seed=(self.seed, int(split != "train"), step),
                deterministic=self.deterministic,
                keeps_unused=self.keeps_unused,
                bar=bar,
            )
            self.player.engine.loop.run_until_complete(rollout.play())
        return rollout.begun

    def _gather(self, own: list[Trajectory], split: str, step: int) -> list[Trajectory]:
        """Returns the trajectories of all processes, unless the env failed on too many of them."""
        trajectories = _gather_trajectories(own)
        assert all(trajectory.is_done for trajectory in trajectories), "a play was cancelled"
        num_failed = sum(trajectory.is_failed for trajectory in trajectories)
        try:
            self.player.failures.check(num_failed, len(trajectories))
        except RuntimeError:
            self.write_records(split, step, to_records(trajectories))
            raise
        return trajectories

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs."""
        assert self.cursor is not None
        return {
            "position": {"rows_done": self.cursor.position},
            "rows_done": self.cursor.rows_done,
            "carried_over": pickle.dumps(self.carried_over),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert self.cursor is not None
        self.cursor.position = state["position"]["rows_done"]
        self.cursor.rows_done = state["rows_done"]
        self.carried_over = pickle.loads(state["carried_over"])


def check_part_name(setting: str, name: str | None, part_names: set[str]) -> None:
    """ValueError if a setting names a part that is not among those of the first rewards.

    The part of turns need not be: a trajectory has it only if its turns earned something.
    """
    if name not in (None, "turns") and part_names and name not in part_names:
        raise ValueError(
            f"{setting}: no reward of the first step has a part of this name; the parts are "
            f"{', '.join(sorted(part_names))}"
        )


def _gather_trajectories(own: list[Trajectory]) -> list[Trajectory]:
    """Returns the trajectories of all processes, in order of process and then of the data."""
    trajectories = in_order(own)
    texts = gather_objects([(trajectory.messages, trajectory.row) for trajectory in trajectories])
    without_texts = [replace(trajectory, messages=[], row={}) for trajectory in trajectories]
    gathered = list(chain.from_iterable(all_gather_objects(without_texts)))
    # The first process has the texts of all, in the same order; the others have none.
    for trajectory, (messages, row) in zip(gathered, chain.from_iterable(texts), strict=False):
        trajectory.messages = messages
        trajectory.row = row
    return gathered
