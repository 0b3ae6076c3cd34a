"""Plugins: the files of examples/plugins/.

Runs of a tiny model name the plugins as the commands in their docstrings do.
"""

import json
import math
import re
import runpy

import pytest
import torch
from common import ROOT, advantage_inputs, launch, make_model, read_jsonl, read_metrics

from rl2.algorithms import losses
from rl2.algorithms.find import find_estimator, find_policy_loss, find_preference_loss

PLUGINS = ROOT / "examples/plugins"


def read_setting(name):
    """(key, value) by which the command in the docstring of a plugin uses it."""
    text = (PLUGINS / f"{name}.py").read_text(encoding="utf-8")
    return re.search(rf"([\w.]+)=(examples/plugins/{name}\.py\S*)", text).groups()


def train(program, tmp_path, rows, *settings):
    """The metrics of one step of the program on the rows, started in the root of the repository."""
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    launch(
        1,
        *program,
        f"data.path={data}",
        f"actor.model_name={make_model(tmp_path / 'tiny')}",
        "actor.dtype=float32",
        "trainer.max_steps=1",
        f"trainer.save_dir={tmp_path}/run",
        *settings,
    )
    [line] = read_metrics(tmp_path / "run")
    return line


def message(role, content):
    return {"role": role, "content": content}


def test_grpo_with_a_loss_an_estimator_and_an_environment(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    names = ("policy_loss", "advantage_estimator", "environment")
    line = train(
        ["-m", "rl2.trainer.ppo"],
        tmp_path,
        [{"messages": [message("user", text)]} for text in ("ab", "cd")],
        *(f"{key}={value}" for key, value in map(read_setting, names)),
        "data.prompts_per_rollout=2",
        "data.responses_per_prompt=2",
        "rollout.max_turns=2",
        "rollout.train_sampling_params.max_new_tokens=8",
    )
    assert line["actor/ratio"] == pytest.approx(1) and line["actor/large_ratio"] == 0
    records = read_jsonl(tmp_path / "run/rollouts/train/step_1.jsonl")
    rewards = [sum(record["rewards"].values()) for record in records]
    mean = sum(rewards) / 4
    assert line["reward/mean"] == pytest.approx(mean)
    for record, reward in zip(records, rewards, strict=True):
        letters = [letter for letter in record["messages"][-1]["content"] if letter.isalpha()]
        assert reward == pytest.approx(sum(map(str.isupper, letters)) / max(1, len(letters)))
        assert record["advantage"] == pytest.approx(reward - mean, abs=1e-6)


def test_the_environment_answers_a_quiet_reply():
    interact = runpy.run_path(str(PLUGINS / "environment.py"))["interact"]
    assert interact([message("assistant", "AB, 1")]) == []
    assert [m["role"] for m in interact([message("assistant", "Ab")])] == ["user"]


def test_a_policy_loss_declares_where_it_vanishes(monkeypatch):
    monkeypatch.chdir(ROOT)
    _, value = read_setting("policy_loss")
    assert find_policy_loss(value).vanishes_without_advantage


def test_dpo_with_a_preference_loss(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    key, value = read_setting("preference_loss")
    prompt = message("user", "ab")
    pair = {
        "chosen": [prompt, message("assistant", "yes")],
        "rejected": [prompt, message("assistant", "no")],
    }
    settings = (f"{key}={value}", "data.batch_size=2", "dpo.beta=0.5")
    line = train(["-m", "rl2.trainer.dpo"], tmp_path, [pair, pair], *settings)
    assert line["actor/loss"] == pytest.approx(1)  # the policy is the reference: the margin is 0
    exponential = find_preference_loss(value).compute
    inputs = losses.PreferenceInputs(torch.tensor([2.0]), torch.zeros(1), 0.5, 0.0)
    assert exponential(inputs).item() == pytest.approx(math.exp(-1))


def test_the_trainer(tmp_path):
    rows = [
        {"messages": [message("user", "a"), message("assistant", "b" * i)]} for i in range(1, 5)
    ]
    line = train([PLUGINS / "trainer.py"], tmp_path, rows, "data.batch_size=4")
    assert line["actor/loss"] > 0 and line["actor/grad_norm"] > 0
    assert (tmp_path / "run/model/config.json").exists()


def test_functions_of_a_users_file(monkeypatch):
    """tests/cases/my_algorithms.py, by its definition."""
    monkeypatch.chdir(ROOT / "tests/cases")
    rewards = torch.tensor([[0.0, 1], [0, 3], [0, 5], [0, 100], [0, 7], [0, 8]])
    mask = torch.tensor([[1.0, 1], [1, 1], [1, 1], [0, 0], [0, 1], [1, 1]])
    group = torch.tensor([0, 0, 0, 0, 1, 1])
    estimator = find_estimator("my_algorithms.py:opo")
    assert estimator.needs == ("rewards", "group")
    advantages = estimator.compute(advantage_inputs(mask, rewards, group))
    # Three answers of two tokens, then one of a token and one of two: (7 + 2 * 8) / 3.
    expected = [1 - 3, 3 - 3, 5 - 3, 0, 7 - 23 / 3, 8 - 23 / 3]
    assert advantages[:, 1].tolist() == pytest.approx(expected)
    assert advantages[4, 0] == 0

    logps = torch.tensor([[-1.0, -2]], requires_grad=True)
    inputs = losses.PolicyInputs(
        logps=logps,
        old_logps=torch.tensor([[-2.0, -2]]),
        advantages=torch.tensor([[1.0, -1]]),
        mask=torch.ones(1, 2),
        clip=0.2,
        clip_high=0.2,
    )
    weights = torch.full((1, 2), 0.5)
    token_losses = find_policy_loss("my_algorithms.py:unclipped").compute
    loss, metrics = losses.policy_loss(token_losses, inputs, weights)
    loss.backward()
    e = torch.tensor(1.0).exp().item()
    assert loss.item() == pytest.approx((1 - e) / 2)
    assert logps.grad[0].tolist() == pytest.approx([-e / 2, 0.5])
    assert metrics["large_ratio"] == 0.5 and metrics["approx_kl"] > 0
