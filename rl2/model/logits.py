"""How a head computes its logits from hidden states.

Shapes: P scored pairs, E hidden size, V vocabulary (or this process's part of it).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rl2.attention.pages import exact_factors
from rl2.model.candidates import CandidateMask
from rl2.parallel.device import device_kind


@dataclass(frozen=True)
class LogitSettings:
    """How a head computes its logits: products, plus bias, capped, divided."""

    divisor: float
    dtype: torch.dtype
    """the products are rounded to it; not coarser than the hidden states"""
    cap: float | None
    """logits x count as cap * tanh(x / cap)"""
    candidates: CandidateMask | None
    """the tokens of each softmax; None: all of them"""

    def products(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, columns: slice
    ) -> Tensor:
        """hidden [P, E], weight [V, E], bias [V] -> their products [P, columns] in fp32."""
        weight = weight[columns]
        if hidden.dtype != self.dtype and device_kind(hidden.device) == "cuda":
            products = torch.mm(hidden, weight.T, out_dtype=self.dtype)
        else:
            with exact_factors(hidden.dtype):  # on a CPU the product has the type of its factors
                products = (hidden.to(self.dtype) @ weight.to(self.dtype).T).float()
        return products if bias is None else products.add_(bias[columns])

    def finish(self, products: Tensor, columns: slice) -> Tensor:
        """products [P, columns] -> logits of the softmax. The products may be overwritten."""
        logits = products if self.cap is None else capped(products, self.cap)
        if self.divisor != 1.0:
            logits.div_(self.divisor)
        if self.candidates is not None:
            self.candidates.exclude_others_(logits, columns)
        return logits

    def compute(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, columns: slice
    ) -> Tensor:
        """hidden [P, E], weight [V, E], bias [V] -> logits of the softmax [P, columns] in fp32."""
        return self.finish(self.products(hidden, weight, bias, columns), columns)


def capped(logits: Tensor, cap: float) -> Tensor:
    """cap * tanh(logits / cap), in fp32."""
    return logits.float().div(cap).tanh_().mul_(cap)


def cap_slope(logits: Tensor, temperature: float, cap: float) -> Tensor:
    """The derivative of `capped` by its input, 1 - tanh^2, from capped and divided logits.

    Excluded candidates have the slope 0.
    """
    return 1 - (logits * (temperature / cap)).clamp(-1, 1).square()
