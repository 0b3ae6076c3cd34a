"""Compares the chunked head, and KL(policy || teacher) over the whole vocabulary, with plain
log-softmax: values, gradients, costs.
"""

import os
import sys
import weakref
from dataclasses import replace

import pytest
import torch
from common import launch, make_model
from parity import (
    LARGE_BUDGET,
    LAYOUTS,
    SMALL_BUDGET,
    assert_equal_steps,
    full_weights,
    make_batch,
    plain_steps,
    save_layouts,
    use_sgd,
    worker_config,
)
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from rl2.model import head as head_module
from rl2.model.head import full_kl, head_scores
from rl2.model.logits import CandidateMask, HeadInputs, LogitSettings
from rl2.model.token_model import TokenScores
from rl2.worker import Worker

NUM_PAIRS, VOCABULARY = 23, 37


def make_head(width, vocabulary=VOCABULARY, dtype=torch.float32, divisor=1.0, cap=None):
    """Random factors, with a bias if there is a cap."""
    return HeadInputs(
        hidden=torch.randn(NUM_PAIRS, width).to(dtype).requires_grad_(),
        weight=torch.randn(vocabulary, width).to(dtype).requires_grad_(),
        settings=LogitSettings(divisor, cap),
        bias=torch.randn(vocabulary).to(dtype).requires_grad_() if cap else None,
    )


def in_float64(head):
    """The head with its factors in float64, and these."""
    factors = {name: value for name, value in vars(head).items() if isinstance(value, torch.Tensor)}
    doubles = {name: x.detach().double().requires_grad_() for name, x in factors.items()}
    return replace(head, **doubles), [*doubles.values()], [*factors.values()]


def plain_log_p(head, outside):
    """Log-probabilities of the tokens that `outside` has a column for."""
    logits = head.hidden @ head.weight[: outside.shape[1]].T
    cap = head.settings.cap
    if cap is not None:
        logits = cap * ((logits + head.bias) / cap).tanh()
    return (logits / head.settings.divisor).masked_fill(outside, -1e9).log_softmax(-1)


def check_scores(scores, expected, factors, doubles):
    """Compares values and gradients in the factors of a head with those in float64."""
    torch.testing.assert_close(scores.double(), expected, rtol=0, atol=1e-5)
    weights = torch.randn(len(scores))
    gradients = torch.autograd.grad((scores * weights).sum(), factors)
    right = torch.autograd.grad((expected * weights).sum(), doubles)
    tolerance = 1e-5 if factors[0].dtype == torch.float32 else 5e-3
    for gradient, other in zip(gradients, right, strict=True):
        assert (gradient.double() - other).norm() < tolerance * other.norm()


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


def test_a_head_of_extreme_logits_stays_finite():
    hidden = torch.tensor([[200.0], [-200.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.0]], requires_grad=True)
    logps, entropy = head_scores(
        HeadInputs(hidden, weight), torch.tensor([0, 0]), with_entropy=True
    )
    torch.testing.assert_close(logps, torch.tensor([0.0, -400.0]))
    torch.testing.assert_close(entropy, torch.zeros(2))
    (logps + entropy).sum().backward()
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()


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
    monkeypatch, chunk_columns, dtype, caps, with_candidates, teacher_vocabulary
):
    monkeypatch.setitem(head_module.LOGITS_PER_CHUNK, "cpu", chunk_columns * NUM_PAIRS)
    torch.manual_seed(0)
    head = make_head(8, dtype=dtype, divisor=0.7, cap=caps[0])
    teacher = make_head(12, teacher_vocabulary, dtype, divisor=1.3, cap=caps[1])
    outside = torch.zeros(NUM_PAIRS, min(VOCABULARY, teacher_vocabulary), dtype=torch.bool)
    if with_candidates:
        outside = torch.rand(outside.shape) < 0.5
        mask = CandidateMask.of((~outside).sum(1), (~outside).nonzero()[:, 1])
        head = replace(head, settings=replace(head.settings, candidates=mask))
        teacher = replace(teacher, settings=replace(teacher.settings, candidates=mask))
    kl = full_kl(head, teacher)
    plain, doubles, factors = in_float64(head)
    log_p, log_q = plain_log_p(plain, outside), plain_log_p(in_float64(teacher)[0], outside)
    expected = (log_p.exp() * (log_p - log_q)).sum(-1)
    assert (kl > 0.1).all()
    check_scores(kl, expected, factors, doubles)


