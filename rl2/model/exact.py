"""rollout.exact: the trainer's log-probabilities have the bits of the embedded engine's on a CPU.

The engine decodes a token at a time and the trainer runs packed sequences. Both compute every row
in the same order of additions: attention by pages (attention/pages.py), and the head here.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from rl2.batch import Batch, Pack
from rl2.config.conditions import Exactness


class EngineCheck:
    """Compares log-probabilities of the trainer with those that the engine sampled with."""

    def __init__(self, exactness: Exactness):
        self.exactness = exactness
        self.has_warned = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which nothing is compared: the model has other weights than the engine."""
        exactness, self.exactness = self.exactness, Exactness.ASSUMED
        try:
            yield
        finally:
            self.exactness = exactness

    def compare(self, batch: Batch, pack: Pack, logps: Tensor) -> None:
        """Compares the pairs [P] of `pack`, which has packed the rows of `batch`.

        Nothing is compared once the batch has old log-probabilities: then newer weights score it.
        RuntimeError for a difference if equal bits are demanded; else the first one is a warning.
        """
        if self.exactness not in (Exactness.TRIED, Exactness.DEMANDED):
            return
        if batch.old_logps is not None:
            return
        difference = _find_difference(batch, pack, logps)
        if difference and self.exactness is Exactness.DEMANDED:
            raise RuntimeError(f"rollout.exact=true: {difference}")
        if difference and not self.has_warned:
            self.has_warned = True
            print(
                f"warning: {difference}. The run continues, and actor/mismatch_* says how far the "
                "two are apart; rollout.exact=false spares the attempt",
                file=sys.stderr,
            )


def _find_difference(batch: Batch, pack: Pack, logps: Tensor) -> str:
    """Describes the first pair with another log-probability than the engine's; "" if none has."""
    engine_logps = batch.engine_logps[pack.rows, pack.columns]
    wrong = (logps != engine_logps).nonzero()[:, 0].tolist()
    if not wrong:
        return ""
    i = wrong[0]
    return (
        f"{len(wrong)} of {len(logps)} log-probabilities are not equal. In trajectory "
        f"{int(batch.trajectory[pack.rows[i]])}, token {int(pack.targets[i])} at position "
        f"{int(pack.columns[i]) + 1} has {engine_logps[i].item()!r} in the engine and "
        f"{logps[i].item()!r} in the trainer. Either they compute with different weights, or a "
        "kernel of this CPU depends on the shape of its call: see docs/proofs.md"
    )
