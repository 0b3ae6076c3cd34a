"""How a head computes its logits from hidden states, perhaps among candidates alone: the tokens
that top_p, top_k and min_p left to draw from.

Shapes: P scored pairs, E hidden size, V vocabulary (or this process's part of it), S candidates of
all pairs.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from rl2.attention.pages import exact_factors
from rl2.parallel.device import device_kind

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
        pairs = torch.arange(len(counts), device=counts.device)
        # With the size known, the host does not wait for a GPU.
        pairs = pairs.repeat_interleave(counts, output_size=len(ids))
        return cls(counts > 0, pairs, ids)

    def exclude_others_(self, logits: Tensor, columns: slice, first_pair: int = 0) -> None:
        """Gives the tokens that are no candidates EXCLUDED_LOGIT in logits [p, columns], in place.

        Row i is of the pair `first_pair` + i. Rows after the last pair stay as they are.
        """
        is_restricted = self.is_restricted[first_pair : first_pair + len(logits)]
        num_columns = logits.shape[1]
        # The last column is for candidates elsewhere: to leave them out, the host would have to
        # wait for a GPU that counts them.
        is_outside = logits.new_zeros((len(logits), num_columns + 1), dtype=torch.bool)
        is_outside[: len(is_restricted)] = is_restricted[:, None]
        rows, ids = self.pairs - first_pair, self.ids - columns.start
        is_here = (rows >= 0) & (rows < len(logits)) & (ids >= 0) & (ids < num_columns)
        rows = rows.clamp(0, len(logits) - 1)
        is_outside[rows, torch.where(is_here, ids, num_columns)] = False
        logits.masked_fill_(is_outside[:, :-1], EXCLUDED_LOGIT)


@dataclass(frozen=True)
class LogitSettings:
    """What becomes of the products of a head: they are capped, divided and masked."""

    divisor: float = 1.0
    """the temperature, times the model's own divisor"""
    cap: float | None = None
    """a product x counts as cap * tanh(x / cap)"""
    candidates: CandidateMask | None = None
    """the tokens of each softmax; None: all of them"""

    @classmethod
    def of(
        cls,
        config: PreTrainedConfig,
        temperature: float = 1.0,
        candidates: CandidateMask | None = None,
    ) -> "LogitSettings":
        """Those of a model: Granite divides by a number, Cohere multiplies, and Gemma 2 has a cap
        of its divided logits.
        """
        text = config.get_text_config()
        divisor = getattr(text, "logits_scaling", None) or 1.0
        divisor /= getattr(text, "logit_scale", None) or 1.0
        cap = getattr(text, "final_logit_softcapping", None)
        return cls(temperature * divisor, cap * divisor if cap else None, candidates)

    def finish(self, products: Tensor, columns: slice) -> Tensor:
        """products [P, columns] -> logits of the softmax. The products may be overwritten."""
        logits = products if self.cap is None else capped(products, self.cap)
        if self.divisor != 1.0:
            logits.div_(self.divisor)
        if self.candidates is not None:
            self.candidates.exclude_others_(logits, columns)
        return logits


@dataclass(frozen=True)
class HeadInputs:
    """What the head of a model multiplies, and what becomes of the products."""

    hidden: Tensor  # [P, E]
    weight: Tensor  # [V, E], or this process's part of V
    settings: LogitSettings = LogitSettings()
    bias: Tensor | None = None  # [V], or this process's part

    def first_tokens(self, count: int) -> "HeadInputs":
        """Of a head that has the first `count` tokens only."""
        if count == len(self.weight):
            return self
        bias = None if self.bias is None else self.bias[:count]
        return replace(self, weight=self.weight[:count], bias=bias)

    def products(self, columns: slice) -> Tensor:
        """[P, columns] in fp32."""
        return head_products(self.hidden, self.weight, self.bias, columns)

    def logits(self, columns: slice) -> Tensor:
        """The logits of the softmax [P, columns] in fp32."""
        return self.settings.finish(self.products(columns), columns)


def head_products(hidden: Tensor, weight: Tensor, bias: Tensor | None, columns: slice) -> Tensor:
    """hidden [P, E], weight [V, E], bias [V] -> their products [P, columns] in fp32."""
    weight = weight[columns]
    if hidden.dtype != torch.float32 and device_kind(hidden.device) == "cuda":
        products = torch.mm(hidden, weight.T, out_dtype=torch.float32)
    else:
        with exact_factors(hidden.dtype):  # on a CPU the product has the type of its factors
            products = hidden.float() @ weight.float().T
    return products if bias is None else products.add_(bias[columns])


def capped(logits: Tensor, cap: float) -> Tensor:
    """cap * tanh(logits / cap), in fp32."""
    return logits.float().div(cap).tanh_().mul_(cap)


def cap_slope(logits: Tensor, temperature: float, cap: float) -> Tensor:
    """The derivative of `capped` by its input, 1 - tanh^2, from capped and divided logits.

    Excluded candidates have the slope 0.
    """
    return 1 - (logits * (temperature / cap)).clamp(-1, 1).square()
