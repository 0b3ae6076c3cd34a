"""Compares a model whose elementwise parts are compiled with the same model as it is."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from common import CONFIGS, launch, make_model, make_samples
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModelForCausalLM

from rl2.attention.ring import Ring
from rl2.batch import collate
from rl2.model import fused
from rl2.model import head as head_module
from rl2.model.token_model import TokenModel
from rl2.packing import pack, zigzag

SIZES = {
    "vocab_size": 98,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}


@pytest.fixture(autouse=True)
def nothing_is_compiled_yet():
    """Compiled functions are kept as long as the process lives."""
    fused.compiled.cache_clear()
    fused._with_compiled_rotary.cache_clear()
    torch._dynamo.reset()


def use_backend(monkeypatch, backend):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))


def make_pair(family, dtype=torch.float32):
    """The same random model twice: as it is, and with compiled parts."""
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(
        CONFIGS[family](**SIZES), attn_implementation="rl2", dtype=dtype
    )
    return TokenModel(deepcopy(hf), Ring()), TokenModel(hf, Ring(), compile=True)


def run(model, seed):
    """Scores of a pack whose length depends on `seed`, and the gradients of all weights."""
    samples = make_samples(seed=seed, num_groups=2, longest=8 + 9 * seed)
    model.zero_grad()
    scores = model(zigzag(pack(collate(samples)), 1, 0), 0.9, with_entropy=True)
    weights = torch.linspace(-1.0, 2.0, len(scores.logps))
    ((scores.logps + 0.1 * scores.entropy) * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return scores.logps.detach(), scores.entropy.detach(), gradients


def check_equal(plain, compiled_model, seed):
    logps, entropy, gradients = run(plain, seed)
    actual_logps, actual_entropy, actual_gradients = run(compiled_model, seed)
    torch.testing.assert_close(actual_logps, logps, rtol=0, atol=1e-5)
    torch.testing.assert_close(actual_entropy, entropy, rtol=0, atol=1e-5)
    for name, gradient in gradients.items():
        error = (actual_gradients[name] - gradient).norm()
        assert error <= 1e-5 * gradient.norm() + 1e-6, name


@pytest.mark.parametrize("family", ["qwen3", "phi3"])
def test_packs_of_all_lengths_share_a_compilation(monkeypatch, family):
    """Norms, rotary positions, gates and the head, with small chunks of the vocabulary."""
    counter = CompileCounterWithBackend("aot_eager")
    use_backend(monkeypatch, counter)
    plain, compiled_model = make_pair(family)
    check_equal(plain, compiled_model, 0)
    after_first_pack = counter.frame_count
    assert after_first_pack == (6 if family == "qwen3" else 5)  # norms of heads have one more axis
    monkeypatch.setitem(head_module.LOGITS_PER_CHUNK, "cpu", 40 * 64)
    for seed in range(1, 5):
        check_equal(plain, compiled_model, seed)
    assert counter.frame_count == after_first_pack


def test_layouts_train_the_same_with_compiled_parts(tmp_path):
    """Tensor parallelism, a ring with FSDP and adapters, gradient checkpointing."""
    launch(2, "tests/fused_layouts.py", make_model(tmp_path, "qwen3", tied=False))
