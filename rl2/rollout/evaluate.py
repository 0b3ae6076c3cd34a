"""Evaluation on test sets: what the policy's answers earn, and how often they are right.

An answer is right if its score (`rl2.run.success`) is 1 or more. A failure of the environment says
nothing of the policy: such an answer counts in the metrics rollout/* only.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import comb, nan, sqrt
from statistics import fmean

from rl2.data.examples import Examples
from rl2.engine.base import SamplingParams
from rl2.report.health import Metrics, with_names
from rl2.rollout.collect import Collector, check_part_name
from rl2.rollout.stats import summarise, to_records
from rl2.rollout.trajectory import Trajectory
from rl2.run.success import is_right, score_of


@dataclass
class Evaluator:
    """Plays the test sets on all processes. All processes make the same calls.

    `sets` has the prompts by the name of their set, "" for the only one. Each prompt is answered
    `num_samples` times.
    """

    collector: Collector
    sets: dict[str, Examples]
    params: SamplingParams
    num_samples: int

    def evaluate(self, step: int, version: int) -> Metrics:
        """Plays all sets and writes their transcripts. Returns the metrics, as NAME/metric.

        `version` is that of the weights. The randomness of a set does not depend on other sets.
        """
        metrics = {}
        for name, prompts in self.sets.items():
            split = f"test_{name}" if name else "test"
            trajectories = self.collector.play(
                list(prompts), self.params, self.num_samples, split, step
            )
            self.collector.write_records(split, step, to_records(trajectories))
            score = self.collector.player.score
            part_names = {part for t in trajectories for part in t.rewards}
            check_part_name(f"rollout.score={score}", score, part_names)
            metrics[name] = summarise(trajectories, version)
            metrics[name] |= measure_samples(trajectories, self.num_samples, score)
        return with_names(metrics)

    def describe(self, metrics: Metrics) -> str:
        """A table of the sets, with the metrics that one looks at first."""
        n = self.num_samples
        names = ["reward/mean", f"avg@{n}", f"avg@{n}_stderr", f"pass@{n}"]
        lines = ["".join(f"{name:>16}" for name in ["set", "prompts", *names])]
        for set_name, prompts in self.sets.items():
            values = [metrics.get(f"{set_name}/{name}".lstrip("/"), nan) for name in names]
            cells = [set_name or "test", len(prompts), *(f"{value:.4g}" for value in values)]
            lines.append("".join(f"{cell:>16}" for cell in cells))
        return "\n".join(lines)


def measure_samples(
    trajectories: list[Trajectory], num_samples: int, score: str | None = None
) -> Metrics:
    """How many of `num_samples` answers to a prompt are right, as metrics of their set.

    avg@N: the fraction that is right, with its standard error; pass@k: the probability that one of
    k is right, for k = 1, 2, 4 ... N, if there are several answers. `score` is rollout.score.
    """
    outcomes: dict[int, list[float]] = defaultdict(list)  # by prompt: 1 for each right answer
    rewards: dict[int, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        if not trajectory.is_failed:
            value = score_of(trajectory.rewards, trajectory.reward, score)
            outcomes[trajectory.group].append(float(is_right(value)))
            rewards[trajectory.group].append(trajectory.reward)
    mean, error = clustered_mean(list(outcomes.values()))
    metrics = {f"avg@{num_samples}": mean, f"avg@{num_samples}_stderr": error}
    metrics["reward/mean_stderr"] = clustered_mean(list(rewards.values()))[1]
    if num_samples > 1:
        for k in sorted({num_samples} | {2**i for i in range(num_samples.bit_length())}):
            metrics[f"pass@{k}"] = mean_pass_at_k(outcomes.values(), k)
    return metrics


def pass_at_k(num_answers: int, num_right: int, k: int) -> float:
    """The probability that at least one of k answers is right, without bias.

    1 - C(n - c, k) / C(n, k) for c right ones of n answers, k <= n (arXiv:2107.03374, eq. 1).
    """
    return 1 - comb(num_answers - num_right, k) / comb(num_answers, k)


def mean_pass_at_k(outcomes: Iterable[list[float]], k: int) -> float:
    """The mean of pass@k over the prompts that have k answers; NaN without one."""
    chances = [pass_at_k(len(row), int(sum(row)), k) for row in outcomes if len(row) >= k]
    return fmean(chances) if chances else nan


def clustered_mean(outcomes: list[list[float]]) -> tuple[float, float]:
    """(the mean over all answers, its standard error), from the outcomes of each prompt's answers.

    Answers to one prompt are not independent: the deviations from the mean are summed a prompt,
    then squared (clustered standard errors, arXiv:2411.00640, section 2.2). The factor G / (G - 1)
    for G prompts makes it the usual standard error where each prompt has one answer.
    """
    num_answers = sum(map(len, outcomes))
    if not num_answers:
        return nan, nan
    mean = sum(map(sum, outcomes)) / num_answers
    if len(outcomes) == 1:
        return mean, nan
    squares = sum((sum(row) - mean * len(row)) ** 2 for row in outcomes)
    correction = len(outcomes) / (len(outcomes) - 1)
    return mean, sqrt(correction * squares) / num_answers
