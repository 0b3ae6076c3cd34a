"""One token of every row, drawn from its logits by noise that the caller gives.

Shapes: n rows, V vocabulary, B = BLOCK_SIZE_TOKENS.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl2.engine.sampling_params import SamplingParams
from rl2.model.exact import BLOCK_SIZE_TOKENS, BlockSoftmax


def uniform_noise(seed: tuple[int, ...], count: int) -> np.ndarray:
    """`count` float64 numbers in [0, 1). Number i is a function of `seed` and i alone."""
    bits = np.random.Philox(np.random.SeedSequence(seed))
    return np.random.Generator(bits).random(count)


class Draws(NamedTuple):
    """A token of each of n rows."""

    tokens: Tensor  # [n]
    logps: Tensor  # [n] float32
    candidates: dict[int, Tensor]  # by row: the ids int32 that were left to draw from, ascending


def sample_rows(logits: Tensor, noise: Sequence[float], params: Sequence[SamplingParams]) -> Draws:
    """logits [n, V], uniform noise and parameters of each row -> a token of each row.

    One pass of exp over the vocabulary serves both the draw and the log-probability. That is of the
    whole softmax, before top_p, top_k and min_p; in the rows of `with_candidates` it is among what
    these leave. Temperature 0 takes the most likely token. Diverged if the logits are not finite.
    """
    device = logits.device
    uniform = torch.tensor(noise, dtype=torch.float64, device=device)
    temperature = torch.tensor([float(p.temperature) for p in params], device=device)
    top_p = torch.tensor([float(p.top_p) for p in params], device=device)
    top_k = torch.tensor([p.top_k for p in params], device=device)
    min_p = torch.tensor([float(p.min_p) for p in params], device=device)
    with_candidates = torch.tensor([p.with_candidates for p in params], device=device)
    greedy = temperature == 0
    temperature = torch.where(greedy, 1.0, temperature)
    softmax = BlockSoftmax.of(logits, temperature)
    weights, block_sums = softmax.weights, softmax.block_sums
    candidates: dict[int, Tensor] = {}
    restricted = ((top_p < 1) | (top_k > 0) | (min_p > 0)).nonzero()[:, 0]
    if len(restricted):
        whole = weights[restricted].flatten(1)
        truncated = _truncate(whole, top_p[restricted], top_k[restricted], min_p[restricted])
        weights[restricted] = truncated.unflatten(1, (-1, BLOCK_SIZE_TOKENS))
        block_sums = weights.sum(-1).double()
        told = restricted[with_candidates[restricted]]
        if len(told):
            candidates = _nonzero_ids(weights[told].flatten(1), told)
            softmax = replace(
                softmax, block_sums=softmax.block_sums.index_copy(0, told, block_sums[told])
            )
    tokens = _draw(weights, block_sums, uniform)
    if greedy.any():
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
    return Draws(tokens, softmax.logps(logits, tokens, temperature), candidates)


def penalize_(
    logits: Tensor, prompt: Sequence[int], answer: Sequence[int], params: SamplingParams
) -> None:
    """Applies penalties to the logits [V] of the next token; that for repetition first, as vLLM."""
    seen = logits.new_tensor([*prompt, *answer], dtype=torch.long).unique()
    old, factor = logits[seen], params.repetition_penalty
    logits[seen] = torch.where(old > 0, old / factor, old * factor)
    ids, counts = logits.new_tensor(answer, dtype=torch.long).unique(return_counts=True)
    logits[ids] -= params.frequency_penalty * counts + params.presence_penalty


def _nonzero_ids(weights: Tensor, rows: Tensor) -> dict[int, Tensor]:
    """weights [k, V] of the rows with the numbers [k] -> by number, the ids of nonzero weight."""
    places, ids = weights.nonzero(as_tuple=True)
    counts = places.bincount(minlength=len(rows)).tolist()
    return dict(zip(rows.tolist(), ids.int().split(counts), strict=True))


def _draw(weights: Tensor, block_sums: Tensor, noise: Tensor) -> Tensor:
    """weights [n, V / B, B], their sums [n, V / B], noise [n] -> tokens [n].

    This inverts the cumulative weights at the noise: the search goes first among the sums of
    blocks, then inside one block.
    """
    rows = torch.arange(len(weights), device=weights.device)
    cumulative = block_sums.cumsum(-1)
    target = noise * cumulative[:, -1]
    block = _search(cumulative, target)
    before = (cumulative - block_sums)[rows, block]
    within = weights[rows, block].double().cumsum(-1)
    return block * BLOCK_SIZE_TOKENS + _search(within, target - before)


def _search(cumulative: Tensor, target: Tensor) -> Tensor:
    """Per row the first index whose cumulative weight exceeds the target.

    The target is kept between 0 and just below the whole, so the weight at the index is never 0.
    """
    highest = torch.nextafter(cumulative[:, -1], torch.zeros_like(target))
    target = target.clamp_min(0).minimum(highest)
    return torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]


def _truncate(weights: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor) -> Tensor:
    """weights [n, V] -> the same with 0 for every token that top_p, top_k or min_p leaves out.

    top_k keeps that many most likely tokens, top_p the fewest most likely ones that hold this share
    of all weight, min_p those with this share of the largest. Each looks at the whole distribution.
    """
    outside = weights < min_p[:, None] * weights.amax(-1, keepdim=True)
    if ((top_p < 1) | (top_k > 0)).any():  # min_p needs no order, which takes most of the time
        ordered, index = weights.sort(dim=-1, descending=True, stable=True)
        before = ordered.double().cumsum(-1) - ordered
        limit = torch.where(top_k > 0, top_k, weights.shape[1])[:, None]
        late = before > top_p[:, None] * weights.double().sum(-1, keepdim=True)
        late |= torch.arange(weights.shape[1], device=weights.device) >= limit
        outside |= late.scatter(1, index, late)
    return weights.masked_fill(outside, 0)
