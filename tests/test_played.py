"""Evaluation by generation in SFT and DPO: what is played, what is kept, and what is refused.

test_examples.py has the runs of several processes: kills, and layouts that equal one process.
"""

import os
import signal
from pathlib import Path

import pytest
from common import make_model, read_untimed_metrics, write_jsonl

import rl2
from rl2.config.arguments import read_arguments
from rl2.config.parse import compose
from rl2.config.schema import SFTConfig
from rl2.run.best import best_metric
from rl2.trainer.offline_run import OfflineRun

pytestmark = pytest.mark.usefixtures("hears_ctrl_c", "runs_here")

# The share of a letter in the reply, and whether the reply has no other one.
ENV = """
def reward_fn(messages, answer):
    reply = messages[-1]["content"]
    share = sum(letter == answer for letter in reply) / max(len(reply), 1)
    return {"share": share, "right": float(share == 1)}
"""
KEYS = {
    "data.batch_size": 4,
    "actor.dtype": "float32",
    "actor.lr": 0.02,
    "trainer.test_freq": 2,
    "rollout.test_sampling_params.max_new_tokens": 6,
    "rollout.max_running": 8,
}
TALKS = [{"prompt": "say", "completion": "a" * 6} for _ in range(40)]
PROMPTS = [{"prompt": [{"role": "user", "content": f"say, {i}"}], "answer": "a"} for i in range(3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("played") / "tiny")


@pytest.fixture(autouse=True)
def files(runs_here):
    """An env, and prompts, in the folder of the test."""
    Path("env.py").write_text(ENV)
    write_jsonl("prompts.jsonl", PROMPTS)


def train_sft(model, name, **keys):
    keys = KEYS | {"rollout.test_path": "prompts.jsonl", "trainer.experiment_name": name} | keys
    return rl2.train("sft", rows=TALKS, model_name=model, env="env.py", **keys)


def test_the_best_answers_are_kept_and_patience_ends_the_run(model):
    keys = {"trainer.save_best": "auto", "trainer.patience": 2, "rollout.score": "right"}
    run = train_sft(model, "run", **keys)
    shares = {line["step"]: line["test/avg@1"] for line in run.metrics if "test/avg@1" in line}
    best = min(step for step in shares if shares[step] == 1)
    assert shares[0] == 0 and best < 6
    assert list(shares)[-1] == best + 4 < 10, "two more evaluations, none of them better"
    short = train_sft(model, "short", **{"trainer.max_steps": best})
    name = "model.safetensors"
    assert (run.best_model_path / name).read_bytes() == (short.model_path / name).read_bytes()
    assert [record["rewards"]["right"] for record in run.rollouts(best, "test")] == [1.0] * 3


def test_a_stop_leaves_the_evaluation_to_the_next_launch(model, monkeypatch):
    """And then its metrics and its answers are those of a run that was not stopped."""
    keys = {"trainer.max_steps": 6, "rollout.test_sampling_params.temperature": 1.0}
    whole = train_sft(model, "whole", **keys)

    def next_batch_of_a_stop(run):
        if run.recorder.last_step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return next_batch(run)

    next_batch = OfflineRun.next_batch
    with monkeypatch.context() as patch:
        patch.setattr(OfflineRun, "next_batch", next_batch_of_a_stop)
        stopped = train_sft(model, "stopped", **keys)
    assert [line["step"] for line in stopped.metrics] == [0, 1, 2, 3, 4]
    assert not Path(stopped.path, "rollouts/test/step_4.jsonl").exists()
    train_sft(model, "stopped", **keys)
    assert read_untimed_metrics(stopped.path) == read_untimed_metrics(whole.path)
    for step in (0, 2, 4, 6):
        assert stopped.rollouts(step, "test") == whole.rollouts(step, "test")


def test_each_set_has_its_env_beside_rows_with_a_loss(model):
    """In DPO, where the policy is not the only model."""
    Path("other.py").write_text("def reward_fn(messages, label): return {'other': label}\n")
    write_jsonl("labels.jsonl", [{"prompt": "say", "label": 0.25}] * 2)
    pair = {"prompt": "say", "chosen": "a" * 6, "rejected": "b" * 6}
    keys = {
        "trainer.max_steps": 2,
        "rollout.env_path": {"letters": "env.py", "labels": "other.py"},
        "rollout.test_path": {"letters": "prompts.jsonl", "labels": "labels.jsonl"},
    }
    run = rl2.train("dpo", rows=[pair] * 8, test_rows=[pair], model_name=model, **KEYS | keys)
    for line in (run.metrics[0], run.metrics[2]):
        assert line["test/labels/reward/mean"] == line["test/labels/reward/other"] == 0.25
        assert line["test/letters/reward/mean"] == pytest.approx(
            line["test/letters/reward/share"] + line["test/letters/reward/right"]
        )
        assert line["test/loss"] > 0
    assert len(run.rollouts(2, "test_letters")) == 3 and len(run.rollouts(2, "test_labels")) == 2


def test_prompts_have_columns_of_their_own(model):
    write_jsonl("questions.jsonl", [{"question": "say", "solution": "a"}] * 2)
    keys = {
        "data.columns": {"text": "completion"},
        "rollout.columns": {"question": "prompt", "solution": "answer"},
        "rollout.test_path": "questions.jsonl",
        "rollout.env_path": "env.py",
        "trainer.max_steps": 1,
        "data.test_limit": 1,
    }
    rows = [{"prompt": "say", "text": "aaa"}] * 4
    run = rl2.train("sft", rows=rows, model_name=model, **KEYS | keys)
    [record] = run.rollouts(1, "test")
    assert record["row"] == {"answer": "a"}


@pytest.mark.parametrize(
    ("keys", "messages"),
    [
        (
            {"data.columns": {"x": "text"}, "rollout.columns": {"y": "prompt"}},
            ["data.columns renames x", "rollout.columns renames y"],
        ),
        (
            {"rollout.columns": {"answer": "solution"}},
            ["reward_fn needs column 'answer'.*rollout.columns.OLD=answer"],
        ),
        (
            {"actor.lr": -1, "rollout.columns": {"answer": "solution"}},
            ["actor.lr=-1", "reward_fn needs column 'answer'"],
        ),
        (
            {"rollout.test_sampling_params.stop_token_ids": [9999]},
            ["rollout.test_sampling_params.stop_token_ids=.9999.: the tokenizer"],
        ),
        (
            {"rollout.test_sampling_params.max_new_tokens": 9999},
            ["a conversation may get .* tokens: lower rollout.test_sampling_params"],
        ),
    ],
)
def test_what_cannot_work_is_found_together_before_a_model_loads(
    model, monkeypatch, keys, messages
):
    monkeypatch.delattr("rl2.trainer.offline_run.Worker")
    with pytest.raises(ValueError, match="(?s)" + ".*".join(messages)):
        train_sft(model, "refused", **keys)


@pytest.mark.parametrize(
    ("words", "metric"),
    [
        ("save_best=auto", "test/a/reward/mean"),
        ("save_best=loss", "test/loss"),
        ("save_best=b", "test/b/loss"),
        ("save_best=a", "test/a/reward/mean"),
        ("save_best=a rollout.score=right", "test/a/avg@4"),
    ],
)
def test_the_best_is_that_of_the_answers_unless_another_is_named(words, metric):
    words = f"trainer.{words} data.test_path.b=b rollout.responses_per_test_prompt=4"
    paths = "rollout.env_path=env.py rollout.test_path.a=a"
    config = compose(SFTConfig, read_arguments(f"{words} {paths}".split())).config
    assert best_metric(config) == metric
