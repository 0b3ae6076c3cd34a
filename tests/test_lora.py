"""Compares LoRA in one process with the plain model and with a training loop on peft.

test_worker.py tests the layouts, test_checkpoint.py the moves between layouts, test_trainer.py and
test_examples.py whole runs, test_exact.py equal bits of an engine that applies adapters.
"""

from functools import partial

import pytest
import torch
from common import make_critic, make_model
from engine_contract import check_logps, play
from parity import (
    MAX_GRAD_NORM,
    full_weights,
    make_batch,
    make_worker,
    plain_scores,
    policy_loss,
    value_loss,
)
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl2.engine.base import EngineSettings
from rl2.engine.local import LocalEngine


@pytest.fixture
def make(tmp_path, device):
    name = make_model(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(name)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[:, ::2] = -0.0
    model.save_pretrained(name)
    make_critic(name)

    return partial(make_worker, name, device, lora_rank=3, lr=1e-2)


def full_parameters(worker):
    parameters = worker.model.named_parameters()
    return {key: parameter.detach().full_tensor().clone() for key, parameter in parameters}


def test_training_starts_from_the_model_and_the_reference_stays_it(make):
    """This also holds in bf16. The frozen weights are then in bf16 only, so none exists twice."""
    batch = make_batch()
    norms = []
    for dtype in ("float32", "bfloat16"):
        worker = make(dtype=dtype, gradient_checkpointing=True)
        plain = make(dtype=dtype, num_updates=0)
        expected = plain.score(batch, 0.9).logps
        plain_weights = dict(plain.iter_full_weights(worker.dtype))
        for key, weight in worker.iter_full_weights(worker.dtype):
            bits, plain_bits = (x.view(torch.uint8) for x in (weight, plain_weights.pop(key)))
            assert torch.equal(bits, plain_bits), f"{key}: engines compare checksums"
        assert not plain_weights
        reference = worker.reference()  # which scores before the worker does
        assert torch.equal(reference.score(batch, 0.9).logps, expected)
        assert torch.equal(worker.score(batch, 0.9).logps, expected)
        start = full_parameters(worker)
        trained = worker.trained_parameters.keys()
        assert {start[key].dtype for key in trained} == {torch.float32}
        assert {start[key].dtype for key in start.keys() - trained} == {worker.dtype}
        norms.append(worker.update(batch, policy_loss, 0.9, with_entropy=True).grad_norm)
        worker.update(batch, policy_loss, 0.9, with_entropy=True)
        for key, parameter in full_parameters(worker).items():
            assert torch.equal(parameter, start[key]) == (key not in trained), key
        trained_logps = worker.score(batch, 0.9).logps
        assert (trained_logps - expected).abs().max() > 0.1
        assert torch.equal(reference.score(batch, 0.9).logps, expected)
        assert torch.equal(worker.score(batch, 0.9).logps, trained_logps)
    assert norms[0] == pytest.approx(norms[1], rel=0.1)


def test_a_critic_trains_its_head_beside_the_adapters(make):
    worker, batch = make(critic=True), make_batch()
    adapters = [key for key in worker.trained_parameters if not key.startswith("hf.score")]
    assert len(adapters) == 2 * 7 * 2  # A and B of 7 matrices in 2 layers
    before = full_weights(worker)
    expected = make(critic=True, num_updates=0).score(batch).values
    assert torch.equal(worker.score(batch).values, expected)
    for _ in range(2):
        worker.update(batch, value_loss)
    for key, weight in worker.iter_full_weights(torch.float32):
        assert torch.equal(weight, before[key]) == ("embed" in key or "norm" in key), key


def test_a_target_that_is_not_there_is_told(make):
    for target in ("q_prj", "lm_head", "embed_tokens", "proj"):
        with pytest.raises(
            ValueError, match=f"called {target}; there are down_proj, gate_proj, k_proj"
        ):
            make(lora_targets=["v_proj", target])
    worker = make(lora_targets=["layers.1.self_attn.q_proj", "o_proj"])
    assert len(worker.trained_parameters) == 2 * 3


def test_updates_are_those_of_peft(make, tmp_path):
    """peft starts from the adapters that are exported before the first update. After the same two
    updates, of which the second trains A too, it scores the same, also what the engine samples.
    """
    batch = make_batch()
    worker = make(lora_alpha=12.0, lora_targets=["q_proj", "down_proj"])
    name = worker.config.model_name
    tokenizer = AutoTokenizer.from_pretrained(name)
    worker.export(str(tmp_path / "start"), tokenizer)
    base = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, tmp_path / "start/adapter", is_trainable=True).eval()
    start = plain_scores(model, batch).logps.detach()
    torch.testing.assert_close(worker.score(batch).logps, start, rtol=0, atol=2e-5)
    trained = [p for key, p in model.named_parameters() if ".lora_" in key]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)
    engine = make_engine(worker)
    prompts = [[5, 6, 7], [8] * 40]
    answers = []
    for version in (1, 2):
        worker.update(batch, policy_loss, with_entropy=True)
        optimizer.zero_grad()
        policy_loss(batch, plain_scores(model, batch))[0].backward()
        torch.nn.utils.clip_grad_norm_(trained, MAX_GRAD_NORM)
        optimizer.step()
        after = plain_scores(model, batch).logps.detach()
        torch.testing.assert_close(worker.score(batch).logps, after, rtol=0, atol=1e-3)
        engine.load_weights(worker.iter_trained_weights(worker.dtype), version)
        answers.append(play(engine, prompts, max_new_tokens=8))
        engine.sleep()
        engine.wake()
    assert (after - start).abs().max() > 0.05
    worker.export(str(tmp_path / "export"), tokenizer)
    base = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    exported = PeftModel.from_pretrained(base, tmp_path / "export/adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    with torch.no_grad():
        logits = exported(batch.inputs).logits
        torch.testing.assert_close(merged(batch.inputs).logits, logits, rtol=0, atol=2e-5)
    check_logps(answers[1], prompts, exported, 1.0)  # no key of a prompt is an old one
    assert [out.logps for out in answers[0]] != [out.logps for out in answers[1]]
    engine.close()


def make_engine(worker, **changes):
    """An engine that applies the worker's adapters. Their values are to come."""
    settings = {"adapters": worker.config, **changes}
    name = worker.config.model_name
    return LocalEngine(EngineSettings(name, worker.dtype, torch.device("cpu"), **settings))


def test_only_adapters_are_sent_and_all_of_them(make):
    worker = make(lora_targets=["q_proj", "down_proj"])
    adapters = dict(worker.iter_trained_weights(torch.float32))
    # A and B of two matrices in two layers: 3 x (in + out) numbers each.
    assert len(adapters) == 2 * 2 * 2
    assert sum(weight.numel() for weight in adapters.values()) == sum(
        weight.numel() for weight in worker.trained_parameters.values()
    )
    engine = make_engine(worker)
    assert engine.version is None, "it would sample with noise"
    engine.load_weights(adapters.items(), 0)
    whole = dict(worker.iter_unmerged_weights(torch.float32))
    assert adapters.keys() < whole.keys()
    engine.verify_weights(whole.items(), 0)
    merged = dict(worker.iter_full_weights(torch.float32))
    last = max(adapters)
    some = {name: weight for name, weight in whole.items() if "layers.0" not in name}
    for weights, words in (
        (merged, "is unknown to"),
        ({name: weight for name, weight in adapters.items() if name != last}, f"1 .*{last}"),
        (some, "weights did not arrive"),
    ):
        with pytest.raises(ValueError, match=words):
            engine.load_weights(weights.items(), 1)
        assert engine.version is None
    engine.load_weights(whole.items(), 1)
    wrong = {**adapters, last: adapters[last] + 1}
    with pytest.raises(RuntimeError, match=f"1 weights of the engine are not the .*{last}"):
        engine.verify_weights(wrong.items(), 1)
    plain = make_engine(worker, adapters=None)
    with pytest.raises(ValueError, match="is unknown to"):
        plain.load_weights(adapters.items(), 1)
    for model in (engine, plain):
        model.close()


def test_an_engine_leaves_the_random_numbers_of_the_trainer(make):
    worker = make()
    before = torch.get_rng_state()
    make_engine(worker).close()
    assert torch.equal(torch.get_rng_state(), before)
