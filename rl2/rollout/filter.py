"""rollout.filter: groups of further prompts replace those whose mean score is outside of it."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

from rl2.rollout.schedule import GroupSchedule
from rl2.rollout.trajectory import FilterStatus, Group


@dataclass
class FilteredSchedule(GroupSchedule):
    """Trains the first `num_needed` groups that pass the filter, in the order of their prompts.

    The step uses all groups up to the last of these, whichever end first, but never more than
    1 + max_refills times those needed. So with deterministic engines it does not depend on how
    many groups were in play. Later groups are dropped, and their prompts come again in the next
    step; with partial rollouts they are carried over.

    For example, num_needed=2 and bounds=(0, 1) with the mean scores 0.0, 0.5, 1.0, 0.5: the step
    uses four groups and trains the second and the fourth.
    """

    _: KW_ONLY
    bounds: Sequence[float]  # (low, high)
    max_refills: int

    @property
    def max_used(self) -> int:
        return self.num_needed * (1 + self.max_refills)

    @property
    def may_start_unused(self) -> bool:
        return True

    def _passes(self, number: int) -> bool:
        """Returns whether the step trains a group that is done. NaN passes no filter."""
        low, high = self.bounds
        return low < self.mean_scores[number] < high

    @property
    def start_limit(self) -> int:
        """As many are in play as are missing, and as many more as failed the filter so far, up to
        twice the missing ones.
        """
        num_done = len(self.mean_scores)
        num_passed = sum(self._passes(number) for number in self.mean_scores)
        num_missing = max(self.num_needed + self.num_ahead - num_passed, 0)
        num_more = min(num_done - num_passed, num_missing)
        return min(num_done + num_missing + num_more, self.max_used + self.num_ahead)

    @property
    def num_used(self) -> int | None:
        num_passed = 0
        for number in range(self.max_used):
            if number not in self.mean_scores:
                return None
            num_passed += self._passes(number)
            if num_passed == self.num_needed:
                return number + 1
        return self.max_used

    def mark_rejected(self, used: Mapping[int, Group]) -> None:
        for number, group in used.items():
            passes = self._passes(number)
            for trajectory in group.trajectories:
                trajectory.filter_status = FilterStatus.PASSED if passes else FilterStatus.REJECTED
                if not passes:
                    trajectory.samples = []
