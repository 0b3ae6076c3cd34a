"""`rl2 compare RUN ... -- RUN ...`: whether two recipes differ, by their answers to test questions.

A recipe is one run or several with different seeds. The questions are the same in all runs, so they
are paired. The error of the difference has two parts, by the choice of questions and by that of
runs: runs of one seed alone cannot say how far another seed would be.
"""

import argparse
import json
import math
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

from rl2.report.page import prompt_of, reward_of
from rl2.run.records import find_steps, read_lines, read_object, step_of
from rl2.run.success import saved_score, score_of

# Quantiles 0.975 of Student's t by its degrees of freedom, 1, 2, 3, ...; 1.96 from the last one on.
T_QUANTILES = [
    float(quantile)
    for quantile in (
        "12.706 4.303 3.182 2.776 2.571 2.447 2.365 2.306 2.262 2.228 "
        "2.201 2.179 2.160 2.145 2.131 2.120 2.110 2.101 2.093 2.086 "
        "2.080 2.074 2.069 2.064 2.060 2.056 2.052 2.048 2.045 2.042"
    ).split()
]


@dataclass(frozen=True)
class Evaluation:
    """The last evaluation of a run on a test set."""

    run: Path
    step: int
    scores: dict[str, float]  # by question: the mean over its answers


class Difference(NamedTuple):
    """The mean of the second recipe minus that of the first."""

    mean: float
    error: float  # half of the 95% interval


def main() -> None:
    """Prints the comparison. Exits with status 2 if the runs cannot be compared."""
    parser = argparse.ArgumentParser(
        prog="rl2 compare",
        usage="%(prog)s [--set NAME] [--score PART] RUN [RUN ...] -- RUN [RUN ...]",
        description="Says whether two recipes differ: the last evaluations of the runs before and "
        "after --, question by question. Several runs of a recipe have different seeds.",
    )
    parser.add_argument("--set", default="", help="the test set, if the runs have several")
    parser.add_argument("--score", help="a part of the rewards; by default rollout.score")
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    parser.add_argument("first", nargs="+", type=Path, metavar="RUN", help="folders of runs")
    arguments = parser.parse_args(words[:at])
    second = [Path(word) for word in words[at + 1 :]]
    if not second:
        parser.error("give the runs of the second recipe after --")
    try:
        part = arguments.score or common_score(arguments.first + second)
        lines = describe(
            [read_evaluation(run, arguments.set, part) for run in arguments.first],
            [read_evaluation(run, arguments.set, part) for run in second],
        )
    except ValueError as error:
        parser.exit(2, f"rl2 compare: {error}\n")
    print("\n".join(lines))


def common_score(runs: list[Path]) -> str | None:
    """Returns rollout.score of the runs. ValueError if they have different ones."""
    parts = {saved_score(read_object(run / "config.yaml")) for run in runs}
    if len(parts) > 1:
        names = ", ".join(sorted("null" if part is None else part for part in parts))
        raise ValueError(f"the runs have different rollout.score: {names}; choose with --score")
    return parts.pop()


def read_evaluation(run: Path, set_name: str, part: str | None) -> Evaluation:
    """Reads the last evaluation of a run. Answers that failed in the environment do not count.

    The scores are of the reward part `part`; None is the whole reward. ValueError if there is none.
    """
    split = f"test_{set_name}" if set_name else "test"
    steps = find_steps(run / "rollouts" / split)
    if not steps:
        found = sorted(path.name for path in run.glob("rollouts/test*"))
        remedy = f"it has {', '.join(found)}: choose with --set" if found else "evaluate it"
        raise ValueError(f"{run} has no transcripts in rollouts/{split}/; {remedy}")
    last = steps[-1]
    found_parts: dict[str, None] = {}
    scores: dict[str, list[float]] = defaultdict(list)  # by question, a text of prompt and row
    for record in read_lines(last)[0]:
        rewards = record.get("rewards") or {}
        found_parts |= dict.fromkeys(rewards)
        if record.get("finish_reason") != "failed":
            question = [prompt_of(record), record.get("row")]
            score = score_of(rewards, reward_of(record), part) or 0.0
            scores[json.dumps(question, sort_keys=True, default=str)].append(score)
    if not scores:
        raise ValueError(f"{last}: no answer was scored")
    if part is not None and part not in found_parts:
        raise ValueError(f"--score {part}: the rewards have the parts {', '.join(found_parts)}")
    means = {question: fmean(values) for question, values in scores.items()}
    return Evaluation(run, step_of(last), means)


def describe(first: list[Evaluation], second: list[Evaluation]) -> list[str]:
    """Returns the comparison, line by line. ValueError if no question is in all runs."""
    questions = list(first[0].scores)
    for evaluation in first + second:
        questions = [question for question in questions if question in evaluation.scores]
    if not questions:
        raise ValueError("no question is in all runs: compare runs with the same test rows")
    lines = []
    for title, recipe in (("first", first), ("second", second)):
        for evaluation in recipe:
            mean = fmean(evaluation.scores[question] for question in questions)
            lines.append(f"{title:8}{mean:.4f}  step {evaluation.step}  {evaluation.run}")
    num_left_out = max(len(e.scores) for e in first + second) - len(questions)
    found = compare(first, second, questions)
    lines.append(f"{len(questions)} questions, the same in all runs")
    if num_left_out:
        lines[-1] += f"; {num_left_out} are not in all of them and do not count"
    low, high = found.mean - found.error, found.mean + found.error
    lines.append(f"second - first: {found.mean:+.4f}, 95% interval {low:+.4f} to {high:+.4f}")
    if low > 0 or high < 0:
        lines.append(f"the {'second' if found.mean > 0 else 'first'} recipe is better")
    else:
        lines.append("this does not tell them apart: more seeds or questions would")
    if len(first) == 1 or len(second) == 1:
        lines.append("a recipe has one run: the interval is of other questions, not of other seeds")
    return lines


def compare(first: list[Evaluation], second: list[Evaluation], questions: list[str]) -> Difference:
    """Returns the difference of two recipes on the questions that all of their runs have."""
    a, b = score_table(first, questions), score_table(second, questions)
    by_question = b.mean(0) - a.mean(0)
    num_questions = len(questions)
    if num_questions == 1:
        return Difference(float(by_question.mean()), math.nan)
    # The variances of the mean by the choice of questions and of runs, with degrees of freedom.
    # What neither explains is in both: the interval is a little wide where seeds hardly differ.
    parts = [(by_question.var(ddof=1) / num_questions, num_questions - 1)]
    if len(a) > 1 and len(b) > 1:
        for sample in (a, b):
            parts.append((sample.mean(1).var(ddof=1) / len(sample), len(sample) - 1))
    variance = sum(variance for variance, _ in parts)
    error = _t_quantile(variance, parts) * math.sqrt(variance)
    return Difference(float(by_question.mean()), float(error))


def score_table(recipe: list[Evaluation], questions: list[str]) -> np.ndarray:
    """Returns the scores [runs, questions]."""
    return np.array([[run.scores[question] for question in questions] for run in recipe])


def _t_quantile(variance: float, parts: list[tuple[float, int]]) -> float:
    """Student's 0.975 for a variance of parts with degrees of freedom (Satterthwaite, 1946)."""
    terms = sum(part**2 / degrees for part, degrees in parts)
    degrees = max(1, int(variance**2 / terms)) if terms else len(T_QUANTILES) + 1
    return T_QUANTILES[degrees - 1] if degrees <= len(T_QUANTILES) else 1.96
