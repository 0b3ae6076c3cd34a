"""Tests of evaluation: metrics against exact combinatorics, test sets, runs that only evaluate."""

import textwrap
from math import isnan, sqrt
from statistics import fmean, stdev

import pytest
from common import (
    launch_runs,
    make_model,
    make_tokenizer,
    pack_rows,
    read_jsonl,
    read_metrics,
    write_jsonl,
)
from env_helpers import make_agent
from scripted import PARAMS

from rl2.config.schema import PPOConfig
from rl2.data.chat import ChatTemplate
from rl2.data.examples import PROMPT_ROWS, Examples
from rl2.ppo_inputs import make_prompts
from rl2.rollout.evaluate import Evaluator, clustered_mean, measure_samples
from rl2.rollout.trajectory import FinishReason, Trajectory

ENV = """
    def reward_fn(messages, answer):
        return {"right": float(messages[-1]["content"] == answer), "format": 0.1}
"""


@pytest.mark.parametrize("num_answers", [1, 3])
def test_the_standard_error_is_the_usual_one_of_the_prompts(num_answers):
    """Equal answers to one prompt add no certainty."""
    values = [1.0, 0.0, 0.0, 1.0, 1.0]
    measured = clustered_mean([[value] * num_answers for value in values])
    assert measured == pytest.approx((0.6, stdev(values) / sqrt(5)))
    assert isnan(clustered_mean([])[0]) and isnan(clustered_mean([[1.0, 0.0]])[1])


def played(group, *rewards, failed=0):
    """Trajectories of one prompt: one for each reward, and `failed` whose environment failed."""
    made = [end({"right": reward}, group) for reward in rewards]
    return made + [end({}, group, FinishReason.FAILED) for _ in range(failed)]


def end(rewards, group=0, finish_reason=FinishReason.STOP):
    return Trajectory(0, group, [], rewards=rewards, finish_reason=finish_reason)


def test_metrics_of_several_answers():
    trajectories = played(0, 1.0, 1.1, 0.5, 0.0) + played(1, 0.0, 0.0, 1.0, failed=1)
    metrics = measure_samples(trajectories, 4)
    assert metrics == pytest.approx(
        {
            "avg@4": 3 / 7,
            "avg@4_stderr": clustered_mean([[1, 1, 0, 0], [0, 0, 1]])[1],
            "reward/mean_stderr": clustered_mean([[1.0, 1.1, 0.5, 0.0], [0.0, 0.0, 1.0]])[1],
            "pass@1": fmean([2 / 4, 1 / 3]),
            "pass@2": fmean([1 - 1 / 6, 1 - 1 / 3]),
            "pass@4": 1.0,  # of the prompt that has four answers
        }
    )
    names = {"avg@1", "avg@1_stderr", "reward/mean_stderr"}
    assert set(measure_samples(trajectories, 1)) == names
    assert {f"pass@{k}" for k in (1, 2, 4, 5)} == {
        name for name in measure_samples(played(0, *[1.0] * 5), 5) if name.startswith("pass")
    }
    assert measure_samples(played(0, 0.7, 0.2), 2)["avg@2"] == 0
    parts = end({"a": 0.7, "b": 0.2, "c": 0.1})
    assert measure_samples([parts], 1)["avg@1"] == 1  # their sum is 0.9999999999999999


def test_an_answer_is_right_by_the_whole_reward_unless_a_part_is_named():
    """By parts that sum to 1 before weights, a good form alone would be right."""
    form, both = end({"right": 0.0, "form": 1.0}), end({"right": 1.0, "form": 1.0}, group=1)
    for trajectory in (form, both):
        trajectory.weights = {"right": 0.9, "form": 0.1}
    assert measure_samples([form, both], 1)["avg@1"] == 0.5
    assert measure_samples([form, both], 1, score="form")["avg@1"] == 1
    without = end({"form": 9.0}, group=2)
    assert measure_samples([form, both, without], 1, score="right")["avg@1"] == 1 / 3


def make_rows(*answers):
    return [
        {"messages": [{"role": "user", "content": f"q{i}"}], "answer": answer}
        for i, answer in enumerate(answers)
    ]


