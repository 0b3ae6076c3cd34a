"""What engines are asked and answer, and one token of every row from its logits, by noise that is given.

Shapes: n rows, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64  # tokens of the vocabulary that are summed before the search


def sample(
    logits: Tensor, noise: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor
) -> tuple[Tensor, Tensor]:
    """logits [n, V], uniform noise [n] float64, settings [n] -> tokens [n], logps [n] float32.

    Inverse CDF: the token whose share of the cumulative weights holds the noise, searched first among sums of BLOCK
    tokens, then in its block. One pass of exp over the vocabulary serves the draw and the log-probability.
    RuntimeError if the logits are not finite.
    """
    rows = torch.arange(len(logits), device=logits.device)
    greedy = temperature == 0
    temperature = torch.where(greedy, 1.0, temperature)
    x = logits.to(torch.float32, copy=True).div_(temperature[:, None])
    top = x.amax(-1, keepdim=True)
    weights = F.pad(x.sub_(top).exp_(), (0, -x.shape[1] % BLOCK)).unflatten(
        1, (-1, BLOCK)
    )  # [n, V / BLOCK, BLOCK]
    sums = weights.sum(-1).double()
    total = sums.sum(-1)
    if not total.isfinite().all():
        raise RuntimeError("the model's logits are not finite: its weights have diverged")
    restricted = ((top_p < 1) | (top_k > 0)).nonzero()[:, 0]
    if len(restricted):
        settings = (top_p[restricted], top_k[restricted])
        weights[restricted] = _truncate(weights[restricted].flatten(1), *settings).view_as(
            weights[restricted]
        )
        sums = weights.sum(-1).double()
    cumulative = sums.cumsum(-1)
    target = noise * cumulative[:, -1]
    block = _search(cumulative, target)
    within = weights[rows, block].double().cumsum(-1)
    tokens = block * BLOCK + _search(within, target - (cumulative - sums)[rows, block])
    if greedy.any():
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
    logps = logits[rows, tokens].float() / temperature - top[:, 0] - total.log()
    return tokens, logps.float()


def _search(cumulative: Tensor, target: Tensor) -> Tensor:
    """Per row the first index whose cumulative weight exceeds the target, kept within [0, all): so its weight is not 0."""
    highest = torch.nextafter(cumulative[:, -1], torch.zeros_like(target))
    return torch.searchsorted(
        cumulative, target.clamp_min(0).minimum(highest)[:, None], right=True
    )[:, 0]


def _truncate(weights: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """weights [n, V] with 0 outside the `top_k` likeliest tokens and outside the fewest that hold `top_p` of all weight.
    Both look at the whole distribution, as in SGLang."""
    ordered, index = weights.sort(dim=-1, descending=True, stable=True)
    before = ordered.double().cumsum(-1) - ordered
    limit = torch.where(top_k > 0, top_k, weights.shape[1])[:, None]
    outside = before > top_p[:, None] * weights.double().sum(-1, keepdim=True)
    outside |= torch.arange(weights.shape[1], device=weights.device) >= limit
    return weights.masked_fill(outside.scatter(1, index, outside), 0)
