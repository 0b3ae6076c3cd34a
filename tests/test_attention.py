"""Long documents, sinks without bounds, windows that hide nothing, and the kernels of GPUs.

ring.py compares packed attention with plain attention, also in one process; tests/gpu/operators.py
runs the kernels of GPUs themselves.
"""

import pytest
import torch
from common import launch
from ring import Pack, as_pack, check

from rl2.attention import kernels as attention
from rl2.attention.kernels import Block, backward_block, forward_block
from rl2.attention.ring import PackedAttention, keep_attention
from rl2.packing import zigzag


def packed_attention(cu, prefixes):
    chunks = zigzag(as_pack(cu, prefixes), 1, 0).chunks
    return PackedAttention(chunks, prefixes, torch.device("cpu"))


@pytest.mark.parametrize("window", [None, 7])
def test_long_documents_and_sinks(window):
    """ring.py has no document with its own call."""
    pack = Pack(300, 6, 2, 24, 300, torch.float32, window, has_sinks=True)
    check(pack, pack.full_attention(), None)


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


@pytest.mark.parametrize("window", [None, 20])
def test_compiled_attention_is_one_operator(window):
    attend = packed_attention([0, 30, 50, 55], [(1, 2, 0)])
    compiled = torch.compile(attend.__call__, backend="aot_eager", fullgraph=True)
    torch.manual_seed(0)
    sizes = (4, 16), (2, 16), (2, 8)  # values are narrower
    q, k, v = (torch.randn(1, 55, *size).transpose(1, 2).requires_grad_() for size in sizes)
    sinks = torch.randn(4, requires_grad=True)
    inputs = q, k, v, sinks
    results = []
    for function in (attend, compiled):
        out = function(None, q, k, v, 0.2, window, sinks)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    torch.testing.assert_close(results[1], results[0])
    first, again = keep_attention()
    with torch.no_grad():
        with first:
            out = compiled(None, q, k, v, 0.2, window, sinks)
        out.zero_()  # compiled code may use its memory for something else
        with again:
            assert torch.equal(compiled(None, q, k, v, 0.2, window, sinks), results[0][0])


class FlashOperators:
    """Implements on the CPU the two flash operators of torch that rl2 calls.

    The names and the order of arguments are read from torch's own schemas.
    """

    FORWARD, BACKWARD = (
        getattr(torch.ops.aten, f"_flash_attention_{name}").default._schema
        for name in ("forward", "backward")
    )

    def __init__(self, monkeypatch):
        self.calls = []  # the arguments of each, by name
        monkeypatch.setattr(attention.aten, "_flash_attention_forward", self.forward)
        monkeypatch.setattr(attention.aten, "_flash_attention_backward", self.backward)

    def bind(self, schema, arguments, keywords):
        names = [argument.name for argument in schema.arguments]
        bound = dict(zip(names, arguments, strict=False)) | keywords
        self.calls.append(bound)
        block = Block(bound["cum_seq_q"].tolist(), bound["cum_seq_k"].tolist(), bound["is_causal"])
        return bound, block

    def forward(self, *arguments, **keywords):
        x, block = self.bind(self.FORWARD, arguments, keywords)
        out, lse = forward_block(x["query"], x["key"], x["value"], block, x["scale"])
        return out, lse.T.contiguous(), None, None, None

    def backward(self, *arguments, **keywords):
        x, block = self.bind(self.BACKWARD, arguments, keywords)
        q, lse = x["query"], x["logsumexp"]
        assert lse.is_contiguous() and lse.shape == (q.shape[1], len(q))
        return backward_block(
            x["grad_out"], q, x["key"], x["value"], x["out"], lse.T, block, x["scale"]
        )


@pytest.mark.parametrize("causal", [False, True])
def test_the_flash_operators_get_their_arguments_in_order(monkeypatch, causal):
    torch.manual_seed(0)
    block = Block([0, 5, 8], [0, 5, 8] if causal else [0, 4, 11], causal)
    q, k, v = (
        torch.randn(heads, n, 16).transpose(0, 1)
        for heads, n in ((4, 8), (2, block.cu_k[-1]), (2, block.cu_k[-1]))
    )
    out, lse = forward_block(q, k, v, block, 0.3)
    arguments = (torch.randn_like(out), q, k, v, out, lse, block, 0.3)
    gradients = backward_block(*arguments)
    operators = FlashOperators(monkeypatch)
    cuda_out, cuda_lse = attention._forward_cuda(q, k, v, block, 0.3)
    assert torch.equal(cuda_out, out) and torch.equal(cuda_lse, lse)
    cuda_gradients = attention._backward_cuda(*arguments)
    for cuda_gradient, gradient in zip(cuda_gradients, gradients, strict=True):
        assert torch.equal(cuda_gradient, gradient)
    for call in operators.calls:
        limits = (call["max_q"], call["max_k"], call["dropout_p"])
        assert limits == (5, 5 if causal else 7, 0.0)
    forward, backward = operators.calls
    assert forward["return_debug_mask"] is False and backward["rng_state"].dtype == torch.uint64


def test_rings_of_one_to_four_processes_equal_full_attention():
    launch(4, "tests/ring.py")
