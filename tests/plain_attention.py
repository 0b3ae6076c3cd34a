"""Plain attention under a boolean mask, and random layouts to compare packed attention on."""

from itertools import pairwise

import torch

from rl2.batch import Pack


def reference(q, k, v, sees, scale, sinks=None):
    """Returns plain attention [1, L, H, D] under the boolean mask `sees` [L, L].

    q is [1, H, L, D], k and v are [1, G, L, D]. `sinks` [H] are one more score of each softmax.
    """
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = q @ k.transpose(-1, -2) * scale
    scores = scores.masked_fill(~sees, float("-inf"))
    if sinks is not None:
        column = sinks[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    return (scores.softmax(-1)[..., : sees.shape[1]] @ v).transpose(1, 2)


def layout(rng, num_groups, longest):
    """Returns a random layout of prompts and answers: (cu_seqlens, prefixes, sees).

    Each prompt is followed by 0 to 4 answers that see it. The first prompt has at least one
    answer. `sees` [L, L] is the boolean attention mask.
    """
    cu, prefixes = [0], []
    for group in range(num_groups):
        prompt = len(cu) - 1
        cu.append(cu[-1] + rng.randint(1, longest))
        for _ in range(rng.randint(0 if group else 1, 4)):
            cu.append(cu[-1] + rng.randint(1, longest))
        if len(cu) - 1 > prompt + 1:
            prefixes.append((prompt + 1, len(cu) - 1, prompt))
    sees = torch.zeros(cu[-1], cu[-1], dtype=torch.bool)
    for a, b in pairwise(cu):
        sees[a:b, a:b] = torch.ones(b - a, b - a).tril().bool()
    for a, b, c in prefixes:
        sees[cu[a] : cu[b], cu[c] : cu[c + 1]] = True
    return cu, prefixes, sees


def restrict(sees, cu, prefixes, window):
    """Returns the mask `sees` with keys hidden that are `window` or more tokens before the query.

    Distances are in the document: an answer follows its prompt.
    """
    if window is None:
        return sees
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(cu)])
    for a, b, c in prefixes:
        positions[cu[a] : cu[b]] += cu[c + 1] - cu[c]
    return sees & (positions[:, None] - positions < window)


def as_pack(cu, prefixes):
    """Returns a pack in which each token id is the position of the token."""
    each = torch.arange(cu[-1])
    return Pack(each[None], each[None], cu, prefixes, each, each, each, each)
