"""Compares KL(policy || teacher) over the whole vocabulary with plain log-softmax."""

import os
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from common import launch, make_model
from parity import (
    LARGE_BUDGET,
    LAYOUTS,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    SMALL_BUDGET,
    make_batch,
    save_layouts,
    use_sgd,
    worker_config,
)
from transformers import AutoModelForCausalLM

from rl2.model import head as head_module
from rl2.model.head import HeadInputs, full_kl
from rl2.model.logits import CandidateMask
from rl2.worker import Worker

NUM_PAIRS, VOCABULARY = 23, 37


def make_head(width, vocabulary=VOCABULARY, dtype=torch.float32, divisor=1.0, cap=None):
    """Random factors, with a bias if there is a cap."""
    return HeadInputs(
        hidden=torch.randn(NUM_PAIRS, width).to(dtype).requires_grad_(),
        weight=torch.randn(vocabulary, width).to(dtype).requires_grad_(),
        divisor=divisor,
        bias=torch.randn(vocabulary).to(dtype).requires_grad_() if cap else None,
        cap=cap,
    )


def in_float64(head):
    """The head with its factors in float64, and these."""
    factors = {name: value for name, value in vars(head).items() if isinstance(value, torch.Tensor)}
    doubles = {name: x.detach().double().requires_grad_() for name, x in factors.items()}
    return replace(head, **doubles), [*doubles.values()], [*factors.values()]


def plain_log_p(head, outside):
    """Log-probabilities of the tokens that `outside` has a column for."""
    logits = head.hidden @ head.weight[: outside.shape[1]].T
    if head.cap is not None:
        logits = head.cap * ((logits + head.bias) / head.cap).tanh()
    return (logits / head.divisor).masked_fill(outside, -1e9).log_softmax(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_columns", [1, 7, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("caps", "with_candidates", "teacher_vocabulary"),
    [
        ((None, None), False, VOCABULARY),
        ((None, None), False, 33),  # vocabularies are padded differently
        ((None, None), False, 40),
        ((2.5, 4.0), False, VOCABULARY),
        ((2.5, 4.0), True, VOCABULARY),
    ],
)
def test_chunked_kl_equals_log_softmax(
    monkeypatch, temperature, chunk_columns, dtype, caps, with_candidates, teacher_vocabulary
):
    """In values and gradients."""
    monkeypatch.setitem(head_module.LOGITS_PER_CHUNK, "cpu", chunk_columns * NUM_PAIRS)
    torch.manual_seed(0)
    head = make_head(8, dtype=dtype, divisor=temperature, cap=caps[0])
    teacher = make_head(12, teacher_vocabulary, dtype, divisor=1.3, cap=caps[1])
    outside = torch.zeros(NUM_PAIRS, min(VOCABULARY, teacher_vocabulary), dtype=torch.bool)
    if with_candidates:
        outside = torch.rand(outside.shape) < 0.5
        mask = CandidateMask.of((~outside).sum(1), (~outside).nonzero()[:, 1])
        head, teacher = replace(head, candidates=mask), replace(teacher, candidates=mask)
    kl = full_kl(head, teacher)
    plain, doubles, factors = in_float64(head)
    log_p, log_q = plain_log_p(plain, outside), plain_log_p(in_float64(teacher)[0], outside)
    expected = (log_p.exp() * (log_p - log_q)).sum(-1)
    assert (kl > 0.1).all()
    torch.testing.assert_close(kl.double(), expected, rtol=1e-5, atol=1e-5)
    factor = torch.randn(NUM_PAIRS)
    gradients = torch.autograd.grad((kl * factor).sum(), factors)
    right = torch.autograd.grad((expected * factor).sum(), doubles)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-3
    for gradient, other in zip(gradients, right, strict=True):
        assert (gradient.double() - other).norm() < tolerance * other.norm()


def test_extreme_logits_stay_finite():
    torch.manual_seed(0)
    heads = [make_head(8), make_head(12)]
    far = [replace(head, hidden=1e3 * head.hidden) for head in heads]
    kl = full_kl(*far)
    assert kl.isfinite().all() and (kl >= 0).all()
    gradients = torch.autograd.grad(kl.sum(), (heads[0].hidden, heads[0].weight))
    assert all(x.isfinite().all() for x in gradients)


