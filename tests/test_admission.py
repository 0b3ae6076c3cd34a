"""Models that rl2 computes as transformers does are trained; all others are refused in words."""

import random
from unittest import mock

import pytest
import torch
from common import ROUTING_BIAS, make_gpt2, make_model, make_routed, make_tokenizer
from families import engine_problem, make_config, read_record, verdict
from parity import full_weights, make_batch, plain_scores, worker_config
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSIFIERS,
)

from rl2.engine.base import EngineSettings
from rl2.engine.local import LocalEngine
from rl2.model import admission
from rl2.model.shrink import shrink
from rl2.parallel.tensor import check_tp_size
from rl2.worker import Worker

# Every worker of another test is admitted too: these are families that no other test trains.
PASS = [
    "gpt2",
    "opt",
    "deepseek_v3",  # keys and values of different head sizes
    "mistral",  # a window in all layers, which its config does not list
    "qwen2 (windows)",
    "phi3 (longrope)",
    "granite (logits_scaling=8)",
    "cohere",
    "nanochat",  # logits capped at 15
    "longcat_flash",  # experts that do nothing, two attentions in a layer
    "llava_next",  # a tower, and a frozen weight beside it
]
ENGINE = ["deepseek_v3", "cohere", "gpt2"]  # of these the embedded engine is tried too
# What is refused, with words of the reason.
REFUSED = {
    "bloom": "log-probabilities are not those of transformers",
    "falcon": "attention interface",
    "bert": "is_causal=False",
    "gemma2": "asks for softcap",
    "mamba": "its config has no num_attention_heads",
    "llama4": "has no body apart from its head",
}


@pytest.mark.parametrize("name", PASS)
def test_families_that_pass(name):
    assert verdict(name) is None
    assert "refused" not in read_record()[name]  # tests/families.json, which docs/models.md shows
    if name in ENGINE:
        assert engine_problem(name) is None
    if CLASSIFIERS.get(make_config(name).model_type):
        assert verdict(name, critic=True) is None


def test_the_engine_refuses_layers_that_attend_twice_when_it_starts(tmp_path):
    """Their second keys took the place of the first ones: log-probabilities were off by 8."""
    assert verdict("diffllama") is None
    config = shrink(AutoModelForCausalLM, make_config("diffllama"))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    settings = EngineSettings(str(tmp_path), torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match="attends more than once in a layer"):
        LocalEngine(settings)


@pytest.mark.parametrize("name", REFUSED)
def test_families_that_are_refused(name):
    assert REFUSED[name] in verdict(name)
    assert REFUSED[name] in read_record()[name]["refused"]


def test_a_model_is_tried_once_and_leaves_the_random_state(tmp_path, device, monkeypatch):
    config = AutoConfig.from_pretrained(make_model(tmp_path / "model"))
    states = [torch.get_rng_state(), random.getstate()]
    find_problem = mock.Mock(wraps=admission.find_problem)
    monkeypatch.setattr(admission, "_verdicts", {})
    monkeypatch.setattr(admission, "find_problem", find_problem)
    for critic in (False, True, False):
        admission.admit("model", config, critic)
    assert find_problem.call_count == 2
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()


def test_a_refused_model_is_named_before_its_weights_are_read(tmp_path, device):
    config = make_config("bloom")
    config.save_pretrained(tmp_path)  # a folder without weights
    with pytest.raises(ValueError, match=rf"model_name={tmp_path} \(bloom\): its log-prob"):
        Worker(worker_config(str(tmp_path)), device, False, 4)


def test_dropout_is_never_active(tmp_path, device, capsys):
    """Else the ratio of two probabilities of a token would be noise: 0.39 of them were clipped."""
    name = make_gpt2(tmp_path / "model")
    worker = Worker(worker_config(name, gradient_checkpointing=True), device, False, 4)
    assert "dropout is off in training (resid_pdrop=0.1," in capsys.readouterr().out
    batch = make_batch()
    before = worker.score(batch).logps

    def loss_fn(rows, scores):
        return (scores.logps * rows.mask).sum(), {}

    plain = AutoModelForCausalLM.from_pretrained(name).eval()
    expected = plain_scores(plain, batch).logps
    torch.testing.assert_close(before, expected, rtol=0, atol=2e-5)
    result = worker.update(batch, loss_fn)
    expected.sum().backward()
    norm = torch.stack([p.grad.norm() for p in plain.parameters()]).norm().item()
    assert result.grad_norm == pytest.approx(norm, rel=1e-4)


def test_buffers_of_the_weights_are_loaded_sent_and_exported(tmp_path, device):
    name = make_routed(tmp_path / "model")
    worker = Worker(worker_config(name, dtype="bfloat16"), device, False, 4)
    stored = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).state_dict()
    key, buffers = ROUTING_BIAS, [key for key in stored if key.endswith("correction_bias")]
    weights = full_weights(worker)
    assert stored[key].abs().min() > 0 and torch.equal(weights[key], stored[key])
    assert weights.keys() == stored.keys()
    engine = LocalEngine(EngineSettings(name, worker.dtype, device))
    engine.verify_weights(worker.iter_full_weights(worker.dtype), 0)
    engine.model.get_buffer(key).zero_()
    with pytest.raises(RuntimeError, match=key):
        engine.verify_weights(worker.iter_full_weights(worker.dtype), 0)
    engine.load_weights(worker.iter_full_weights(worker.dtype), 1)
    engine.verify_weights(worker.iter_full_weights(worker.dtype), 1)
    weights.pop(key)
    for verb in (engine.load_weights, engine.verify_weights):
        with pytest.raises(ValueError, match=f"did not arrive: .*{key}"):
            verb(weights.items(), 2)
    worker.export(str(tmp_path / "export"), make_tokenizer())
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    for key, weight in exported.state_dict().items():
        # What was trained: weights in the dtype of the computation, buffers as they were stored.
        rounded = stored[key] if key in buffers else stored[key].bfloat16().float()
        assert torch.equal(weight, rounded), key


def test_a_tensor_parallel_plan_may_name_the_tied_embedding():
    """transformers 5.15 to 5.20 add it to the plan of every model that ties its embeddings."""
    config = LlamaConfig(num_attention_heads=4, intermediate_size=64, vocab_size=98)
    config.base_model_tp_plan = config.base_model_tp_plan | {"embed_tokens": "embedding_rowwise"}
    check_tp_size("tied", config, 2)
    config.base_model_tp_plan = config.base_model_tp_plan | {"norm": "sequence_parallel"}
    with pytest.raises(ValueError, match="sequence_parallel"):
        check_tp_size("tied", config, 2)
