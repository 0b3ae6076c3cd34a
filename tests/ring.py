"""Compares ring attention on random packs with full attention, on every process.

test_attention.py runs this file under torchrun.
"""

import random

import torch
import torch.distributed as dist
from test_attention import as_pack, layout, reference, restrict

from rl2.packing import zigzag
from rl2.parallel.mesh import init_distributed
from rl2.parallel.ring import PackedAttention, Ring

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}
SHAPES = [(4, 4, 16), (6, 2, 24), (9, 3, 64), (2, 1, 80), (4, 2, 32)]  # heads, key heads, head size
WINDOWS = [1, 3, 20, 64, 150]
SCALE = 0.3


def check(seed, heads, groups, size, longest, dtype, window):
    """Checks values, gradients and isolation of one random pack.

    Returns the number of this process's tokens and of all tokens.
    """
    case = (seed, heads, groups, size, longest, dtype, window)
    cu, prefixes, sees = layout(random.Random(seed), 3, longest)
    ring = Ring(dist.group.WORLD if dist.get_world_size() > 1 else None)
    part = zigzag(as_pack(cu, prefixes), ring.size, ring.rank)
    rows = part.tokens[0]
    has_tokens = len(part.hidden_index) > 0
    torch.manual_seed(seed)
    full = [torch.randn(1, n, cu[-1], size).to(dtype) for n in (heads, groups, groups)]
    d_out = torch.randn(1, cu[-1], heads, size).to(dtype)
    doubles = [x.double().requires_grad_() for x in full]
    expected_out = reference(*doubles, restrict(sees, cu, prefixes, window), SCALE)
    expected = torch.autograd.grad(expected_out, doubles, d_out.double())
    ours = [x[:, :, rows].clone().requires_grad_() for x in full]
    attend = PackedAttention(part.chunks, part.prefixes, torch.device("cpu"), ring)
    out = attend(None, *ours, SCALE, window)
    gradients = torch.autograd.grad(out, ours, d_out[:, rows] * has_tokens)
    if has_tokens:
        bound = TOLERANCE[dtype]
        bound *= max(1, expected_out.abs().max(), *(gradient.abs().max() for gradient in expected))
        assert (out.double() - expected_out[:, rows]).abs().max() <= bound, ("out", case)
        for name, gradient, full_gradient in zip("qkv", gradients, expected, strict=True):
            error = (gradient.double() - full_gradient[:, :, rows]).abs().max()
            assert error <= bound, (name, case)
    check_isolation(cu, prefixes, rows, full, attend, out, window)
    return len(rows) if has_tokens else 0, cu[-1]


def check_isolation(cu, prefixes, rows, full, attend, out, window):
    """Checks that NaN in all other groups changes no bit of the first group."""
    start = cu[prefixes[0][2]]
    end = cu[prefixes[0][1]]
    is_first_group = (rows >= start) & (rows < end)
    poisoned = [x[:, :, rows].clone() for x in full]
    for x in poisoned:
        x[:, :, ~is_first_group] = float("nan")
    poisoned_out = attend(None, *poisoned, SCALE, window)
    assert torch.equal(poisoned_out[:, is_first_group], out[:, is_first_group]), (
        "another document leaked in"
    )


def main():
    init_distributed()
    for seed, (heads, groups, size) in enumerate(SHAPES):
        for i, longest in enumerate((1, 3, 9, 70, 200)):
            window = WINDOWS[(seed + i) % len(WINDOWS)]
            for dtype, case_window in (
                (torch.float32, None),
                (torch.float32, window),
                (torch.bfloat16, window if seed % 2 else None),
            ):
                num_ours, num_all = check(
                    seed + longest, heads, groups, size, longest, dtype, case_window
                )
                num_held = torch.tensor([num_ours])
                dist.all_reduce(num_held)
                assert num_held.item() == num_all, "a token is held twice, or by nobody"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
