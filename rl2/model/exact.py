"""rollout.exact: the trainer's log-probabilities have the bits of the embedded engine's on a CPU.

The engine decodes a token at a time and the trainer runs packed sequences. Both compute every row
in the same order of additions: attention by pages (attention/pages.py), and the head here.

Shapes: P scored pairs, n rows, E hidden size, V vocabulary.
"""

import sys
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from rl2.attention.pages import MIN_ROWS, exact_factors
from rl2.batch import Batch, Pack
from rl2.config.conditions import Exactness
from rl2.error_report import Diverged
from rl2.model.logits import HeadInputs, capped
from rl2.rounding import ceil_div

BLOCK_SIZE_TOKENS = 64  # tokens of the vocabulary whose weights are summed first, in the engine


@dataclass
class BlockSoftmax:
    """The softmax of logits / temperature, by blocks of the vocabulary.

    Every row has the same bits in any number of rows.
    """

    weights: Tensor  # [n, blocks, BLOCK_SIZE_TOKENS] exp(z - top), 0 after the vocabulary
    top: Tensor  # [n] the largest z
    block_sums: Tensor  # [n, blocks] float64, of the weights

    @classmethod
    def of(cls, logits: Tensor, temperature: Tensor) -> "BlockSoftmax":
        """logits [n, V], temperature [n]. Diverged if the logits are not finite."""
        z = F.pad(logits.float(), (0, -logits.shape[1] % BLOCK_SIZE_TOKENS), value=-torch.inf)
        top = z.div_(temperature[:, None]).amax(-1)
        weights = z.sub_(top[:, None]).exp_().unflatten(1, (-1, BLOCK_SIZE_TOKENS))
        softmax = cls(weights, top, weights.sum(-1).double())
        if not softmax.total.isfinite().all():
            raise Diverged("the model's logits are not finite: its weights have diverged")
        return softmax

    @cached_property
    def total(self) -> Tensor:
        """[n] float64, the sum of all weights."""
        return self.block_sums.sum(-1)

    def logps(self, logits: Tensor, tokens: Tensor, temperature: Tensor) -> Tensor:
        """The log-probability [n] float32 of one token of each row."""
        token_logits = logits.gather(1, tokens[:, None])[:, 0].float()
        return (token_logits / temperature - self.top - self.total.log()).float()

    def entropy(self) -> Tensor:
        """The entropy [n] float32: log total - E[z - top]. A weight is exp(z - top)."""
        mean = torch.xlogy(self.weights, self.weights).sum((1, 2)) / self.total
        return (self.total.log() - mean).float()


def exact_scores(
    head: HeadInputs,
    targets: Tensor,
    *,
    with_entropy: bool,
    keeps_logits: bool,
    logits_per_slice: int,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """targets [P] -> log-probabilities, log-sum-exps, entropies [P] and the products [P, V] of the
    head. The last two are None unless they are asked for.

    Rows are computed a slice at a time, of about `logits_per_slice` logits. The head is converted
    to float32 as a whole, as in the engine.
    """
    missing = max(0, MIN_ROWS - len(head.hidden))
    factors = head.hidden.dtype
    hidden = F.pad(head.hidden.float(), (0, 0, 0, missing))
    weight = head.weight.float()
    settings = head.settings
    # Slices are of nearly the same size, so none has fewer than MIN_ROWS.
    most_rows = max(2 * MIN_ROWS, logits_per_slice // len(weight))
    num_slices = ceil_div(len(hidden), most_rows)
    kept = hidden.new_empty(len(hidden), len(weight)) if keeps_logits else None
    rows = zip(
        hidden.tensor_split(num_slices),
        F.pad(targets, (0, missing)).tensor_split(num_slices),
        [None] * num_slices if kept is None else kept.tensor_split(num_slices),
        strict=True,
    )
    logps, lses, entropies = [], [], []
    first_row = 0
    for some_hidden, some_targets, some_kept in rows:
        with exact_factors(factors):
            logits = torch.mm(some_hidden, weight.T, out=some_kept)
        if head.bias is not None:
            logits.add_(head.bias)
        if settings.cap is not None:
            logits = capped(logits, settings.cap)
        if settings.candidates is not None:
            settings.candidates.exclude_others_(logits, slice(0, len(weight)), first_row)
        first_row += len(logits)
        divisor = torch.full((len(logits),), settings.divisor)
        softmax = BlockSoftmax.of(logits, divisor)
        logps.append(softmax.logps(logits, some_targets, divisor))
        lses.append((softmax.top + softmax.total.log()).float())
        if with_entropy:
            entropies.append(softmax.entropy())

    def join(slices: list[Tensor]) -> Tensor:
        return torch.cat(slices)[: len(targets)].clone()  # FSDP wants no views

    return join(logps), join(lses), join(entropies) if with_entropy else None, kept


class EngineCheck:
    """Compares log-probabilities of the trainer with those that the engine sampled with."""

    def __init__(self, exactness: Exactness):
        self.exactness = exactness
        self.has_warned = False

    def compare(self, batch: Batch, pack: Pack, logps: Tensor) -> None:
        """Compares the pairs [P] of `pack`, which has packed the rows of `batch`.

        Nothing is compared once the batch has old log-probabilities: then other weights than those
        that sampled may score it.
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