def evaluate(tmp_path, sets, num_samples):
    """(metrics, transcripts by split) of test sets. The engine's answers depend on the seed."""

    def script(turn, seed):
        return str((7 * seed[-3] + seed[-2]) % 3), "stop"

    collector, _, player = make_agent(tmp_path, script, ENV)
    written = {}
    collector.write_records = lambda split, step, records: written.update({split: list(records)})
    prompts = {
        name: Examples(pack_rows(rows), player.templates[""], PROMPT_ROWS, max_length=99)
        for name, rows in sets.items()
    }
    evaluator = Evaluator(collector, prompts, PARAMS, num_samples)
    return evaluator.evaluate(3, 0), written, evaluator


def test_sets_with_names_have_metrics_and_transcripts_of_their_own(tmp_path, device):
    sets = {"a": make_rows("0", "1"), "b": make_rows("2")}
    metrics, written, evaluator = evaluate(tmp_path, sets, 3)
    assert {split: len(records) for split, records in written.items()} == {"test_a": 6, "test_b": 3}
    for name, split in (("a", "test_a"), ("b", "test_b")):
        right = [record["rewards"]["right"] for record in written[split]]
        assert metrics[f"{name}/avg@3"] == pytest.approx(fmean(right))
        assert metrics[f"{name}/reward/mean"] == pytest.approx(fmean(right) + 0.1)
        assert f"{name}/rollout/truncated" in metrics
    table = evaluator.describe(metrics).splitlines()
    assert [line.split()[:2] for line in table] == [["set", "prompts"], ["a", "2"], ["b", "1"]]
    # The randomness of a set does not depend on the other set, nor on its name.
    alone, records, _ = evaluate(tmp_path, {"": sets["b"]}, 3)
    assert records["test"] == written["test_b"]
    assert {f"b/{name}": value for name, value in alone.items()}.items() <= metrics.items()


def test_the_split_follows_the_keys(monkeypatch):
    # There is no model.
    monkeypatch.setattr("rl2.inputs.check_num_positions", lambda *lengths: None)
    config = PPOConfig()
    data = config.data
    data.test_ratio = 0.5
    config.rollout.test_sampling_params.max_new_tokens = 8  # which parsing would fill in
    rows = {"data.path": pack_rows(make_rows(*"0123456789"))}
    train, tests = make_prompts(config, rows, {"": ChatTemplate(make_tokenizer())})
    assert len(train) == 5 and list(map(len, tests.values())) == [5] and list(tests) == [""]
    config.trainer.eval_only = True
    train, tests = make_prompts(config, rows, {"": ChatTemplate(make_tokenizer())})
    assert train is None and len(tests[""]) == 5


def test_a_run_that_only_evaluates(tmp_path, monkeypatch):
    """Without training rows; its folder is its own. test_trainer.py evaluates on two processes."""
    monkeypatch.chdir(tmp_path)
    make_model("model")
    (tmp_path / "env.py").write_text(textwrap.dedent(ENV))
    for name in ("a", "b"):
        write_jsonl(f"{name}.jsonl", make_rows(*"01234"))
    run = [
        "ppo",
        "trainer.eval_only=true",
        "actor.model_name=model",
        "data.test_path.a=a.jsonl",
        "data.test_path.b=b.jsonl",
        "rollout.env_path={a:env.py,b:env.py}",
        "rollout.train_sampling_params.max_new_tokens=4",
        "data.responses_per_test_prompt=2",
        "rollout.test_sampling_params.temperature=1",
        "rollout.test_sampling_params.min_p=0.5",
        "rollout.test_sampling_params.frequency_penalty=-2",
        "rollout.test_sampling_params.presence_penalty=-2",
        "trainer.save_dir=run",
    ]
    done = launch_runs(1, [run])
    [metrics] = read_metrics(tmp_path / "run")
    for name in ("a", "b"):
        records = read_jsonl(tmp_path / f"run/rollouts/test_{name}/step_0.jsonl")
        assert len(records) == 10
        texts = [record["messages"][-1]["content"] for record in records]
        assert {len(set(text)) for text in texts} == {1}, "min_p leaves what penalties favour"
        assert len(set(texts)) > 1
        assert f"test/{name}/pass@2" in metrics
    assert not (tmp_path / "run/model").exists() and not (tmp_path / "run/checkpoints").exists()
    assert "avg@2_stderr" in done.stdout
