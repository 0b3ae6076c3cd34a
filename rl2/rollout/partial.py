"""rollout.partial: what a step has begun for the next one waits, and goes on there."""

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from rl2.parallel.mesh import all_gather_objects
from rl2.rollout.collect import Collector, StepGroups
from rl2.rollout.trajectory import Group, Trajectory, begin_group


@dataclass
class PartialCollector(Collector):
    """A step also plays prompts of the next one, and ends when its own groups are done.

    The others wait in `carried_over`, the same on every process, and continue in the next step.
    """

    _: KW_ONLY
    num_steps: int  # of the whole run
    max_staleness: int | None  # rollout.max_staleness: the age of a token in updates
    keeps_unused: ClassVar[bool] = True

    def collect(self, step: int) -> list[Trajectory]:
        self.carried_over = [self._restart_if_stale(group) for group in self.carried_over]
        return super().collect(step)

    def _restart_if_stale(self, group: Group) -> Group:
        """Returns the group, or a new start of it if it has tokens older than max_staleness."""
        limit = self.max_staleness
        version = self.player.engine.version
        assert version is not None, "the engine has no weights"
        lags = [version - sampled_by for t in group.trajectories for sampled_by, _ in t.versions]
        if limit is None or max(lags, default=0) <= limit:
            return group
        first = group.trajectories[0].id
        return begin_group(group.id, group.prompt, len(group.trajectories), first)

    def num_ahead(self, step: int) -> int:
        assert self.cursor is not None
        return 0 if step == self.num_steps else self.cursor.examples.batch_size

    def keep_unused(
        self, groups: StepGroups, begun: dict[int, Group], num_used: int
    ) -> list[Group]:
        """Every process gets all of them, so that whichever engine is free continues them."""
        num_kept = max(num_used, len(groups.carried_over))
        unused = {number: group for number, group in begun.items() if number >= num_used}
        for theirs in all_gather_objects(unused):
            for number, group in theirs.items():
                groups.replace(number, group)
                num_kept = max(num_kept, number + 1)
        groups.get(num_kept - 1)  # which this process may not have made yet
        return groups.groups[num_used:num_kept]
