"""Run under torchrun by test_attention.py: the ring on random packs against full attention, on
every process."""

import random
import sys

import torch
import torch.distributed as dist
from test_attention import as_pack, layout, reference

from rl2.packing import zigzag
from rl2.parallel.mesh import init_distributed
from rl2.parallel.ring import PackedAttention, Ring

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}


def check(seed, heads, groups, size, longest, dtype):
    cu, prefixes, sees = layout(random.Random(seed), 3, longest)
    ring = Ring(dist.group.WORLD if dist.get_world_size() > 1 else None)
    part = zigzag(as_pack(cu, prefixes), ring.size, ring.rank)
    rows, real = part.tokens[0], len(part.hidden_index) > 0
    torch.manual_seed(seed)
    full = [torch.randn(1, n, cu[-1], size).to(dtype) for n in (heads, groups, groups)]
    grad = torch.randn(1, cu[-1], heads, size).to(dtype)
    doubles = [x.double().requires_grad_() for x in full]
    expected_out = reference(*doubles, sees, 0.3)
    expected = torch.autograd.grad(expected_out, doubles, grad.double())
    ours = [x[:, :, rows].clone().requires_grad_() for x in full]
    attend = PackedAttention(part.chunks, part.prefixes, torch.device("cpu"), ring)
    out = attend(None, *ours, 0.3)
    got = torch.autograd.grad(out, ours, grad[:, rows] * real)
    tolerance = TOLERANCE[dtype]
    if real:
        pairs = [("out", out, expected_out[:, rows])]
        pairs += [(name, a, b[:, :, rows]) for name, a, b in zip("qkv", got, expected, strict=True)]
        for name, a, b in pairs:
            bound = tolerance * max(1, expected_out.abs().max(), *(x.abs().max() for x in expected))
            assert (a.double() - b).abs().max() <= bound, (
                name,
                seed,
                heads,
                groups,
                size,
                longest,
                dtype,
            )
    # What another group holds, NaN included, changes no bit of ours.
    a, b = cu[prefixes[0][2]], cu[prefixes[0][1]]
    poisoned = [x[:, :, rows].clone() for x in full]
    mine = (rows >= a) & (rows < b)
    for x in poisoned:
        x[:, :, ~mine] = float("nan")
    assert torch.equal(attend(None, *poisoned, 0.3)[:, mine], out[:, mine]), (
        "another document leaked in"
    )
    return len(rows) if real else 0, cu[-1]


def main():
    init_distributed()
    for seed, (heads, groups, size) in enumerate(
        [(4, 4, 16), (6, 2, 24), (9, 3, 64), (2, 1, 80), (4, 2, 32)]
    ):
        for longest in (1, 3, 9, 70, 200):
            for dtype in TOLERANCE:
                held, total = check(seed + longest, heads, groups, size, longest, dtype)
                told = torch.tensor([held])
                dist.all_reduce(told)
                assert told.item() == total, "a token is held twice, or by nobody"
    dist.destroy_process_group()
    print("done", sys.argv)


if __name__ == "__main__":
    main()
