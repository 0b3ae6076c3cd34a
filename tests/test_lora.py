"""Compares LoRA with the plain model and with a training loop on peft, and the base in 4 bits with
LoRA on a model whose weights are those that 4 bits can say, its layer with that of bitsandbytes.

test_worker.py tests the layouts, test_checkpoint.py the moves between layouts, test_trainer.py,
test_examples.py and test_special_models.py whole runs, test_exact.py equal bits of an engine that
applies adapters, test_memory_plan.py the memory.
"""

import sys
from functools import partial

import bitsandbytes
import pytest
import torch
from common import SPECIAL, launch, make_critic, make_model
from engine_contract import check_logps, play
from packaging.version import Version
from parity import (
    MAX_GRAD_NORM,
    SMALL_BUDGET,
    assert_equal_steps,
    full_weights,
    make_batch,
    make_worker,
    plain_scores,
    policy_loss,
    save_layouts,
    two_steps,
    value_loss,
)
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl2.config.rules import TORCH_OF_4_BITS
from rl2.engine.base import EngineSettings
from rl2.engine.local import LocalEngine
from rl2.model.nf4 import Nf4Linear, dequantize, quantize
from rl2.run.weights_hash import hash_weights

SIZES = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 16}  # that 4 bits fit


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


@pytest.mark.parametrize("dtype, bias", [(torch.float32, False), (torch.bfloat16, True)])
def test_the_layer_is_that_of_bitsandbytes(dtype, bias):
    """Output and gradient of the input, to the bit."""
    torch.manual_seed(0)
    plain = nn.Linear(192, 40, bias=bias, dtype=dtype).requires_grad_(False)
    layer = Nf4Linear(plain)
    layer.weight.copy_(quantize(plain.weight))
    expected = bitsandbytes.nn.Linear4bit(
        192, 40, bias, compute_dtype=dtype, compress_statistics=False, quant_type="nf4"
    )
    expected.weight = bitsandbytes.nn.Params4bit(
        plain.weight.clone(), requires_grad=False, compress_statistics=False, quant_type="nf4"
    )
    if bias:
        expected.bias = nn.Parameter(plain.bias.clone(), requires_grad=False)
    expected.to("cpu")  # which quantises
    assert layer.weight.nbytes == 40 * 192 * 9 // 16
    results = []
    for part in (layer, expected):
        x = torch.randn(7, 192, dtype=dtype, generator=torch.Generator().manual_seed(1))
        x.requires_grad_()
        y = part(x)
        y.square().sum().backward()
        results.append((y, x.grad))
    for actual, wanted in zip(*results, strict=True):
        assert torch.equal(actual, wanted)
        assert actual.abs().max() > 0


def test_a_shard_of_rows_has_the_blocks_of_the_whole():
    torch.manual_seed(0)
    weight = torch.randn(5, 128)
    whole = quantize(weight)
    assert torch.equal(torch.cat([quantize(weight[:2]), quantize(weight[2:])]), whole)
    values = dequantize(whole, torch.float32)
    assert torch.equal(torch.cat([dequantize(x, torch.float32) for x in whole.split(1)]), values)
    # The largest of a block is a value of its own, and the others are off by a seventh of it.
    assert (weight - values).abs().max() < 0.16 * weight.abs().max()
    assert torch.equal(quantize(values), whole), "what 4 bits can say stays as it is"


@pytest.fixture
def torch_of_4_bits():
    if Version(torch.__version__) < Version(TORCH_OF_4_BITS):
        pytest.skip("a rule of the config asks for a later torch")


@pytest.fixture
def make_nf4(torch_of_4_bits, tmp_path, device):
    name = make_model(tmp_path / "model", "qwen3", **SIZES)
    make_critic(name)
    settings = {"lora_rank": 3, "lr": 1e-2, "quantize_base": "nf4"}
    return partial(make_worker, name=name, device=device, **settings)


