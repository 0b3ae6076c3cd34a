"""Compares the chunked head with plain log-softmax: values, gradients, costs."""

from dataclasses import replace

import pytest
import torch
from test_full_kl import (
    NUM_PAIRS,
    VOCABULARY,
    check_scores,
    in_float64,
    make_head,
    plain_log_p,
)
from torch.utils.flop_counter import FlopCounterMode

from rl2.model import head as head_module
from rl2.model.head import head_scores
from rl2.model.logits import CandidateMask, HeadInputs


def draw_candidates(targets, vocabulary):
    """Counts and ids of the candidates of each pair, and which tokens [P, V] are outside.

    The counts are 0, which is the whole vocabulary, to 7; one candidate is the pair's target.
    """
    counts = torch.arange(len(targets)) % 8
    ids = []
    outside = torch.zeros(len(targets), vocabulary, dtype=torch.bool)
    for row, (target, count) in enumerate(zip(targets, counts, strict=True)):
        others = torch.randperm(vocabulary)
        ids.append(torch.tensor([target, *others[others != target]])[:count])
        outside[row] = count > 0
        outside[row, ids[-1]] = False
    return counts, torch.cat(ids), outside


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("with_candidates", [False, True])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize(
    ("chunk_columns", "most_kept", "temperature"),
    [(1, 0, 1.0), (7, 0, 0.7), (7, 1000, 1.0), (1000, 1000, 0.7)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_equals_log_softmax(
    monkeypatch,
    is_special,
    with_candidates,
    exact,
    with_entropy,
    chunk_columns,
    most_kept,
    temperature,
    dtype,
):
    """In values, entropies and gradients. A special head has a bias and a cap."""
    monkeypatch.setattr(head_module, "MOST_KEPT_LOGITS", most_kept)
    monkeypatch.setitem(head_module.LOGITS_PER_CHUNK, "cpu", chunk_columns * VOCABULARY)
    torch.manual_seed(0)
    head = make_head(8, dtype=dtype, divisor=temperature, cap=2.5 if is_special else None)
    targets = torch.randint(VOCABULARY, (NUM_PAIRS,))
    outside = torch.zeros(NUM_PAIRS, VOCABULARY, dtype=torch.bool)
    if with_candidates:
        counts, ids, outside = draw_candidates(targets, VOCABULARY)
        mask = CandidateMask.of(counts, ids)
        head = replace(head, settings=replace(head.settings, candidates=mask))
    logps, entropy = head_scores(head, targets, with_entropy, exact=exact)
    plain, doubles, factors = in_float64(head)
    log_p = plain_log_p(plain, outside)
    scores, expected = logps, log_p.gather(1, targets[:, None])[:, 0]
    assert (entropy is not None) == with_entropy
    if with_entropy:
        scores = torch.cat([logps, entropy])
        expected = torch.cat([expected, -(log_p.exp() * log_p).sum(-1)])
    check_scores(scores, expected, factors, doubles)


@pytest.mark.parametrize("most_kept, num_again", [(0, 1), (5 * 37, 0), (5 * 37 - 1, 1)])
def test_a_frozen_head_costs_no_gradient_and_kept_logits_no_product(
    monkeypatch, most_kept, num_again
):
    monkeypatch.setattr(head_module, "MOST_KEPT_LOGITS", most_kept)
    torch.manual_seed(0)
    hidden = torch.randn(5, 8, requires_grad=True)
    weight = torch.randn(37, 8, requires_grad=True)
    flops = []
    gradients = []
    for head_weight in (weight, weight.detach()):
        logps, _ = head_scores(HeadInputs(hidden, head_weight), torch.arange(5))
        with FlopCounterMode(display=False) as counter:
            gradients += torch.autograd.grad(logps.sum(), hidden)
        flops.append(counter.get_total_flops())
    product = 2 * 5 * 8 * 37
    # The logits again, the gradient of the hidden states, the gradient of the weight.
    assert flops == [(num_again + 2) * product, (num_again + 1) * product]
    assert torch.equal(*gradients)


def test_extreme_logits_stay_finite():
    hidden = torch.tensor([[200.0], [-200.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.0]], requires_grad=True)
    logps, entropy = head_scores(
        HeadInputs(hidden, weight), torch.tensor([0, 0]), with_entropy=True
    )
    torch.testing.assert_close(logps, torch.tensor([0.0, -400.0]))
    torch.testing.assert_close(entropy, torch.zeros(2))
    (logps + entropy).sum().backward()
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()
