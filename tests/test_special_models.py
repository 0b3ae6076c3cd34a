"""Models with sinks, caps, a biased head or recurrent layers in a worker: layouts, exports, and the
head itself.

test_windows.py compares their answers with transformers, the admission their log-probabilities and
gradients.
"""

import sys

import pytest
import torch
from common import RECURRENT, SPECIAL, launch, make_model, make_tokenizer
from parity import (
    SMALL_BUDGET,
    assert_equal_steps,
    make_batch,
    policy_loss,
    save_layouts,
    two_steps,
    worker_config,
)
from transformers import AutoModelForCausalLM

from rl2.model import head as head_module
from rl2.model.head import HeadInputs, full_kl, head_scores
from rl2.model.logits import CandidateMask
from rl2.worker import Worker

FAMILIES = SPECIAL | RECURRENT


# Of two processes. Models with sinks have no plan of tensor parallelism that rl2 knows, and
# recurrent ones no ring.
LAYOUTS = {"fsdp": {}, "sp": {"sp_size": 2}, "tp": {"tp_size": 2}}


def families_of(layout):
    """Families whose layers differ in this layout."""
    if layout == "fsdp":
        return list(RECURRENT)
    return list(SPECIAL) if layout == "sp" else ["gemma2", "phi"]


def two_updates(folder, families, **changes):
    """The results of two updates by the name of the family."""
    settings = {"max_length_per_device": SMALL_BUDGET, "gradient_checkpointing": 1, **changes}
    results = {}
    for family in families:
        name = f"{folder}/{family}"
        results[family] = two_steps(name, False, torch.device("cpu"), make_batch(), **settings)
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model of each family."""
    folder = tmp_path_factory.mktemp("models")
    for family, overrides in FAMILIES.items():
        make_model(folder / family, family, **overrides)
    return folder


def test_layouts_give_the_updates_of_one_process(folder, device):
    """Their gradients are clipped, so that a wrong sum shows in the norm."""
    launch(2, __file__, folder, folder / "out")
    expected = two_updates(folder, FAMILIES, share_prompts=False)
    starts = {f: AutoModelForCausalLM.from_pretrained(folder / f).state_dict() for f in FAMILIES}
    for layout, results in torch.load(folder / "out").items():
        assert list(results) == families_of(layout)
        for family, result in results.items():
            assert_equal_steps(result, expected[family], (layout, family), 1e-4, 1e-3)
            for key, weight in expected[family]["weights"].items():
                error = (result["weights"][key] - weight).norm()
                moved = (weight - starts[family][key]).norm()  # small tensors move by little
                assert error <= 2e-3 * moved + 1e-7, (layout, family, key)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_is_the_trained_model(folder, tmp_path, device, family):
    name = str(folder / family)
    batch = make_batch()
    worker = Worker(worker_config(name, lr=1e-2), device, False, 4)
    before = worker.infer(batch).logps
    worker.update(batch, policy_loss, with_entropy=True)
    logps = worker.infer(batch).logps
    assert (logps - before).abs().max() > 1e-3
    worker.export(str(tmp_path / "export"), make_tokenizer())
    plain = AutoModelForCausalLM.from_pretrained(
        tmp_path / "export", dtype=torch.float32, attn_implementation="eager"
    )
    log_p = plain(batch.inputs).logits.log_softmax(-1)
    expected = log_p.gather(2, batch.targets[..., None].long())[..., 0] * batch.mask
    torch.testing.assert_close(logps, expected, rtol=0, atol=1e-4)
    stored = dict(AutoModelForCausalLM.from_pretrained(name).named_parameters())
    for key, weight in plain.named_parameters():  # sinks and biases are trained too
        if key.endswith(("sinks", "lm_head.bias")):
            assert not torch.equal(weight, stored[key])


def plain_logits(hidden, weight, bias, cap, temperature):
    logits = hidden @ weight.T + bias
    return cap * (logits / cap).tanh() / temperature


def make_head(num_pairs=23, vocabulary=37, width=8):
    return [
        torch.randn(num_pairs, width, requires_grad=True),
        torch.randn(vocabulary, width, requires_grad=True),
        torch.randn(vocabulary, requires_grad=True),
    ]


def check_gradients(scores, expected, factors, doubles):
    torch.testing.assert_close(scores.double(), expected, rtol=0, atol=1e-5)
    factor = torch.randn(len(scores))
    gradients = torch.autograd.grad((scores * factor).sum(), factors)
    right = torch.autograd.grad((expected * factor).sum(), doubles)
    for gradient, other in zip(gradients, right, strict=True):
        assert (gradient.double() - other).norm() < 1e-5 * other.norm()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("most_kept", [0, 1000])
@pytest.mark.parametrize("candidates", [False, True])
def test_a_biased_and_capped_head(monkeypatch, exact, most_kept, candidates):
    """Values, entropies and gradients, also among candidates."""
    monkeypatch.setattr(head_module, "MOST_KEPT_LOGITS", most_kept)
    monkeypatch.setitem(head_module.LOGITS_PER_CHUNK, "cpu", 7 * 37)
    torch.manual_seed(0)
    factors = make_head()
    targets = torch.randint(37, (23,))
    outside = torch.zeros(23, 37, dtype=torch.bool)
    mask = None
    if candidates:
        outside = torch.rand(23, 37) < 0.5
        outside[range(23), targets] = False
        mask = CandidateMask.of((~outside).sum(1), (~outside).nonzero()[:, 1])
    hidden, weight, bias = factors
    head = HeadInputs(hidden, weight, 0.7, bias=bias, cap=2.5, candidates=mask)
    logps, entropy = head_scores(head, targets, True, exact=exact)
    doubles = [x.detach().double().requires_grad_() for x in factors]
    logits = plain_logits(*doubles, 2.5, 0.7).masked_fill(outside, -1e9)
    log_p = logits.log_softmax(-1)
    plain = log_p.gather(1, targets[:, None])[:, 0]
    plain_entropy = -(log_p.exp() * log_p).sum(-1)
    expected = torch.cat([plain, plain_entropy])
    check_gradients(torch.cat([logps, entropy]), expected, factors, doubles)


@pytest.mark.parametrize("candidates", [False, True])
def test_the_kl_of_biased_and_capped_heads(monkeypatch, candidates):
    """The teacher has a cap, a bias and a width of its own."""
    monkeypatch.setitem(head_module.LOGITS_PER_CHUNK, "cpu", 7 * 23)
    torch.manual_seed(0)
    factors = make_head()
    teacher = [x.detach() for x in make_head(width=12)]
    outside = torch.zeros(23, 37, dtype=torch.bool)
    mask = None
    if candidates:
        outside = torch.rand(23, 37) < 0.5
        mask = CandidateMask.of((~outside).sum(1), (~outside).nonzero()[:, 1])
    head = HeadInputs(*factors[:2], 0.7, bias=factors[2], cap=2.5, candidates=mask)
    teacher_head = HeadInputs(*teacher[:2], 1.3, bias=teacher[2], cap=4.0, candidates=mask)
    kl = full_kl(head, teacher_head)
    doubles = [x.detach().double().requires_grad_() for x in factors]
    log_p = plain_logits(*doubles, 2.5, 0.7).masked_fill(outside, -1e9).log_softmax(-1)
    log_q = plain_logits(*[x.double() for x in teacher], 4.0, 1.3)
    log_q = log_q.masked_fill(outside, -1e9).log_softmax(-1)
    expected = (log_p.exp() * (log_p - log_q)).sum(-1)
    assert (kl > 0.1).all()
    check_gradients(kl, expected, factors, doubles)


if __name__ == "__main__":  # a process of the test of layouts
    settings = {key: {"families": families_of(key), **keys} for key, keys in LAYOUTS.items()}
    save_layouts(two_updates, settings, *sys.argv[1:])