def test_a_kl_of_extreme_logits_stays_finite():
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


def test_the_teachers_hidden_states_are_freed_after_the_backward_pass():
    """The loss of a micro-batch is kept until that of the next one is there."""
    teacher = make_head(4)
    teacher = replace(teacher, hidden=2 * teacher.hidden.detach())
    hidden = weakref.ref(teacher.hidden)
    loss = full_kl(make_head(6), teacher).sum()
    del teacher
    assert hidden() is not None
    loss.backward()
    assert hidden() is None and loss.requires_grad


def reference(policy, teacher):
    """The two updates of a plain model."""
    policy, teacher = (
        AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        for name in (policy, teacher)
    )

    def score(policy, batch):
        log_p, log_q = (
            (model(batch.inputs.long()).logits / 0.9).log_softmax(-1) for model in (policy, teacher)
        )
        logps = log_p.gather(2, batch.targets[..., None].long())[..., 0]
        kl = (log_p.exp() * (log_p - log_q.detach())).sum(-1)
        return TokenScores(logps=logps, teacher_kl=kl)

    return plain_steps(policy, score, teacher_loss) | {"scores": {}}


def teacher_loss(batch, scores):
    """Policy gradient and the KL, so that both reach the same weights."""
    kl = (scores.teacher_kl * batch.token_weights).sum()
    loss = kl - (scores.logps * batch.advantages * batch.token_weights).sum()
    return loss, {"teacher_kl": kl.detach()}


def two_updates(folder, policy, **changes):
    """What two updates report, and the weights after them."""
    config = worker_config(f"{folder}/{policy}", **changes)
    worker = Worker(config, torch.device("cpu"), num_updates=10)
    use_sgd(worker)
    frozen = Worker(replace(config, model_name=f"{folder}/teacher"), torch.device("cpu"))
    batch = make_batch()
    updates = [worker.update(batch, teacher_loss, 0.9, teacher=frozen) for _ in range(2)]
    return {"updates": [update.to_log() for update in updates], "weights": full_weights(worker)}


def layouts_of(world):
    """The keys of each layout: of two processes one model and one budget; of four both budgets."""
    budgets = [(SMALL_BUDGET, 1), (LARGE_BUDGET, False)]
    found = {}
    for number, (fsdp, sp, tp) in enumerate(LAYOUTS[world]):
        for budget, recomputed in budgets if world == 4 else [budgets[number // 2 % 2]]:
            found[number, budget] = {
                "policy": "tied" if number % 2 else "untied",
                "fsdp_size": fsdp,
                "sp_size": sp,
                "tp_size": tp,
                "max_length_per_device": budget,
                "gradient_checkpointing": recomputed,
            }
    return found


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_every_layout_equals_one_padded_process(tmp_path, world):
    """The teacher has another width than the policy."""
    teacher = make_model(tmp_path / "teacher", "llama", seed=1, hidden_size=96)
    expected = {}
    for policy in ("tied", "untied"):
        name = make_model(tmp_path / policy, "qwen3", tied=policy == "tied")
        expected[policy] = reference(name, teacher)
    launch(world, __file__, tmp_path, tmp_path / "out")
    results = torch.load(tmp_path / "out")
    for key, layout in layouts_of(world).items():
        result, right = results[key], expected[layout["policy"]]
        assert_equal_steps(result, right, layout)
        for update, wanted in zip(result["updates"], right["updates"], strict=True):
            assert abs(update["teacher_kl"] - wanted["teacher_kl"]) <= 1e-5, layout


if __name__ == "__main__":  # a process of the test of layouts
    save_layouts(two_updates, layouts_of(int(os.environ["WORLD_SIZE"])), *sys.argv[1:])
