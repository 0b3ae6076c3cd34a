"""Which groups a rollout plays and which of them a step uses, and how the engines agree on it."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch.distributed.distributed_c10d import _get_default_store

from rl2.rollout.trajectory import Group

_rollout_numbers = itertools.count()  # every process counts the same rollouts


@dataclass
class GroupSchedule:
    """Decides which groups of a rollout may start and which ones the step uses.

    It decides by the numbers of groups, which are in the order of their prompts, and knows no store
    and no engine. The step uses the first `num_needed`, and as many as `num_ahead` more may start
    for the next step. filter.py has a schedule that also uses groups without training them.
    """

    num_needed: int
    num_ahead: int = 0
    mean_scores: dict[int, float] = field(default_factory=dict)  # of the groups that are done

    @property
    def may_start_unused(self) -> bool:
        """Whether groups may start that the step does not use: then engines post what is done."""
        return self.num_ahead > 0

    @property
    def start_limit(self) -> int:
        """Groups with a smaller number may start."""
        return self.num_needed + self.num_ahead

    @property
    def num_used(self) -> int | None:
        """How many groups the step uses; None while that is not known."""
        return self.num_needed

    @property
    def is_complete(self) -> bool:
        """Whether all groups that the step uses are done."""
        num_used = self.num_used
        return num_used is not None and all(n in self.mean_scores for n in range(num_used))

    def mark_rejected(self, used: Mapping[int, Group]) -> None:
        """Marks the groups that the step uses and does not train, and takes their samples."""


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