def rounded_model(worker, folder) -> str:
    """The folder of the dequantised base of `worker`, which has not been updated."""
    tokenizer = AutoTokenizer.from_pretrained(worker.config.model_name.removesuffix("-critic"))
    worker.export(str(folder), tokenizer)
    return str(folder)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_training_equals_lora_on_the_dequantised_base(make_nf4, tmp_path, checkpointing):
    """Scores, updates, weights and the reference, to the bit: only the storage differs."""
    batch = make_batch()
    settings = {"gradient_checkpointing": checkpointing}
    worker = make_nf4(**settings)
    quantized = rounded_model(worker, tmp_path / "rounded")
    plain = make_nf4(name=quantized, quantize_base=None, **settings)
    assert hash_weights({"actor": worker}) == hash_weights({"actor": plain})
    reference = worker.reference().score(batch, 0.9).logps
    assert torch.equal(reference, make_nf4(num_updates=0, name=quantized).score(batch, 0.9).logps)
    original = make_nf4(num_updates=0).score(batch, 0.9).logps
    assert (reference - original).abs().max() > 0.01, "nothing was quantised"
    for _ in range(3):
        updates = [x.update(batch, policy_loss, 0.9, with_entropy=True) for x in (worker, plain)]
        assert updates[0] == updates[1]
    assert hash_weights({"actor": worker}) == hash_weights({"actor": plain})
    resumed = make_nf4(**settings)
    resumed.load_state_dict(worker.state_dict())
    assert hash_weights({"actor": resumed}) == hash_weights({"actor": worker})
    logps = worker.score(batch, 0.9).logps
    assert torch.equal(logps, plain.score(batch, 0.9).logps)
    assert (logps - reference).abs().max() > 0.1
    assert torch.equal(worker.reference().score(batch, 0.9).logps, reference)
    weights, expected = full_weights(worker), full_weights(plain)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[key], expected[key]) for key in weights)


def test_what_is_stored_in_4_bits(make_nf4, capsys):
    """The linear layers, with and without adapters; not embedding, norms and head."""
    worker = make_nf4(lora_targets=["q_proj"], dtype="bfloat16")
    assert "14 linear layers of the base are stored in nf4" in capsys.readouterr().out
    parameters = dict(worker.model.named_parameters())
    stored = {key for key, value in parameters.items() if value.dtype == torch.uint8}
    assert len(stored) == 2 * 7 and all("proj" in key for key in stored)
    rest = parameters.keys() - stored
    assert {parameters[key].dtype for key in rest - worker.trained_parameters.keys()} == {
        torch.bfloat16
    }
    kept = worker.state_dict()["model"]
    assert kept.keys() == worker.trained_parameters.keys(), "a checkpoint holds the base"
    assert all(".lora_" in key for key in kept)


def test_a_critic_in_4_bits_and_an_export(make_nf4, tmp_path):
    """The critic learns its head; the export has the dequantised base with the adapters."""
    batch = make_batch()
    critic = make_nf4(critic=True)
    losses = [critic.update(batch, value_loss).loss for _ in range(5)]
    assert losses[-1] < losses[0]
    actor = make_nf4()
    base = rounded_model(actor, tmp_path / "rounded")
    actor.update(batch, policy_loss, with_entropy=True)
    actor.export(str(tmp_path / "export"), AutoTokenizer.from_pretrained(actor.config.model_name))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    assert not hasattr(merged.config, "quantization_config")
    on_rounded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(on_rounded, tmp_path / "export/adapter")
    with torch.no_grad():
        logits = adapted(batch.inputs).logits
        torch.testing.assert_close(merged(batch.inputs).logits, logits, rtol=0, atol=2e-5)


def test_models_that_4_bits_do_not_fit_are_told(make_nf4, tmp_path):
    narrow = make_model(tmp_path / "narrow", hidden_size=96, head_dim=16)
    with pytest.raises(ValueError, match="q_proj has rows of 96 weights, which blocks of 64"):
        make_nf4(name=narrow)
    experts = make_model(tmp_path / "experts", "gpt_oss", **SPECIAL["gpt_oss"], **SIZES)
    with pytest.raises(ValueError, match="one tensor of all experts.*leave the key out"):
        make_nf4(name=experts)


# Of three processes, which cut the 16 rows of k_proj unevenly.
LAYOUTS = {"fsdp": {}, "copies": {"critic": True, "fsdp_size": 1}, "sp": {"sp_size": 3}}


def two_updates(name, critic=False, **changes):
    settings = {"max_length_per_device": SMALL_BUDGET, "gradient_checkpointing": 1, **changes}
    adapters = {"lora_rank": 3, "quantize_base": "nf4"}
    return two_steps(name, critic, torch.device("cpu"), make_batch(), **adapters, **settings)


def test_every_layout_equals_one_process(torch_of_4_bits, tmp_path, device):
    name = make_model(tmp_path / "model", "qwen3", **SIZES, num_key_value_heads=1)
    make_critic(name)
    expected = {critic: two_updates(name, critic) for critic in (False, True)}
    launch(3, __file__, name, tmp_path / "out")
    for layout, result in torch.load(tmp_path / "out").items():
        assert_equal_steps(result, expected["critic" in LAYOUTS[layout]], layout, 2e-5, 1e-5)


if __name__ == "__main__":  # a process of the test of layouts
    save_layouts(two_updates, LAYOUTS, *sys.argv[1:])
