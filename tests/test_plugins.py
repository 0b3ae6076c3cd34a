"""Plugins: the files of examples/plugins/.

Runs of a tiny model name the plugins as the commands in their docstrings do.
"""

import math
import re
import runpy

import pytest
import torch
from common import (
    ROOT,
    advantage_inputs,
    launch,
    make_model,
    policy_inputs,
    preference_inputs,
    read_jsonl,
    read_metrics,
    write_jsonl,
)

from rl2.algorithms.find import find_estimator, find_policy_loss, find_preference_loss

PLUGINS = ROOT / "examples/plugins"


def read_setting(name):
    """(key, value) by which the command in the docstring of a plugin uses it."""
    text = (PLUGINS / f"{name}.py").read_text(encoding="utf-8")
    return re.search(rf"([\w.]+)=(examples/plugins/{name}\.py\S*)", text).groups()


def train(program, tmp_path, rows, *settings):
    """The metrics of one step of the program on the rows, started in the root of the repository."""
    data = tmp_path / "rows.jsonl"
    write_jsonl(data, rows)
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


def find_recent(finder, name):
    return finder(f"{PLUGINS}/recent_losses.py:{name}").compute


def test_recent_losses_by_hand():
    """Rows whose mean log(p_engine / p) is 0.75 and -0.5, with both signs of the advantage."""
    logps = torch.tensor([[-1.0, -1.5], [-1.0, -1.0]]).repeat(2, 1).requires_grad_()
    engine_logps = torch.tensor([[-0.5, -0.5], [-2.0, -1.0]]).repeat(2, 1)
    signs = torch.tensor([1.0, 1, -1, -1])[:, None].expand(4, 2)
    inputs = policy_inputs(
        logps, logps.detach(), signs, torch.ones(4, 2), engine_logps=engine_logps
    )
    sapo = find_recent(find_policy_loss, "sapo")
    values, _ = sapo(inputs)
    assert torch.autograd.grad(values.sum(), logps)[0].equal(-signs)  # as -A rho, at rho = 1
    moved = policy_inputs(logps, logps.detach() - 3, signs, torch.ones(4, 2))
    [gradient] = torch.autograd.grad(sapo(moved)[0].sum(), logps)
    assert gradient.abs().max() < 1e-5  # where -A rho has a gradient of 20

    # p - p_engine is below -0.2 in row 0, and above 0.2 in the first token of row 1.
    values, metrics = find_recent(find_policy_loss, "prime_rl")(inputs)
    moved = (logps - engine_logps).detach()
    ratio = moved.exp()
    cut = torch.tensor([[0, 0], [1, 0], [1, 1], [0, 0]])
    expected = torch.where(cut > 0, 0.0, -signs * ratio) + 1e-3 * moved.square()
    torch.testing.assert_close(values, expected)
    assert metrics["clip_ratio"].int().equal(cut.int())

    positive = find_recent(find_preference_loss, "positive")
    values = positive(preference_inputs(torch.tensor([1.0, 0.0, -1.0, -2.0]), beta=0.5))
    expected = [math.log1p(math.exp(-0.5 * 1)), math.log1p(math.exp(-0.5 * (1 - 5)))]
    assert values.tolist() == pytest.approx(expected)


def test_credit_of_turns_by_hand():
    """Two trajectories of one prompt. The first one has two turns, in rows 0 and 2."""
    mask = torch.tensor([[0.0, 1, 1], [1, 1, 1], [0, 0, 1], [0, 0, 0]])
    rewards = torch.tensor([[0, 0, 2.0], [0, 0, 1], [0, 0, 4], [0, 0, 0]])  # of turns and the end
    trajectory = torch.tensor([0, 1, 0, 2])  # the environment of the last one failed
    inputs = advantage_inputs(mask, rewards, trajectory=trajectory)
    turn_credit = find_estimator(f"{PLUGINS}/turns_and_ages.py:turn_credit").compute
    # To come from turn 1 on: 6 and 1, with the mean 3.5. Only one trajectory has a turn 2.
    expected = [[0, 2.5, 2.5], [-2.5, -2.5, -2.5], [0, 0, 0], [0, 0, 0]]
    assert turn_credit(inputs).tolist() == expected


