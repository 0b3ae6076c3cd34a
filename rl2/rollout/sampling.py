"""What engines are asked and answer, and one token of every row from its logits, by noise that is given.

Shapes: n rows, V vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64  # tokens of the vocabulary that are summed before the search
DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": None, "stop_token_ids": ()}


@dataclass
class Generation:
    """What was sampled, the stop token included. logps are of softmax(logits / temperature), before top_p and top_k."""

    tokens: list[int]
    logps: list[float]
    finish_reason: str  # stop | length | abort
    version: int


def check_request(prompt: list[int], params: dict, vocabulary: int, max_length: float) -> dict:
    """`params` with the DEFAULTS (temperature 0 is greedy, top_k -1 off). ValueError for what can never be answered."""
    unknown = set(params) - set(DEFAULTS)
    params = {**DEFAULTS, **params}
    new = params["max_new_tokens"]
    if unknown:
        raise ValueError(f"sampling parameters {sorted(unknown)} are unknown; there are {sorted(DEFAULTS)}")
    if not isinstance(new, int) or new < 1:
        raise ValueError(f"max_new_tokens={new}: expected at least 1")
    if not params["temperature"] >= 0 or not 0 < params["top_p"] <= 1:
        raise ValueError(f"temperature={params['temperature']}, top_p={params['top_p']}: expected >= 0 and (0, 1]")
    if params["top_k"] != -1 and params["top_k"] < 1:
        raise ValueError(f"top_k={params['top_k']}: expected at least 1, or -1 for off")
    if not prompt:
        raise ValueError("the prompt has no tokens")
    if not 0 <= min(prompt) <= max(prompt) < vocabulary:
        raise ValueError(f"prompt token ids {min(prompt)} to {max(prompt)}: the vocabulary is 0 to {vocabulary - 1}")
    if len(prompt) + new > max_length:
        raise ValueError(f"prompt of {len(prompt)} + max_new_tokens={new} exceeds {max_length} tokens")
    return params


def sample(logits: Tensor, noise: Tensor, temperature: Tensor, top_p: Tensor, top_k: Tensor) -> tuple[Tensor, Tensor]:
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
    weights = F.pad(x.sub_(top).exp_(), (0, -x.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))  # [n, V / BLOCK, BLOCK]
    sums = weights.sum(-1).double()
    total = sums.sum(-1)
    if not total.isfinite().all():
        raise RuntimeError("the model's logits are not finite: its weights have diverged")
    restricted = ((top_p < 1) | (top_k > 0)).nonzero()[:, 0]
    if len(restricted):
        settings = (top_p[restricted], top_k[restricted])
        weights[restricted] = _truncate(weights[restricted].flatten(1), *settings).view_as(weights[restricted])
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
    return torch.searchsorted(cumulative, target.clamp_min(0).minimum(highest)[:, None], right=True)[:, 0]


def _truncate(weights: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """weights [n, V] with 0 outside the `top_k` likeliest tokens and outside the fewest that hold `top_p` of all weight.
    Both look at the whole distribution, as in SGLang."""
    ordered, index = weights.sort(dim=-1, descending=True, stable=True)
    before = ordered.double().cumsum(-1) - ordered
    limit = torch.where(top_k > 0, top_k, weights.shape[1])[:, None]
    outside = before > top_p[:, None] * weights.double().sum(-1, keepdim=True)
    outside |= torch.arange(weights.shape[1], device=weights.device) >= limit
    return weights.masked_fill(outside.scatter(1, index, outside), 0)
