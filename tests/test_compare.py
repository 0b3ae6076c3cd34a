"""`rl2 compare`: two recipes by their runs' answers to the same test questions."""

import json
import re

import numpy as np
from common import run_main, write_jsonl

from rl2.tools import compare as command
from rl2.tools.compare import Evaluation, compare


def write_run(folder, scores, split="test", step=4, score=None):
    """An evaluation with one answer to each question."""
    records = [
        {
            "id": number,
            "group": number,
            "row": {"answer": str(number)},
            "messages": [{"role": "user", "content": f"{number}?"}, {"role": "assistant"}],
            "rewards": {"right": float(score), "form": 1.0},
            "reward": float(score) + 1.0,
            "finish_reason": "stop",
        }
        for number, score in enumerate(scores)
    ]
    path = folder / f"rollouts/{split}/step_{step}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_jsonl(path, records)
    config = {"rollout": {"score": score}}
    (folder / "config.yaml").write_text(json.dumps(config))
    return str(folder)


def run_command(capsys, *words):
    """(what the command prints, its status)."""
    status = run_main(command.main, *words)
    output = capsys.readouterr()
    return output.out + output.err, status


def test_a_recipe_that_answers_more_questions_is_better(tmp_path, capsys):
    """In each seed it answers 20 of 40 questions more, and two others."""
    groups = []
    for name, num_right in (("a", 10), ("b", 30)):
        for seed in range(3):
            right = [number < num_right or number == 35 + seed for number in range(40)]
            groups.append(write_run(tmp_path / f"{name}{seed}", right))
    write_run(tmp_path / "b0", [0] * 40, step=2)  # an earlier evaluation
    words = ["--score", "right", *groups[:3], "--", *groups[3:]]
    output, status = run_command(capsys, *words)
    assert status == 0 and "second recipe is better" in output
    difference, low, high = map(float, re.findall(r"[+-]\d\.\d{4}", output))
    assert difference == 0.5 and 0.2 < low < 0.5 < high < 0.8
    again, _ = run_command(capsys, *groups[:3], "--", *groups[3:])
    assert "+0.5000" in again, "both recipes have the other part of the reward"


def test_the_score_is_that_of_the_runs_unless_it_is_named(tmp_path, capsys):
    right = write_run(tmp_path / "right", [0, 1], score="right")
    form = write_run(tmp_path / "form", [1, 1], score="form")
    means = {("right", right): "0.5000", ("form", form): "1.0000"}
    for (_, run), mean in means.items():
        output, status = run_command(capsys, run, "--", run)
        assert status == 0 and f"first   {mean}" in output
    output, status = run_command(capsys, right, "--", form)
    assert status == 2 and "--score" in output
    output, status = run_command(capsys, "--score", "right", right, "--", form)
    assert status == 0 and "+0.5000" in output


def test_what_cannot_be_compared_is_said(tmp_path, capsys):
    first = write_run(tmp_path / "a", [0, 1])
    named = write_run(tmp_path / "named", [0, 1], split="test_hard")
    for words, problem in (
        ([first], "after --"),
        ([first, "--", str(tmp_path / "missing")], "missing"),
        ([first, "--", named], "test_hard"),
        (["--score", "colour", first, "--", first], "right, form"),
    ):
        output, status = run_command(capsys, *words)
        assert status == 2 and problem in output
    output, status = run_command(capsys, "--set", "hard", named, "--", named)
    assert status == 0 and "+0.0000" in output
    assert "better" not in output and "one run" in output


def test_the_interval_holds_the_true_difference_in_95_of_100_studies():
    """Questions differ in difficulty, and runs by their seed. The true difference is 0.1."""
    rng = np.random.default_rng(0)
    num_held = 0
    num_studies = 300
    for _ in range(num_studies):
        difficulty = rng.normal(0, 1, 50)
        studies = []
        for recipe in range(2):
            shift = rng.normal(0, 0.2, 50)  # what the recipe does to each question
            evaluations = []
            for _ in range(4):
                own = rng.normal(0, 0.1) + rng.normal(0, 0.3)
                scores = difficulty + shift + own + 0.1 * recipe + rng.normal(0, 0.5, 50)
                evaluations.append(Evaluation(None, 1, dict(enumerate(scores))))
            studies.append(evaluations)
        found = compare(*studies, list(range(50)))
        num_held += abs(found.mean - 0.1) <= found.error
    assert 0.92 <= num_held / num_studies <= 0.995
