"""Long documents, sinks without bounds, and windows that hide nothing.

ring.py compares packed attention with plain attention, also in one process; tests/gpu/operators.py
has the kernels of GPUs.
"""

import random

import pytest
import torch
from common import launch
from plain_attention import as_pack, layout, reference, restrict

from rl2.attention.ring import PackedAttention
from rl2.packing import zigzag


def packed_attention(cu, prefixes):
    return PackedAttention(
        zigzag(as_pack(cu, prefixes), 1, 0).chunks, prefixes, torch.device("cpu")
    )


@pytest.mark.parametrize("window", [None, 7])
def test_long_documents_and_sinks(window):
    """In fp32, compared with `reference` in fp64. ring.py has no document with its own call."""
    cu, prefixes, sees = layout(random.Random(300), 3, 300)
    torch.manual_seed(0)
    shapes = [(1, n, cu[-1], 24) for n in (6, 2, 2)] + [(6,)]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    out = packed_attention(cu, prefixes)(None, *inputs[:3], 0.3, window, inputs[3])
    d_out = torch.randn_like(out)
    gradients = torch.autograd.grad(out, inputs, d_out)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    mask = restrict(sees, cu, prefixes, window)
    expected_out = reference(*doubles[:3], mask, 0.3, doubles[3])
    expected = torch.autograd.grad(expected_out, doubles, d_out.double())
    torch.testing.assert_close(out.double(), expected_out, rtol=0, atol=1e-5)
    for name, gradient, exact in zip("qkvs", gradients, expected, strict=True):
        assert (gradient.double() - exact).abs().max() <= 1e-5 * max(1, exact.abs().max()), name


def test_a_sink_without_bounds_takes_all_or_nothing():
    attend = packed_attention([0, 30, 50], [])
    q, k, v = (torch.randn(1, 2, 50, 16) for _ in range(3))
    sinks = torch.tensor([1e30, -1e30])
    out = attend(None, q, k, v, 0.2, sinks=sinks)
    assert out.isfinite().all() and not out[:, :, 0].any()
    torch.testing.assert_close(out[:, :, 1], attend(None, q, k, v, 0.2)[:, :, 1], rtol=0, atol=0)


def test_documents_within_the_window_are_computed_as_without_it():
    attend = packed_attention([0, 30, 50, 55], [(1, 2, 0)])
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, 55, 16).bfloat16() for n in (4, 2, 2))
    assert torch.equal(attend(None, q, k, v, 0.2, 50), attend(None, q, k, v, 0.2))
    assert not torch.equal(attend(None, q, k, v, 0.2, 49), attend(None, q, k, v, 0.2))


def test_rings_of_one_to_four_processes_equal_full_attention():
    launch(4, "tests/ring.py")
