"""Answers of the engine with models that have windows, sinks, caps, a biased head or recurrent
layers, and the attention hook.
"""

import pytest
import torch
from common import RECURRENT, SPECIAL, WINDOWED, make_model
from engine_contract import check_logps, play
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
    ("dtype", "kind"),
    [(torch.float32, KVCache), (torch.float32, DenseKVCache), (torch.bfloat16, KVCache)],
)
def test_answers_have_the_logps_of_transformers_and_the_bits_of_those_alone(
    name, monkeypatch, dtype, kind
):
    """Prompts and answers are longer than the window and than a page of the cache."""
    monkeypatch.setattr(LocalEngine, "_new_cache", lambda e: kind(e.max_running_requests))
    deterministic = kind is KVCache
    settings = EngineSettings(name, dtype, CPU, max_running_requests=3, deterministic=deterministic)
    engine = LocalEngine(settings)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 98, (n,), generator=generator).tolist() for n in (1, 100, 5, 40)]
    together = play(engine, prompts, max_new_tokens=32)
    if dtype == torch.float32:
        check_logps(together, prompts, AutoModelForCausalLM.from_pretrained(name), 1.0)
    # How many rows share an expert's product depends on the other requests.
    if deterministic and not name.endswith(("gpt_oss", "nemotron_h", "qwen3_next")):
        for number in (1, 3):  # the longest, and the one that waits for a place
            (alone,) = play(engine, [prompts[number]], [(0, number)], max_new_tokens=32)
            expected = together[number]
            assert (alone.tokens, alone.logps) == (expected.tokens, expected.logps)
    engine.close()


@pytest.mark.parametrize(
    ("mask", "keywords", "message"),
    [
        (None, {"position_bias": 1, "block_table": 1.0}, "position_bias, block_table"),
        (None, {"is_causal": False}, "is_causal=False"),
        (torch.zeros(1, 1, 5, 5), {}, "attention_mask"),
    ],
)
def test_the_hook_refuses_what_it_does_not_compute(mask, keywords, message):
    heads = torch.randn(1, 2, 5, 8)
    attend = PackedAttention([[(5, 0)]], [], CPU)
    with pytest.raises(ValueError, match=f"asks for {message}"):
        _hook(torch.nn.Identity(), heads, heads, heads, mask, attend=attend, **keywords)


def test_a_model_that_asks_for_dropout_is_refused():
    """The keyword is that of the installed transformers."""
    config = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=98)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="rl2").train()
    attend = PackedAttention([[(5, 0)]], [], CPU)
    with pytest.raises(ValueError, match="asks for dropout"):
        model.base_model(torch.arange(5)[None], use_cache=False, attend=attend)
