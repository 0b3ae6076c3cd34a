"""The roofline of a step, and the split of processes that `rl2 plan` makes with it."""

import random
import re

import pytest
from common import CONFIGS
from transformers import Qwen3MoeConfig

from rl2.config.schema import PPOConfig
from rl2.tools import plan
from rl2.tools.split import describe_times
from rl2.tools.step_time import (
    MATMUL_FLOPS,
    MEMORY_BYTES,
    ModelCosts,
    Rollout,
    count_costs,
    log_normal_lengths,
    sampling_seconds,
    training_seconds,
)

# Reading its weights takes so much longer than all else that only decoding steps count.
HEAVY = ModelCosts(weights=10**12, active_weights=1, num_layers=1, kv_numbers=0, attention_flops=0)
STEP = 2 * 10**12 / MEMORY_BYTES  # seconds of a decoding step


def test_costs_of_a_model_are_counted_from_its_config():
    config = CONFIGS["qwen3"](
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=1000,
        tie_word_embeddings=False,
    )
    costs = count_costs(config)
    attention = 64 * 32 * (4 + 2 + 2 + 4) + 2 * 32  # q, k, v, o, and the norms of q and k
    layer = attention + 3 * 64 * 128 + 2 * 64
    assert costs.weights == costs.active_weights == 3 * layer + 64 + 64 * 1000
    assert costs.kv_numbers == 3 * 2 * 2 * 32
    assert costs.attention_flops == 3 * 4 * 4 * 32
    config.tie_word_embeddings = True
    assert count_costs(config) == costs


def test_only_the_chosen_experts_cost_flops():
    config = Qwen3MoeConfig(
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        vocab_size=1000,
    )
    costs = count_costs(config)
    assert costs.weights - costs.active_weights == 2 * 6 * 3 * 64 * 32


def sample(lengths, num_gpus=1, tp_size=1, max_running=256, costs=HEAVY):
    return sampling_seconds(costs, Rollout(0, 1, lengths), num_gpus, tp_size, max_running)


def test_decoding_takes_a_step_for_each_token_of_the_longest_answer():
    assert sample([3, 9, 5]) == pytest.approx(9 * STEP)
    assert sample([3, 9, 5], max_running=1) == pytest.approx(17 * STEP)
    assert sample([3, 9, 5], max_running=2) == pytest.approx(9 * STEP)  # 5 begins after 3
    assert sample([9, 3, 9], num_gpus=2) == pytest.approx(9 * STEP)
    assert sample([4, 4], num_gpus=2, tp_size=2) == pytest.approx(2 * STEP, rel=1e-3)


def test_keys_of_earlier_tokens_are_read():
    costs = ModelCosts(0, 1, num_layers=1, kv_numbers=10**9, attention_flops=0)
    one = 2 * 10**9 / MEMORY_BYTES
    prompt = Rollout(100, 2, [10, 20])
    expected = one * (2 * 10 * 105 + 10 * 115)  # both answers, then the longer one alone
    assert sampling_seconds(costs, prompt, 1, 1, 256) == pytest.approx(expected)
    in_turn = one * (10 * 105 + 20 * 110)
    assert sampling_seconds(costs, prompt, 1, 1, 1) == pytest.approx(in_turn)


def test_training_takes_six_flops_a_weight_and_token():
    costs = ModelCosts(10**9, 10**9, num_layers=1, kv_numbers=0, attention_flops=0)
    rollout = Rollout(100, 2, [50, 150, 200, 100])  # two prompts, which are computed once
    one = 700 * 10**9 / MATMUL_FLOPS
    assert training_seconds([], [(costs, 1)], rollout, 1, False) == pytest.approx(6 * one)
    assert training_seconds([], [(costs, 1)], rollout, 4, True) == pytest.approx(2 * one)
    both = training_seconds([costs], [(costs, 2), (costs, 1)], rollout, 1, False)
    assert both == pytest.approx((2 + 3 * 6) * one)


def test_lengths_have_their_median_and_a_long_tail():
    for rng in (None, random.Random(3)):
        lengths = sorted(log_normal_lengths(1001, 500, 0.8, 2000, rng))
        assert lengths[500] == pytest.approx(500, rel=0.01 if rng is None else 0.1)
        assert lengths[-1] == 2000 and lengths[840] == pytest.approx(500 * 2.2255, rel=0.15)


def make_config(tmp_path, **sizes):
    config = CONFIGS["qwen3"](
        **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8, **sizes}
    )
    config.save_pretrained(tmp_path / "model")
    made = PPOConfig()
    made.actor.model_name = str(tmp_path / "model")
    made.actor.gradient_checkpointing = False
    made.critic.model_name = None
    return made


def read_splits(lines):
    found = re.findall(
        r"num_processes=(\d+)(, the fastest)?.*? ([\d.]+) s a step", "\n".join(lines)
    )
    return {int(num): (bool(fastest), float(seconds)) for num, fastest, seconds in found}


def test_the_split_is_the_fastest_of_those_that_the_layout_allows(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    config = make_config(tmp_path, num_key_value_heads=8)
    config.data.responses_per_prompt = 64
    config.rollout.train_sampling_params.max_new_tokens = 4000
    seconds = {}
    for num in range(1, 8):
        config.rollout.num_processes = num
        splits = read_splits(describe_times(config, 8, prompt=500, answer=200))
        seconds[num] = splits[num][1]
        [fastest] = [num for num, (is_fastest, _) in splits.items() if is_fastest]
    assert seconds[fastest] == min(seconds.values())
    assert seconds[1] > seconds[fastest] < seconds[7], "there is nothing to balance"
    config.rollout.num_processes = 0
    config.actor.tp_size = 4
    assert read_splits(describe_times(config, 8, None, None)).keys() == {4}


def test_longer_answers_need_more_processes_that_sample(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    config = make_config(tmp_path)
    config.rollout.train_sampling_params.max_new_tokens = 10_000
    [few] = read_splits(describe_times(config, 8, prompt=3000, answer=20))
    [many] = read_splits(describe_times(config, 8, prompt=20, answer=3000))
    assert few < many


def test_the_command_prints_the_split(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "1")  # which the command sets
    config = make_config(tmp_path, num_hidden_layers=2, vocab_size=1000)
    words = [f"actor.model_name={config.actor.model_name}", "--gpus", "2", "--answer-tokens", "77"]
    monkeypatch.setattr("sys.argv", ["rl2 plan", *words])
    with pytest.raises(SystemExit) as ended:
        plan.main()
    printed = capsys.readouterr().out
    assert ended.value.code == 0 and "more than 77" in printed
    assert read_splits([printed]).keys() == {1}
