"""Which prompts come again in later epochs, by how often their answers succeeded."""

import itertools
import math
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rl2.data.examples import DataCursor, Example
from rl2.rollout.trajectory import Trajectory, mean_score

INTERVAL = 4  # epochs after which a prompt outside of the bounds comes again


class Measured(NamedTuple):
    """What is known of a prompt."""

    success: float  # the mean score of its newest group of answers
    epoch: int  # in which the prompt was taken for them, from 0


@dataclass
class Curriculum:
    """Passes over prompts that would teach little, given how their answers did before.

    A prompt whose newest success is outside of `bounds` comes in every fourth epoch only, and the
    others in each. What is passed over depends on the position in the data and on what was measured
    before the step, so it is the same on every process and in a resumed run.
    """

    bounds: Sequence[float] = ()  # (low, high), both within; empty: no curriculum
    measured: dict[int, Measured] = field(default_factory=dict)  # by the index of the row

    def take(self, cursor: DataCursor) -> Example:
        """Returns the next prompt that is not passed over."""
        while self._passes_over(*cursor.next_index()):
            cursor.skip()
        return cursor.take()

    def note(
        self, trajectories: Iterable[Trajectory], epochs: Mapping[int, int], score: str | None
    ) -> None:
        """Notes how the answers to each prompt did. NaN, if all failed, says nothing.

        `epochs` are by group; `score` is rollout.score.
        """
        if not self.bounds:
            return
        for number, group in itertools.groupby(trajectories, lambda trajectory: trajectory.group):
            members = list(group)
            success = mean_score(members, score)
            if not math.isnan(success):
                self.measured[members[0].row_index] = Measured(success, epochs[number])

    def summarise(self) -> dict[str, float]:
        """The share of the prompts played so far that is within the bounds, as a metric."""
        if not self.measured:
            return {}
        num_within = sum(self._is_within(measured.success) for measured in self.measured.values())
        return {"rollout/in_curriculum": num_within / len(self.measured)}

    def _passes_over(self, index: int, epoch: int) -> bool:
        measured = self.measured.get(index)
        if measured is None or epoch >= measured.epoch + INTERVAL:
            return False
        return not self._is_within(measured.success)

    def _is_within(self, success: float) -> bool:
        low, high = self.bounds
        return low <= success <= high

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs."""
        return {"measured": pickle.dumps(self.measured)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.bounds:
            self.measured = pickle.loads(state["measured"])
