"""Answers of the engine with models that have windows, sinks, caps, a biased head or recurrent
layers, and the attention hook.
"""

import pytest
import torch
from common import RECURRENT, SPECIAL, WINDOWED, make_model
from engine_contract import plain_logps, play
from transformers import AutoModelForCausalLM, GPT2Config

from rl2.attention.kernels import _hook
from rl2.attention.ring import PackedAttention
from rl2.engine.base import EngineSettings
from rl2.engine.cache import DenseKVCache, KVCache
from rl2.engine.local import LocalEngine

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=[*WINDOWED, *SPECIAL, *RECURRENT])
def name(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / request.param
    return make_model(folder, request.param, **(WINDOWED | SPECIAL | RECURRENT)[request.param])


@pytest.mark.parametrize(
    ("deterministic", "kind"),
    [(True, KVCache), (False, KVCache), (False, DenseKVCache)],
)
def test_answers_of_the_engine_have_the_logps_of_transformers(
    name, monkeypatch, deterministic, kind
):
    """Prompts and answers are longer than the window and than a page of the cache."""
    monkeypatch.setattr(LocalEngine, "_new_cache", lambda e: kind(e.max_running_requests))
    settings = EngineSettings(
        name, torch.float32, CPU, max_running_requests=3, deterministic=deterministic
    )
    engine = LocalEngine(settings)
    plain = AutoModelForCausalLM.from_pretrained(name)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 98, (n,), generator=generator).tolist() for n in (1, 4, 40, 90)]
    generations = play(engine, prompts, max_new_tokens=40)
    for prompt, out in zip(prompts, generations, strict=True):
        expected = plain_logps(plain, prompt, out.tokens, 1.0)
        torch.testing.assert_close(torch.tensor(out.logps), expected, rtol=0, atol=1e-4)
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_requests_change_no_bit_when_deterministic(name, dtype):
    if name.endswith(("gpt_oss", "nemotron_h", "qwen3_next")):
        pytest.skip("how many rows share an expert's product depends on the other requests")
    engine = LocalEngine(EngineSettings(name, dtype, CPU, max_running_requests=3))
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 98, (n,), generator=generator).tolist() for n in (3, 100, 5, 40)]
    seeds = [(3, i) for i in range(4)]
    together = play(engine, prompts, seeds, max_new_tokens=32)
    for number in (1, 3):  # the longest, and the one that waits for a place
        (alone,) = play(engine, [prompts[number]], [seeds[number]], max_new_tokens=32)
        expected = together[number]
        assert (alone.tokens, alone.logps) == (expected.tokens, expected.logps)
    engine.close()


class Attention(torch.nn.Module):
    """Stands for the attention module of a Hugging Face model."""

    is_causal = True


def call_hook(mask=None, **keywords):
    heads = torch.randn(1, 2, 5, 8)
    attend = PackedAttention([[(5, 0)]], [], CPU)
    out, weights = _hook(Attention(), heads, heads, heads, mask, attend=attend, **keywords)
    assert weights is None
    return out


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"position_bias": torch.zeros(1), "block_table": 1.0}, "position_bias, block_table"),
        ({"is_causal": False}, "is_causal=False"),
        ({"mask": torch.zeros(1, 1, 5, 5)}, "attention_mask"),
        ({"dropout": 0.1}, "dropout=0.1"),
    ],
)
def test_the_hook_refuses_what_it_does_not_compute(keywords, message):
    with pytest.raises(ValueError, match=f"Attention asks for {message}"):
        call_hook(**keywords)


def test_the_hook_accepts_what_is_harmless():
    torch.manual_seed(0)
    plain = call_hook(scaling=8**-0.5)
    torch.manual_seed(0)
    with_keywords = call_hook(
        scaling=None,  # means 1 / sqrt(head size)
        dropout=0.0,
        position_ids=torch.arange(5)[None],
        use_cache=False,
        output_attentions=False,
        is_causal=True,
        s_aux=None,
    )
    assert torch.equal(plain, with_keywords)


def test_a_model_that_asks_for_dropout_is_refused():
    """The keyword is that of the installed transformers."""
    config = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=98)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="rl2").train()
    attend = PackedAttention([[(5, 0)]], [], CPU)
    with pytest.raises(ValueError, match="asks for dropout"):
        model.base_model(torch.arange(5)[None], use_cache=False, attend=attend)
