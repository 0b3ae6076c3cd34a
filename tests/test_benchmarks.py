"""Benchmarks that train: their keys are valid, and no question is both trained and held out."""

import re
import sys
import types

from common import ROOT, read_jsonl

sys.path.insert(0, str(ROOT / "benchmarks/lab"))
import dither_offline
import learning
import lora
import tool_use
import word_problems

from rl2.config.parse import parse
from rl2.config.schema import PPOConfig
from rl2.env.load import load_env


def test_the_keys_of_each_algorithm_are_a_config(tmp_path):
    """Keys that have no effect, and values outside their range, would be refused."""
    (tmp_path / "rows.jsonl").write_text("{}")
    common = [f"data.path={tmp_path / 'rows.jsonl'}", "actor.model_name=owner/model"]
    common.append("rollout.env_path=gsm8k")
    common += [f"actor.update_per_rollout={learning.UPDATES}", "trainer.disable_wandb=true"]
    common.append(f"rollout.train_sampling_params.max_new_tokens={learning.LONGEST}")
    configs = {}
    for name, keys in learning.ALGORITHMS.items():
        configs[name] = parse(PPOConfig, [*common, *keys])
    assert configs["DAPO"].rollout.filter == [0, 1] and configs["DAPO"].actor.clip_high == 0.28
    assert configs["GRPO, K=2"].actor.epochs_per_rollout == 2
    assert configs["PPO"].adv.estimator == "gae"
    for keys in lora.KINDS.values():
        parse(PPOConfig, [*common, *keys])


def test_the_sums_reward_the_right_number_and_a_little_its_sign():
    score = load_env(str(ROOT / "benchmarks/lab/sums_env.py")).spec.reward_fns["reward_fn"]

    def parts(reply, answer):
        return score([{"content": reply}], answer)

    assert parts("3 - 7 = -4", "-4") == {"right": 1.0, "sign": 0.1}
    assert parts("3 - 7 = -10", "-4") == {"right": 0.0, "sign": 0.1}
    assert parts("3 - 7 = 4", "-4") == {"right": 0.0, "sign": 0.0}
    assert parts("9 + 8 = 17.", "17") == {"right": 1.0, "sign": 0.1}
    assert parts("7 - 7 = -0", "0") == parts("no number", "0") == {"right": 0.0, "sign": 0.0}


def test_no_question_of_a_task_is_both_trained_and_held_out(tmp_path, monkeypatch):
    """Data sets repeat questions. The stand-in for reasoning-gym draws ten of them a seed."""

    def create_dataset(name, size, seed, **options):
        draws = [(seed + i) % 10 + 10 * (i % 10) for i in range(size)]
        return [{"question": f"{name} {draw}?", "answer": str(draw)} for draw in draws]

    stand_in = types.SimpleNamespace(create_dataset=create_dataset)
    monkeypatch.setitem(sys.modules, "reasoning_gym", stand_in)
    task = learning.TASKS["products"]
    learning.make_data(task, tmp_path)
    rows = {part: read_jsonl(tmp_path / f"{part}.jsonl") for part in ("train", "test")}
    assert (len(rows["train"]), len(rows["test"])) == (task.num_train, task.num_test)
    questions = [row["messages"][-1]["content"] for row in rows["train"] + rows["test"]]
    assert len(set(questions)) == len(questions)
    for row in rows["test"]:
        assert row["messages"][-1]["content"].startswith(f"products {row['answer']}?")


def test_worked_answers_of_word_problems_are_right_and_sets_are_disjoint(tmp_path):
    word_problems.make_data(tmp_path)
    questions = []
    for name, size in word_problems.SIZES.items():
        rows = read_jsonl(tmp_path / f"{name}.jsonl")
        assert len(rows) == size
        questions += [row["messages"][0]["content"] for row in rows]
    assert len(set(questions)) == len(questions)
    for row in read_jsonl(tmp_path / "sft.jsonl"):
        *steps, conclusion = row["messages"][-1]["content"].splitlines()
        assert len(steps) == 2 and conclusion == f"#### {row['answer']}"
        for step in steps:
            formula, _, value = step.partition(" = ")
            assert eval(formula) == int(value) >= 0
        numbers = {int(number) for number in re.findall(r"\d+", row["messages"][0]["content"])}
        used = {int(number) for number in re.findall(r"\d+", " ".join(steps))}
        assert numbers <= used, row


def test_a_rejected_answer_has_the_right_steps_and_a_wrong_last_result(tmp_path):
    dither_offline.make_data(tmp_path)
    pairs = {name: read_jsonl(tmp_path / f"dpo-{name}.jsonl") for name in dither_offline.SIZES}
    questions = [pair["chosen"][0]["content"] for part in pairs.values() for pair in part]
    assert len(set(questions)) == sum(dither_offline.SIZES.values())
    for pair in pairs["train"]:
        chosen, rejected = (pair[name][-1]["content"] for name in ("chosen", "rejected"))
        *steps, last, conclusion = rejected.splitlines()
        formula, _, value = last.partition(" = ")
        assert chosen.startswith("\n".join([*steps, formula]))
        assert eval(formula) != int(value) and conclusion == f"#### {value}"
    held_out = [row["messages"][0]["content"] for row in read_jsonl(tmp_path / "questions.jsonl")]
    assert held_out == [pair["chosen"][0]["content"] for pair in pairs["held_out"]]


def test_no_question_of_the_tool_is_both_trained_and_held_out(tmp_path):
    tool_use.make_data(tmp_path, sft_steps=5)
    questions = []
    for name, size in (("test", 50), ("sft-5", 80), ("rl", 80)):
        rows = read_jsonl(tmp_path / f"{name}.jsonl")
        assert len(rows) == size
        questions += [row["messages"][1]["content"] for row in rows]
        assert all(
            row["messages"][-1]["role"] == ("assistant" if name == "sft-5" else "user")
            for row in rows
        )
    assert len(set(questions)) == len(questions)
