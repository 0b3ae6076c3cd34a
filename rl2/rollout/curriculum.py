"""Which prompts come again in later epochs, by how often their answers succeeded."""

import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rl2.data.examples import DataCursor, Example

INTERVAL = 4  # epochs after which a prompt outside of the bounds comes again


class Measured(NamedTuple):
    """What is known of a prompt."""

    success: float  # the mean score of its newest group of answers
    epoch: int  # in which the prompt was taken for them, from 0


@dataclass
class Curriculum:
    """Passes over prompts that would teach little, given how their answers did before.

    A prompt whose answers have reached the mean score `drop_solved` never comes again. With
    `bounds`, a prompt whose newest success is outside of them comes in each fourth epoch only, and
    the others in all. A prompt that was never played is never passed over.

    What is passed over depends on the position in the data and on what was measured before the
    step, so it is the same on every process and in a resumed run.
    """

    drop_solved: float | None = None
    bounds: Sequence[float] = ()  # (low, high), both within; empty: no curriculum
    measured: dict[int, Measured] = field(default_factory=dict)  # by the index of the row

    @property
    def is_on(self) -> bool:
        return self.drop_solved is not None or bool(self.bounds)

    def take(self, cursor: DataCursor) -> Example:
        """Returns the next prompt that is not passed over. One must be left."""
        while self._passes_over(*cursor.next_index()):
            cursor.skip()
        return cursor.take()

    def note(self, index: int, success: float, epoch: int) -> None:
        """Notes the mean score of the answers to a prompt. NaN, if all failed, says nothing."""
        if not math.isnan(success) and not self._is_solved(index):
            self.measured[index] = Measured(success, epoch)

    def num_solved(self) -> int:
        if self.drop_solved is None:
            return 0
        return sum(map(self._is_solved, self.measured))

    def summarise(self) -> dict[str, float]:
        """The share of the prompts played so far that is within the bounds, as a metric."""
        if not self.bounds or not self.measured:
            return {}
        num_within = sum(self._is_within(measured.success) for measured in self.measured.values())
        return {"rollout/in_curriculum": num_within / len(self.measured)}

    def _passes_over(self, index: int, epoch: int) -> bool:
        measured = self.measured.get(index)
        if measured is None:
            return False
        if self._is_solved(index):
            return True
        is_due = epoch >= measured.epoch + INTERVAL
        return not is_due and not self._is_within(measured.success)

    def _is_solved(self, index: int) -> bool:
        measured = self.measured.get(index)
        limit = self.drop_solved
        return limit is not None and measured is not None and measured.success >= limit

    def _is_within(self, success: float) -> bool:
        return not self.bounds or self.bounds[0] <= success <= self.bounds[1]

    def state_dict(self) -> dict[str, Any]:
        """Returns what a resumed run needs."""
        return {"measured": pickle.dumps(self.measured)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.is_on:
            self.measured = pickle.loads(state["measured"])
