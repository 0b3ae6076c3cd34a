"""Measures the device. Compares attention and the head with fp32 references."""

import random

import torch
import torch.nn.functional as F
from figures import record
from tools import DEVICE, DRY, copy_bandwidth, error, matrix_peak, seconds


def device():
    from rl2.parallel.attention import Block, forward_block

    if not DRY:
        properties = torch.cuda.get_device_properties(0)
        record(
            memory_gib=properties.total_memory / 2**30,
            capability=f"{properties.major}.{properties.minor}",
        )
    record(matrix_tflops=matrix_peak() / 1e12, copy_gb_per_s=copy_bandwidth() / 1e9)
    # A new torch version is most likely to break the signature of the flash operator.
    q = torch.randn(8, 4, 64, device=DEVICE, dtype=torch.bfloat16)
    out, lse = forward_block(q, q[:, :2], q[:, :2], Block([0, 3, 8], [0, 3, 8], True), 0.125)
    assert out.shape == (8, 4, 64) and lse.shape == (8, 4) and lse.dtype == torch.float32


def attention():
    """Compares packed attention with shared prompts with an fp32 reference.

    The forward merges two blocks over different keys. The backward takes the merged log-sum-exp.
    The shapes include grouped heads and sizes that are not powers of two. Then this part checks
    that no NaN leaks between documents, and compares long rows with torch's attention.
    """
    from test_attention import as_pack, layout, reference

    from rl2.packing import zigzag
    from rl2.parallel.ring import PackedAttention

    worst = {"out": 0.0, "dq": 0.0, "dk": 0.0, "dv": 0.0}
    shapes = [(4, 4, 64), (6, 2, 80), (9, 3, 64), (16, 2, 128), (2, 1, 256), (12, 2, 96)]
    for seed, (heads, groups, size) in enumerate(shapes[:3] if DRY else shapes):
        for longest in (1, 9, 70) if DRY else (1, 9, 70, 300):
            cu, prefixes, sees = layout(random.Random(seed + longest), 4, longest)
            attend = PackedAttention(zigzag(as_pack(cu, prefixes), 1, 0).chunks, prefixes, DEVICE)
            torch.manual_seed(seed)
            full = [
                torch.randn(1, n, cu[-1], size, device=DEVICE).bfloat16()
                for n in (heads, groups, groups)
            ]
            grad = torch.randn(1, cu[-1], heads, size, device=DEVICE).bfloat16()
            ours = [x.clone().requires_grad_() for x in full]
            out = attend(None, *ours, size**-0.5)
            got = torch.autograd.grad(out, ours, grad)
            floats = [x.float().requires_grad_() for x in full]
            expected_out = reference(*floats, sees.to(DEVICE), size**-0.5)
            expected = torch.autograd.grad(expected_out, floats, grad.float())
            pairs = zip(worst, (out, *got), (expected_out, *expected), strict=True)
            for name, a, b in pairs:
                # If each document is one token, the gradients of q and k are 0 except for rounding.
                # A relative error has no meaning then.
                small = b.float().norm() < 1e-3 * expected_out.float().norm()
                worst[name] = max(
                    worst[name],
                    0.0 if small and a.float().norm() < 0.05 * grad.norm() else error(a, b),
                )
    record(**{f"worst_{name}": value for name, value in worst.items()})
    assert max(worst.values()) < 0.02, worst
    _poison()
    _long()


def _poison():
    """Checks that NaN in other documents changes no bit of the first group."""
    from test_attention import as_pack, layout

    from rl2.packing import zigzag
    from rl2.parallel.ring import PackedAttention

    cu, prefixes, _ = layout(random.Random(5), 3, 40)
    end = cu[prefixes[0][1]]
    attend = PackedAttention(zigzag(as_pack(cu, prefixes), 1, 0).chunks, prefixes, DEVICE)
    q, k, v = (torch.randn(1, n, cu[-1], 64, device=DEVICE).bfloat16() for n in (4, 2, 2))
    clean = attend(None, q, k, v, 0.125)[:, :end].clone()
    for x in (q, k, v):
        x[:, :, end:] = float("nan")
    assert torch.equal(attend(None, q, k, v, 0.125)[:, :end], clean), "another document leaked in"


