"""Compares ring attention on random packs with full attention: rings of one to four processes.

test_attention.py runs this file in four ranks. Each computes the full attention of a quarter of the
packs, and sends it to the others.
"""

import random
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from rl2 import batch
from rl2.attention.ring import PackedAttention, Ring
from rl2.packing import zigzag
from rl2.parallel.mesh import init_distributed

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}
SHAPES = [(4, 4, 16), (6, 2, 24), (9, 3, 64), (2, 1, 80), (4, 2, 32)]  # heads, key heads, head size
WINDOWS = [1, 3, 20, 64, 100]
SCALE = 0.3


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
    return batch.Pack(each[None], each[None], cu, prefixes, each, each, each, each)


@dataclass
class Pack:
    """A random pack: queries, keys and values [1, heads, L, size], and the gradient of the output.

    `sees` [L, L] is the boolean attention mask, see `layout`.
    """

    seed: int
    heads: int
    groups: int
    size: int
    longest: int
    dtype: torch.dtype
    window: int | None
    has_sinks: bool

    def __post_init__(self):
        self.cu, self.prefixes, self.sees = layout(random.Random(self.seed), 3, self.longest)
        length = self.cu[-1]
        torch.manual_seed(self.seed)
        heads = (self.heads, self.groups, self.groups)
        self.inputs = [torch.randn(1, n, length, self.size).to(self.dtype) for n in heads]
        self.sinks = [torch.randn(self.heads)] if self.has_sinks else []
        self.d_out = torch.randn(1, length, self.heads, self.size).to(self.dtype)

    def full_attention(self) -> list[Tensor]:
        """The output, and the gradients of queries, keys, values and sinks, in doubles."""
        doubles = [x.double().requires_grad_() for x in (*self.inputs, *self.sinks)]
        sees = restrict(self.sees, self.cu, self.prefixes, self.window)
        q, k, v, *sinks = doubles
        out = reference(q, k, v, sees, SCALE, *sinks)
        gradients = torch.autograd.grad(out, doubles, self.d_out.double())
        return [x.detach().contiguous() for x in (out, *gradients)]

    def empty_results(self) -> list[Tensor]:
        tensors = (self.d_out, *self.inputs, *self.sinks)
        return [torch.empty(x.shape, dtype=torch.double) for x in tensors]


def check(pack: Pack, expected: list[Tensor], group: dist.ProcessGroup | None) -> None:
    """Checks values, gradients and isolation of a pack."""
    ring = Ring(group)
    part = zigzag(as_pack(pack.cu, pack.prefixes), ring.size, ring.rank)
    rows = part.tokens[0]
    has_tokens = len(part.hidden_index) > 0
    ours = [x[:, :, rows].clone().requires_grad_() for x in pack.inputs]
    attend = PackedAttention(part.chunks, part.prefixes, torch.device("cpu"), ring)
    sinks = [x.clone().requires_grad_() for x in pack.sinks]
    options = SCALE, pack.window, *sinks
    out = attend(None, *ours, *options)
    gradients = torch.autograd.grad(out, ours + sinks, pack.d_out[:, rows] * has_tokens)
    expected_out, *expected_gradients = expected
    bound = TOLERANCE[pack.dtype] * max(1, *(x.abs().max() for x in expected))
    if sinks:  # the gradients of all processes add up to the whole: the sink enters once
        total = gradients[3].double()
        if group:
            dist.all_reduce(total, group=group)
        whole = expected_gradients[3]
        sum_bound = 3 * TOLERANCE[pack.dtype] * max(1, whole.abs().max())  # over all tokens
        assert (total - whole).abs().max() <= sum_bound, ("sinks", pack)
    if has_tokens:
        assert (out.double() - expected_out[:, rows]).abs().max() <= bound, ("out", pack)
        for i, name in enumerate("qkv"):
            error = (gradients[i].double() - expected_gradients[i][:, :, rows]).abs().max()
            assert error <= bound, (name, pack)
    check_isolation(pack.cu, pack.prefixes, rows, pack.inputs, attend, out, options)


def check_isolation(cu, prefixes, rows, full, attend, out, options):
    """Checks that NaN in all other groups changes no bit of the first group."""
    start = cu[prefixes[0][2]]
    end = cu[prefixes[0][1]]
    is_first_group = (rows >= start) & (rows < end)
    poisoned = [x[:, :, rows].clone() for x in full]
    for x in poisoned:
        x[:, :, ~is_first_group] = float("nan")
    poisoned_out = attend(None, *poisoned, *options)
    assert torch.equal(poisoned_out[:, is_first_group], out[:, is_first_group]), (
        "another document leaked in"
    )


def make_packs() -> list[Pack]:
    packs = []
    for seed, (heads, groups, size) in enumerate(SHAPES):
        for i, longest in enumerate((1, 3, 9, 70, 120)):
            if (seed + i) % 5 > 1:  # two lengths a shape, and each length has two shapes
                continue
            window = WINDOWS[(2 * seed + i) % len(WINDOWS)]
            for dtype, pack_window, has_sinks in (
                (torch.float32, None, False),
                (torch.float32, window, False),
                (torch.bfloat16, window if seed % 2 else None, False),
                (torch.float32, window if i % 2 else None, True),
            ):
                shape = (heads, groups, size, longest)
                packs.append(Pack(seed + longest, *shape, dtype, pack_window, has_sinks))
    return packs


def main():
    init_distributed()
    rank, world = dist.get_rank(), dist.get_world_size()
    rings = {size: dist.new_group(range(size)) for size in range(2, world + 1)}
    packs = make_packs()
    results = {i: packs[i].full_attention() for i in range(rank, len(packs), world)}
    for i, pack in enumerate(packs):
        expected = results.get(i) or pack.empty_results()
        for tensor in expected:
            dist.broadcast(tensor, i % world)
        if i in results:
            check(pack, expected, None)
        # Of four variants of a shape, two meet a ring of two, and the others one of three.
        for size in (2 + (i + i // 4) % 2, world):
            if rank < size:
                check(pack, expected, rings[size])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
