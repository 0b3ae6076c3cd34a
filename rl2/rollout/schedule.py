"""Which groups a rollout plays and which of them a step uses, and how the engines agree on it."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch.distributed.distributed_c10d import _get_default_store

_rollout_numbers = itertools.count()  # every process counts the same rollouts


@dataclass
class GroupSchedule:
    """Decides which groups of a rollout may start and which ones the step uses.

    It is pure: it knows no store, no engine and no group, only numbers. Groups are numbered in the
    order of their prompts. The step trains the first `num_needed` groups that pass the filter, and
    uses all groups up to the last of these, but never more than the first `max_used`. As many as
    `num_ahead` more groups may start for the next step.

    For example, num_needed=2, max_used=6 and filter=(0, 1) with the mean scores 0.0, 0.5, 1.0, 0.5:
    the step uses four groups and trains the second and the fourth.
    """

    num_needed: int
    max_used: int
    num_ahead: int = 0
    filter: Sequence[float] = ()  # rollout.filter: (low, high), or empty
    mean_scores: dict[int, float] = field(default_factory=dict)  # of the groups that are done

    @property
    def may_start_unused(self) -> bool:
        """Whether groups may start that the step does not use."""
        return bool(self.filter or self.num_ahead)

    def passes_filter(self, number: int) -> bool:
        """Returns whether the step trains a group that is done. NaN passes no filter."""
        if not self.filter:
            return True
        low, high = self.filter
        return low < self.mean_scores[number] < high

    @property
    def start_limit(self) -> int:
        """Groups with a smaller number may start.

        As many are in play as are missing, and as many more as failed the filter so far, up to
        twice the missing ones.
        """
        num_done = len(self.mean_scores)
        num_passed = sum(self.passes_filter(number) for number in self.mean_scores)
        num_missing = max(self.num_needed + self.num_ahead - num_passed, 0)
        num_more = min(num_done - num_passed, num_missing)
        return min(num_done + num_missing + num_more, self.max_used + self.num_ahead)

    @property
    def num_used(self) -> int | None:
        """How many groups the step uses; with a filter, None until that is known."""
        if not self.filter:
            return self.num_needed
        num_passed = 0
        for number in range(self.max_used):
            if number not in self.mean_scores:
                return None
            num_passed += self.passes_filter(number)
            if num_passed == self.num_needed:
                return number + 1
        return self.max_used

    @property
    def is_complete(self) -> bool:
        """Whether all groups that the step uses are done."""
        num_used = self.num_used
        return num_used is not None and all(n in self.mean_scores for n in range(num_used))


class GroupBoard:
    """Coordinates the engines of one rollout through torch's store. All processes make one."""

    def __init__(self) -> None:
        self.store = _get_default_store()
        self.key = f"rl2/rollout/{next(_rollout_numbers)}"

    def claims(self) -> Iterator[int]:
        """Claims the next group whenever it is asked. No two engines get the same one."""
        while True:
            yield self.store.add(f"{self.key}/begun", 1) - 1

    def post(self, number: int, mean_score: float) -> None:
        """Tells all processes that a group is done."""
        line = f"{number} {mean_score!r}\n"
        self.store.append(self.key, line)  # type: ignore[attr-defined]  # torch's stubs lack it

    def read(self) -> dict[int, float]:
        """Returns the mean scores of all groups that any process has posted, by number."""
        if not self.store.check([self.key]):
            return {}
        mean_scores = {}
        for line in self.store.get(self.key).decode().splitlines():
            number, mean_score = line.split()
            mean_scores[int(number)] = float(mean_score)
        return mean_scores

    def clear(self) -> None:
        """Removes claims and posts, when every process has read what it needs."""
        self.store.delete_key(f"{self.key}/begun")
        self.store.delete_key(self.key)
