"""Compares the chunked head with plain log-softmax: values, gradients, costs."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rl2.model import head as head_module
from rl2.model.head import head_scores


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_rows", [1, 7, 1000])
def test_chunked_head_equals_log_softmax(monkeypatch, temperature, chunk_rows):
    monkeypatch.setitem(head_module.LOGITS_PER_CHUNK, "cpu", chunk_rows * 37)
    torch.manual_seed(0)
    hidden = torch.randn(23, 8, requires_grad=True)
    weight = torch.randn(37, 8, requires_grad=True)
    targets = torch.randint(37, (23,))
    d_logps = torch.randn(23)
    d_entropy = torch.randn(23)
    for with_entropy in (False, True):
        logps, entropy = head_scores(hidden, weight, targets, temperature, with_entropy)
        doubles = [x.detach().double().requires_grad_() for x in (hidden, weight)]
        log_p = (doubles[0] @ doubles[1].T / temperature).log_softmax(-1)
        plain = log_p.gather(1, targets[:, None])[:, 0]
        plain_entropy = -(log_p.exp() * log_p).sum(-1)
        torch.testing.assert_close(logps.double(), plain, rtol=0, atol=1e-5)
        loss = (logps * d_logps).sum()
        plain_loss = (plain * d_logps).sum()
        if with_entropy:
            torch.testing.assert_close(entropy.double(), plain_entropy, rtol=0, atol=1e-5)
            loss = loss + (entropy * d_entropy).sum()
            plain_loss = plain_loss + (plain_entropy * d_entropy).sum()
        gradients = torch.autograd.grad(loss, (hidden, weight))
        plain_gradients = torch.autograd.grad(plain_loss, doubles)
        for gradient, plain_gradient in zip(gradients, plain_gradients, strict=True):
            torch.testing.assert_close(gradient.double(), plain_gradient, rtol=0, atol=1e-4)


def test_a_frozen_head_costs_no_gradient():
    torch.manual_seed(0)
    hidden = torch.randn(5, 8, requires_grad=True)
    weight = torch.randn(37, 8, requires_grad=True)
    flops = []
    gradients = []
    for head_weight in (weight, weight.detach()):
        logps, _ = head_scores(hidden, head_weight, torch.arange(5))
        with FlopCounterMode(display=False) as counter:
            gradients += torch.autograd.grad(logps.sum(), hidden)
        flops.append(counter.get_total_flops())
    product = 2 * 5 * 8 * 37
    # The logits again, the gradient of the hidden states, the gradient of the weight.
    assert flops == [3 * product, 2 * product]
    assert torch.equal(*gradients)


def test_extreme_logits_stay_finite():
    hidden = torch.tensor([[200.0], [-200.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.0]], requires_grad=True)
    logps, entropy = head_scores(hidden, weight, torch.tensor([0, 0]), with_entropy=True)
    torch.testing.assert_close(logps, torch.tensor([0.0, -400.0]))
    torch.testing.assert_close(entropy, torch.zeros(2))
    (logps + entropy).sum().backward()
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()