def test_a_loss_of_ages_by_hand():
    logps = torch.full((1, 3), -1.0)
    ages = torch.tensor([[2.0, 1, 0]])
    aged = find_policy_loss(f"{PLUGINS}/turns_and_ages.py:aged")
    assert aged.needs == ("ages",)
    ones = torch.ones(1, 3)
    values, metrics = aged.compute(policy_inputs(logps, logps, ones, ones, ages=ages))
    assert values[0].tolist() == pytest.approx([-0.81, -0.9, -1.0])
    assert metrics["age"].equal(ages)


ANCHORED = """
from rl2.algorithms.losses import PolicyLoss, masked
def anchored(x):
    distance = masked(x.mask, x.logps - x.ref_logps).square()
    return -x.advantages * x.logps + 0.1 * distance, {"distance": distance}
to_reference = PolicyLoss(anchored, settings=(), needs=("ref_logps",))
"""
PARTS_ENV = """
def reward_fn(messages):
    text = messages[-1]["content"]
    return {"letters": float(sum(map(str.isalpha, text))), "even": float(len(text) % 2 == 0)}
"""


def test_a_loss_that_needs_the_reference_and_an_estimator_of_reward_parts(tmp_path):
    """Without kl.coef, a reference is loaded because the loss declares that it needs one."""
    (tmp_path / "env.py").write_text(PARTS_ENV)
    (tmp_path / "mine.py").write_text(ANCHORED)
    line = train(
        ["-m", "rl2.trainer.ppo"],
        tmp_path,
        [{"messages": [message("user", text)]} for text in ("ab", "cd", "ef")],
        f"rollout.env_path={tmp_path}/env.py",
        f"actor.loss={tmp_path}/mine.py:to_reference",
        "actor.update_per_rollout=2",
        "actor.lr=0.01",
        "adv.estimator=gdpo",
        "rollout.reward_weights.even=0",
        "data.prompts_per_rollout=3",
        "data.responses_per_prompt=4",
        "rollout.train_sampling_params.max_new_tokens=8",
    )
    assert line["actor/distance"] > 0  # after the first of the two updates
    records = read_jsonl(tmp_path / "run/rollouts/train/step_1.jsonl")
    advantages = torch.tensor([record["advantage"] for record in records]).view(3, 4)
    letters = torch.tensor([record["rewards"]["letters"] for record in records]).view(3, 4)
    expected = (letters - letters.mean(1, keepdim=True)) / (letters.std(1, keepdim=True) + 1e-4)
    assert letters.std(1).min() > 0
    torch.testing.assert_close(advantages, expected / (expected.std() + 1e-4))


PAIR = {
    "chosen": [message("user", "ab"), message("assistant", "yes")],
    "rejected": [message("user", "ab"), message("assistant", "no")],
}


def test_a_preference_loss_without_a_reference(tmp_path):
    settings = ("dpo.loss=orpo", "dpo.sft_coef=0.5", "data.batch_size=2")
    line = train(["-m", "rl2.trainer.dpo"], tmp_path, [PAIR, PAIR], *settings)
    assert "time/reference" not in line and "actor/kl" not in line
    assert line["actor/chosen_loss"] > 0


def test_the_environment_answers_a_quiet_reply():
    interact = runpy.run_path(str(PLUGINS / "environment.py"))["interact"]
    assert interact([message("assistant", "AB, 1")]) == []
    assert [m["role"] for m in interact([message("assistant", "Ab")])] == ["user"]


def test_dpo_with_a_preference_loss(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    key, value = read_setting("preference_loss")
    settings = (f"{key}={value}", "data.batch_size=2", "dpo.beta=0.5")
    line = train(["-m", "rl2.trainer.dpo"], tmp_path, [PAIR, PAIR], *settings)
    assert line["actor/loss"] == pytest.approx(1)  # the policy is the reference: the margin is 0
    assert "time/reference" in line
    exponential = find_preference_loss(value).compute
    inputs = preference_inputs(torch.tensor([2.0, 0.0]), beta=0.5)
    assert exponential(inputs).item() == pytest.approx(math.exp(-1))


def test_the_trainer(tmp_path):
    rows = [
        {"messages": [message("user", "a"), message("assistant", "b" * i)]} for i in range(1, 5)
    ]
    line = train([PLUGINS / "trainer.py"], tmp_path, rows, "data.batch_size=4")
    assert line["actor/loss"] > 0 and line["actor/grad_norm"] > 0
    assert (tmp_path / "run/model/config.json").exists()