def _long():
    """Compares one document of the context length with torch's attention, and times it.

    The heads are grouped.
    """
    from rl2.parallel.attention import Block, backward_block, forward_block

    length, heads, groups, size = (256, 4, 2, 64) if DRY else (16384, 16, 8, 128)
    q, k, v = (
        torch.randn(length, n, size, device=DEVICE).bfloat16() for n in (heads, groups, groups)
    )
    dout = torch.randn_like(q)
    block = Block([0, length], [0, length], True)
    out, lse = forward_block(q, k, v, block, size**-0.5)
    got = backward_block(dout, q, k, v, out, lse, block, size**-0.5)
    theirs = [x.transpose(0, 1)[None].clone().requires_grad_() for x in (q, k, v)]
    repeated = [theirs[0], *(x.repeat_interleave(heads // groups, 1) for x in theirs[1:])]
    expected_out = F.scaled_dot_product_attention(*repeated, is_causal=True)
    expected = torch.autograd.grad(expected_out, theirs, dout.transpose(0, 1)[None])
    errors = {"long_out": error(out, expected_out[0].transpose(0, 1))}
    for name, a, b in zip(("long_dq", "long_dk", "long_dv"), got, expected, strict=True):
        errors[name] = error(a, b[0].transpose(0, 1))
    record(**errors)
    assert max(errors.values()) < 0.02, errors
    forward = seconds(lambda: forward_block(q, k, v, block, size**-0.5))
    backward = seconds(lambda: backward_block(dout, q, k, v, out, lse, block, size**-0.5))
    flops = 2 * length**2 * heads * size  # the causal mask halves 4 n^2
    record(
        attention_tflops=flops / forward / 1e12,
        attention_backward_tflops=2.5 * flops / backward / 1e12,
    )


def head():
    """Compares the chunked head with a plain fp32 log-softmax at a real vocabulary size.

    Compares values and gradients. Measures the time and the memory of both.
    """
    from rl2.model.head import head_scores

    rows, hidden, vocabulary = (64, 32, 1000) if DRY else (4096, 2048, 151936)
    torch.manual_seed(0)
    x = torch.randn(rows, hidden, device=DEVICE).bfloat16().requires_grad_()
    weight = (torch.randn(vocabulary, hidden, device=DEVICE) * 0.05).bfloat16().requires_grad_()
    targets = torch.randint(vocabulary, (rows,), device=DEVICE)
    d_logps, d_entropy = torch.randn(rows, device=DEVICE), torch.randn(rows, device=DEVICE)

    def plain(temperature):
        log_p = ((x @ weight.T).float() / temperature).log_softmax(-1)
        return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    for temperature, with_entropy in ((1.0, False), (0.7, True)):
        logps, entropy = head_scores(x, weight, targets, temperature, with_entropy)
        expected, expected_entropy = plain(temperature)
        told = {"logps": (logps - expected).abs().max().item()}
        loss, plain_loss = (logps * d_logps).sum(), (expected * d_logps).sum()
        if with_entropy:
            told["entropy"] = (entropy - expected_entropy).abs().max().item()
            loss, plain_loss = (
                loss + (entropy * d_entropy).sum(),
                plain_loss + (expected_entropy * d_entropy).sum(),
            )
        got, wanted = (
            torch.autograd.grad(loss, (x, weight)),
            torch.autograd.grad(plain_loss, (x, weight)),
        )
        told |= {
            name: error(a, b)
            for name, a, b in zip(("d_hidden", "d_weight"), got, wanted, strict=True)
        }
        record(**{f"{name}_at_{temperature}": value for name, value in told.items()})
        assert told["logps"] < 1e-3 and told.get("entropy", 0) < 1e-3, (
            told
        )  # both compute from the same bf16 logits
        assert told["d_hidden"] < 0.02 and told["d_weight"] < 0.02, told
        del logps, entropy, expected, expected_entropy, loss, plain_loss, got, wanted
    for name, function in (
        ("chunked", lambda: head_scores(x, weight, targets)[0].sum().backward()),
        ("plain", lambda: plain(1.0)[0].sum().backward()),
    ):
        x.grad = weight.grad = None
        if not DRY:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        record(**{f"{name}_ms": 1000 * seconds(function, repeats=3, warm=1)})
        if not DRY:
            record(**{f"{name}_extra_gib": (torch.cuda.max_memory_allocated() - before) / 2**30})