def test_no_logits_of_all_tokens_are_kept(monkeypatch):
    monkeypatch.setitem(head_module.LOGITS_PER_CHUNK, "cpu", 7 * NUM_PAIRS)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, id):
        full_kl(make_head(8), make_head(12))
    assert max(saved) < NUM_PAIRS * VOCABULARY


def plain_updates(policy, teacher):
    """(loss, KL, gradient norm) of two SGD updates of a padded model, and the weights after."""
    batch = make_batch()
    models = [
        AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        for name in (policy, teacher)
    ]
    sgd = torch.optim.SGD(models[0].parameters(), lr=LEARNING_RATE)
    updates = []
    for _ in range(2):
        log_p, log_q = [
            (model(batch.inputs.long()).logits / 0.9).log_softmax(-1) for model in models
        ]
        divergences = (log_p.exp() * (log_p - log_q.detach())).sum(-1)
        logps = log_p.gather(2, batch.targets[..., None].long())[..., 0]
        kl = (divergences * batch.token_weights).sum()
        loss = kl - (logps * batch.advantages * batch.token_weights).sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(models[0].parameters(), MAX_GRAD_NORM)
        sgd.step()
        sgd.zero_grad()
        updates.append((loss.item(), kl.item(), norm.item()))
    return updates, dict(models[0].named_parameters())


def teacher_loss(batch, scores):
    """Policy gradient and the KL, so that both reach the same weights."""
    kl = (scores.teacher_kl * batch.token_weights).sum()
    loss = kl - (scores.logps * batch.advantages * batch.token_weights).sum()
    return loss, {"teacher_kl": kl.detach()}


def two_updates(policy, teacher, **changes):
    """What two updates report, and the weights after them."""
    config = worker_config(policy, **changes)
    worker = Worker(config, torch.device("cpu"), num_updates=10)
    use_sgd(worker)
    frozen = Worker(replace(config, model_name=teacher), torch.device("cpu"))
    batch = make_batch()
    updates = [worker.update(batch, teacher_loss, 0.9, teacher=frozen) for _ in range(2)]
    return [update.to_log() for update in updates], dict(worker.iter_full_weights(torch.float32))


def settings_of(world, is_tied):
    """The keys of each layout: of a tied model with many micro-batches, or one; of others reversed.

    All of four processes have both.
    """
    found = {}
    for number, (fsdp, sp, tp) in enumerate(LAYOUTS[world]):
        for budget, recomputed in ((SMALL_BUDGET, 1), (LARGE_BUDGET, False)):
            if world < 4 and (budget == SMALL_BUDGET) != (number % 2 == is_tied):
                continue
            found[fsdp, sp, tp, budget] = {
                "fsdp_size": fsdp,
                "sp_size": sp,
                "tp_size": tp,
                "max_length_per_device": budget,
                "gradient_checkpointing": recomputed,
            }
    return found


@pytest.mark.parametrize(
    ("world", "tied"), [(2, True), (2, False), pytest.param(4, False, marks=pytest.mark.nightly)]
)
def test_every_layout_equals_one_padded_process(tmp_path, world, tied):
    """The teacher has another width than the policy."""
    policy = make_model(tmp_path / "policy", "qwen3", tied)
    teacher = make_model(tmp_path / "teacher", "llama", seed=1, hidden_size=96)
    launch(world, __file__, policy, teacher, tmp_path / "out", int(tied))
    expected, expected_weights = plain_updates(policy, teacher)
    results = torch.load(tmp_path / "out")
    assert len(results) == (2 if world == 4 else 1) * len(LAYOUTS[world])
    for layout, (updates, weights) in results.items():
        for update, (loss, kl, norm) in zip(updates, expected, strict=True):
            assert update["loss"] == pytest.approx(loss, abs=1e-5), layout
            assert update["teacher_kl"] == pytest.approx(kl, abs=1e-5), layout
            assert update["grad_norm"] == pytest.approx(norm, rel=1e-4), layout
        for name, weight in weights.items():
            right = expected_weights[name].detach()
            torch.testing.assert_close(weight, right, rtol=0, atol=1e-6, msg=f"{layout} {name}")


if __name__ == "__main__":  # a process of the test of layouts
    *names, out, is_tied = sys.argv[1:]
    settings = settings_of(int(os.environ["WORLD_SIZE"]), int(is_tied))
    save_layouts(partial(two_updates, names[0]), settings, names[1], out)
