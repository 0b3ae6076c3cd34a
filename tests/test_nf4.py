"""The base in 4 bits: the layer against that of bitsandbytes, and a worker against LoRA on a model
whose weights are those that 4 bits can say.

test_memory_plan.py tests the memory, test_special_models.py a whole run.
"""

import sys

import bitsandbytes
import pytest
import torch
from common import SPECIAL, launch, make_critic, make_model
from parity import (
    SMALL_BUDGET,
    assert_equal_steps,
    full_weights,
    make_batch,
    make_worker,
    policy_loss,
    save_layouts,
    two_steps,
    value_loss,
)
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl2.model.nf4 import Nf4Linear, dequantize, quantize
from rl2.run.weights_hash import hash_weights

SIZES = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 16}


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
def make(tmp_path, device):
    name = make_model(tmp_path / "model", "qwen3", **SIZES)
    make_critic(name)

    def make(name=name, **changes):
        settings = {"lora_rank": 3, "lr": 1e-2, "quantize_base": "nf4", **changes}
        return make_worker(name, device, **settings)

    return make


def rounded_model(worker, folder) -> str:
    """The folder of the dequantised base of `worker`, which has not been updated."""
    tokenizer = AutoTokenizer.from_pretrained(worker.config.model_name.removesuffix("-critic"))
    worker.export(str(folder), tokenizer)
    return str(folder)


@pytest.mark.parametrize("checkpointing", [True, False])
def test_training_equals_lora_on_the_dequantised_base(make, tmp_path, checkpointing):
    """Scores, updates, weights and the reference, to the bit: only the storage differs."""
    batch = make_batch()
    settings = {"gradient_checkpointing": checkpointing}
    worker = make(**settings)
    quantized = rounded_model(worker, tmp_path / "rounded")
    plain = make(name=quantized, quantize_base=None, **settings)
    assert hash_weights({"actor": worker}) == hash_weights({"actor": plain})
    reference = worker.reference().score(batch, 0.9).logps
    assert torch.equal(reference, make(num_updates=0, name=quantized).score(batch, 0.9).logps)
    original = make(num_updates=0).score(batch, 0.9).logps
    assert (reference - original).abs().max() > 0.01, "nothing was quantised"
    for _ in range(3):
        updates = [x.update(batch, policy_loss, 0.9, with_entropy=True) for x in (worker, plain)]
        assert updates[0] == updates[1]
    assert hash_weights({"actor": worker}) == hash_weights({"actor": plain})
    resumed = make(**settings)
    resumed.load_state_dict(worker.state_dict())
    assert hash_weights({"actor": resumed}) == hash_weights({"actor": worker})
    logps = worker.score(batch, 0.9).logps
    assert torch.equal(logps, plain.score(batch, 0.9).logps)
    assert (logps - reference).abs().max() > 0.1
    assert torch.equal(worker.reference().score(batch, 0.9).logps, reference)
    weights, expected = full_weights(worker), full_weights(plain)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[key], expected[key]) for key in weights)


def test_what_is_stored_in_4_bits(make, capsys):
    """The linear layers, with and without adapters; not embedding, norms and head."""
    worker = make(lora_targets=["q_proj"], dtype="bfloat16")
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


def test_a_critic_and_its_export(make, tmp_path):
    """The critic learns its head; the export has the dequantised base with the adapters."""
    batch = make_batch()
    critic = make(critic=True)
    losses = [critic.update(batch, value_loss).loss for _ in range(5)]
    assert losses[-1] < losses[0]
    actor = make()
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


def test_models_that_4_bits_do_not_fit_are_told(make, tmp_path):
    narrow = make_model(tmp_path / "narrow", hidden_size=96, head_dim=16)
    with pytest.raises(ValueError, match="q_proj has rows of 96 weights, which blocks of 64"):
        make(name=narrow)
    experts = make_model(tmp_path / "experts", "gpt_oss", **SPECIAL["gpt_oss"], **SIZES)
    with pytest.raises(ValueError, match="one tensor of all experts.*leave the key out"):
        make(name=experts)


# Of three processes, which cut the 16 rows of k_proj unevenly.
LAYOUTS = {"fsdp": {}, "copies": {"critic": True, "fsdp_size": 1}, "sp": {"sp_size": 3}}


def two_updates(name, critic=False, **changes):
    settings = {"max_length_per_device": SMALL_BUDGET, "gradient_checkpointing": 1, **changes}
    adapters = {"lora_rank": 3, "quantize_base": "nf4"}
    return two_steps(name, critic, torch.device("cpu"), make_batch(), **adapters, **settings)


def test_every_layout_equals_one_process(tmp_path, device):
    name = make_model(tmp_path / "model", "qwen3", **SIZES, num_key_value_heads=1)
    make_critic(name)
    expected = {critic: two_updates(name, critic) for critic in (False, True)}
    launch(3, __file__, name, tmp_path / "out")
    for layout, result in torch.load(tmp_path / "out").items():
        assert_equal_steps(result, expected["critic" in LAYOUTS[layout]], layout, 2e-5, 1e-5)


if __name__ == "__main__":  # a process of the test of layouts
    save_layouts(two_updates, LAYOUTS, *sys.argv[1:])
