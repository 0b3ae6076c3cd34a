"""The head of an exact run: a row has the same bits in the engine and in the trainer.

Shapes: P scored pairs, n rows, E hidden size, V vocabulary.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from rl2.attention.pages import MIN_ROWS, exact_factors
from rl2.error_report import Diverged
from rl2.model.logits import LogitSettings, capped
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
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    settings: LogitSettings,
    *,
    with_entropy: bool,
    keeps_logits: bool,
    logits_per_slice: int,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """hidden [P, E], weight [V, E], targets [P] -> log-probabilities, log-sum-exps, entropies [P]
    and the logits [P, V] before the cap. The last two are None unless they are asked for.

    Rows are computed a slice at a time, of about `logits_per_slice` logits. The head is converted
    to the dtype of the products as a whole, as in the engine.
    """
    missing = max(0, MIN_ROWS - len(hidden))
    factors = hidden.dtype
    hidden = F.pad(hidden.to(settings.dtype), (0, 0, 0, missing))
    weight = weight.to(settings.dtype)
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
        if bias is not None:
            logits.add_(bias)
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
