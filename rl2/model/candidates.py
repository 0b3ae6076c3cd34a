"""The softmax among candidates: the tokens that top_p and top_k left to draw from.

Shapes: P scored pairs, S candidates of all pairs.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# exp(EXCLUDED_LOGIT - top) is 0 in fp32. It is finite, so that 0 times it is 0.
EXCLUDED_LOGIT = -1e20


@dataclass(frozen=True)
class CandidateMask:
    """Which tokens the softmax of each of P pairs is among."""

    is_restricted: Tensor  # [P] bool; the others are among the whole vocabulary
    pairs: Tensor  # [S] int64, the pair of each candidate, ascending
    ids: Tensor  # [S] the column of each candidate; it may lie outside this process's part

    @classmethod
    def of(cls, counts: Tensor, ids: Tensor) -> "CandidateMask":
        """counts [P], the columns of all pairs one after the other [S]."""
        pairs = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        return cls(counts > 0, pairs, ids)

    def exclude_others_(self, logits: Tensor, columns: slice, first_pair: int = 0) -> None:
        """Gives the tokens that are no candidates EXCLUDED_LOGIT in logits [p, columns], in place.

        Row i is of the pair `first_pair` + i. Rows after the last pair stay as they are.
        """
        is_restricted = self.is_restricted[first_pair : first_pair + len(logits)]
        is_outside = torch.zeros_like(logits, dtype=torch.bool)
        is_outside[: len(is_restricted)] = is_restricted[:, None]
        rows = self.pairs - first_pair
        is_here = (rows >= 0) & (rows < len(logits))
        is_here &= (self.ids >= columns.start) & (self.ids < columns.stop)
        is_outside[rows[is_here], self.ids[is_here] - columns.start] = False
        logits.masked_fill_(is_outside, EXCLUDED_LOGIT)
