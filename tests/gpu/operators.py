"""Compares attention and the head with fp32 references."""

import random
from itertools import product

import torch
from figures import record
from ring import as_pack, check_isolation, layout, reference, restrict
from tools import DEVICE, DRY, error

from rl2.attention.ring import PackedAttention
from rl2.model.head import head_scores
from rl2.model.logits import HeadInputs, LogitSettings
from rl2.packing import zigzag

# Errors of log-probabilities and entropies against fp32: of nearly all, and of any.
TYPICAL_QUANTILE, TYPICAL_ERROR, LARGEST_ERROR = 0.98, 1e-3, 0.05


def attention():
    """Compares packed attention with shared prompts with an fp32 reference.

    The forward merges blocks over different keys. The backward takes the merged log-sum-exp. The
    shapes include grouped heads and sizes that are not powers of two. Each pack is computed without
    a window and with one that most documents exceed. No NaN leaks between documents.
    """
    worst = {"out": 0.0, "dq": 0.0, "dk": 0.0, "dv": 0.0}
    shapes = [(4, 4, 64), (6, 2, 80), (9, 3, 64), (16, 2, 128), (2, 1, 256), (12, 2, 96)]
    for seed, shape in enumerate(shapes[:3] if DRY else shapes):
        lengths = (1, 9, 70) if DRY else (1, 9, 70, 300)
        for longest, windowed in product(lengths, (False, True)):
            window = longest // 3 + 1 if windowed else None
            for name, value in packed_errors(seed, *shape, longest, window).items():
                worst[name] = max(worst[name], value)
    record(**{f"worst_{name}": value for name, value in worst.items()})
    assert max(worst.values()) < 0.02, worst


def packed_errors(seed, heads, groups, size, longest, window) -> dict[str, float]:
    """Relative errors of the output and the gradients on one random pack, see `check_isolation`."""
    cu, prefixes, sees = layout(random.Random(seed + longest), 4, longest)
    scale = size**-0.5
    attend = PackedAttention(zigzag(as_pack(cu, prefixes), 1, 0).chunks, prefixes, DEVICE)
    torch.manual_seed(seed)
    full = [
        torch.randn(1, n, cu[-1], size, device=DEVICE).bfloat16() for n in (heads, groups, groups)
    ]
    d_out = torch.randn(1, cu[-1], heads, size, device=DEVICE).bfloat16()
    inputs = [x.clone().requires_grad_() for x in full]
    out = attend(None, *inputs, scale, window)
    check_isolation(cu, prefixes, torch.arange(cu[-1]), full, attend, out, (scale, window))
    gradients = torch.autograd.grad(out, inputs, d_out)
    floats = [x.float().requires_grad_() for x in full]
    visible = restrict(sees, cu, prefixes, window)
    expected_out = reference(*floats, visible.to(DEVICE), scale)
    expected = torch.autograd.grad(expected_out, floats, d_out.float())
    errors = {"out": error(out, expected_out)}
    for name, gradient, exact in zip(("dq", "dk", "dv"), gradients, expected, strict=True):
        # Where each document is one token, the gradients of q and k are 0 but for rounding, and a
        # relative error means nothing.
        is_zero = exact.float().norm() < 1e-3 * expected_out.float().norm()
        if is_zero and gradient.float().norm() < 0.05 * d_out.norm():
            errors[name] = 0.0
        else:
            errors[name] = error(gradient, exact)
    return errors


def head():
    """Compares the chunked head with a plain fp32 log-softmax at a real vocabulary size.

    Compares values and gradients.
    """
    rows, width, vocabulary = (64, 32, 1000) if DRY else (4096, 2048, 151936)
    torch.manual_seed(0)
    hidden = torch.randn(rows, width, device=DEVICE).bfloat16().requires_grad_()
    weight = (torch.randn(vocabulary, width, device=DEVICE) * 0.05).bfloat16().requires_grad_()
    targets = torch.randint(vocabulary, (rows,), device=DEVICE)
    for temperature, with_entropy in ((1.0, False), (0.7, True)):
        errors = head_errors(hidden, weight, targets, temperature, with_entropy)
        record(**{f"{name}_at_{temperature}": value for name, value in errors.items()})
        assert errors["d_hidden"] < 0.02 and errors["d_weight"] < 0.02, errors


def head_errors(hidden, weight, targets, temperature, with_entropy) -> dict[str, float]:
    """Largest errors of the values, which are checked, and relative errors of the gradients."""
    head = HeadInputs(hidden, weight, LogitSettings(temperature))
    logps, entropy = head_scores(head, targets, with_entropy)
    log_p = (hidden.float() @ weight.float().T / temperature).log_softmax(-1)
    expected = log_p.gather(1, targets[:, None])[:, 0]
    errors = {"logps": largest_error(logps, expected)}
    d_logps = torch.randn(len(targets), device=DEVICE)
    loss = (logps * d_logps).sum()
    plain_loss = (expected * d_logps).sum()
    if with_entropy:
        expected_entropy = -(log_p.exp() * log_p).sum(-1)
        errors["entropy"] = largest_error(entropy, expected_entropy)
        d_entropy = torch.randn(len(targets), device=DEVICE)
        loss = loss + (entropy * d_entropy).sum()
        plain_loss = plain_loss + (expected_entropy * d_entropy).sum()
    gradients = torch.autograd.grad(loss, (hidden, weight))
    expected_gradients = torch.autograd.grad(plain_loss, (hidden, weight))
    for name, gradient, exact in zip(
        ("d_hidden", "d_weight"), gradients, expected_gradients, strict=True
    ):
        errors[name] = error(gradient, exact)
    return errors


def largest_error(values, expected) -> float:
    """Returns the largest absolute error. AssertionError unless nearly all errors are tiny.

    The product of a chunk and that of the whole vocabulary may come from different kernels. Where
    a kernel rounds a logit to bf16, the value moves by up to 0.016: a few values may.
    """
    errors = (values - expected).abs().flatten()
    typical, largest = errors.quantile(TYPICAL_QUANTILE).item(), errors.max().item()
    assert typical < TYPICAL_ERROR and largest < LARGEST_ERROR, (
        f"{TYPICAL_QUANTILE:.0%} of the errors are at most {typical:.2g}, all {largest:.2g}"
    )
    return largest
