"""The queue of the benchmarks that train, and what they compute by themselves."""

import fcntl
import re
import sys
import types

from common import ROOT, read_jsonl

sys.path.insert(0, str(ROOT / "benchmarks/lab"))
import learning
import run_queue
import tool_use
import word_problems

from rl2.config.parse import parse
from rl2.config.schema import PPOConfig


def make_jobs(folder, *names):
    """Jobs that append their name to `folder`/started, and whose result is its length.

    The job `bad` fails.
    """
    code = (
        "import sys, json; from pathlib import Path; name = sys.argv[1]; "
        f"file = open({str(folder / 'started')!r}, 'a'); file.write(name + ' '); file.close(); "
        "print('a line'); print(json.dumps({'length': len(name)})); sys.exit(name == 'bad')"
    )
    return [run_queue.Job(name, [sys.executable, "-S", "-c", code, name]) for name in names]


def test_a_queue_that_is_started_again_makes_the_missing_runs_only(tmp_path, capsys):
    results = tmp_path / "results" / "runs.jsonl"
    run_queue.run_missing(make_jobs(tmp_path, "one", "bad"), results, tmp_path / "runs")
    assert "failed" in capsys.readouterr().out
    lock = tmp_path / "runs" / "three.lock"
    with lock.open("w") as other:  # another process is making this run
        fcntl.flock(other, fcntl.LOCK_EX)
        jobs = make_jobs(tmp_path, "one", "bad", "three", "seven")
        run_queue.run_missing(jobs, results, tmp_path / "runs")
    assert (tmp_path / "started").read_text().split() == ["one", "bad", "bad", "seven"]
    lines = read_jsonl(results)
    assert [(line["name"], line["length"]) for line in lines] == [("one", 3), ("seven", 5)]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", lines[0]["date"]) and lines[0]["machine"]


def test_means_have_the_standard_error_of_the_mean():
    # Deviations -0.1, 0, 0.1: variance 0.01, error sqrt(0.01 / 3) = 0.0577.
    assert run_queue.mean_and_error([0.7, 0.8, 0.9]) == "80.0 ± 5.8"
    assert run_queue.mean_and_error([0.5]) == "50.0"


def test_the_mark_is_reached_by_a_mean_of_three_steps():
    assert learning.MARK == 0.7
    right = [0.4, 0.9, 0.5, 0.8, 0.9, 0.6]  # means from step 3 on: 0.6, 0.73
    curve = learning.curve_to_mark(right, [10.0, 20.0, 30.0, 40.0, 50.0, 60.0])
    assert (curve["steps_to_mark"], curve["cpu_seconds_to_mark"]) == (4, 40.0)
    assert learning.curve_to_mark([0.6] * 9, [1.0] * 9)["steps_to_mark"] is None


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


class Recorder:
    """Stands for the trainer's recorder. Keeps what its steps were given."""

    num_steps = 100

    def __init__(self):
        self.steps = []

    def finish_step(self, step, metrics, records=()):
        self.steps.append((step, self.num_steps))
        return False


def test_a_run_ends_with_the_step_that_reaches_the_budget_of_tokens():
    recorder = Recorder()
    learning.StopAtBudget(recorder, 250)
    for step in range(1, 10):
        if recorder.finish_step(step, {"tokens/sampled": 100}):
            break
    # The third step is the last one for the recorder too, which evaluates the last step.
    assert recorder.steps == [(1, 100), (2, 100), (3, 3)]


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


def test_trajectories_are_counted_with_and_without_a_call():
    called = [{"role": "user"}, {"role": "assistant"}, {"role": "tool"}, {"role": "assistant"}]
    records = [
        {"messages": called, "reward": 1.0, "num_turns": 2, "length": 50},
        {"messages": called, "reward": 0.0, "num_turns": 2, "length": 40},
        {"messages": called[:2], "reward": 1.0, "num_turns": 1, "length": 20},
        {"messages": called[:2], "reward": 0.0, "num_turns": 1, "length": 10},
    ]
    summary = {"trajectories": 4, "right": 2, "without_call": 2, "right_without_call": 1}
    assert tool_use.summarize(records) == summary | {"turns": 1.5, "tokens": 30.0}
