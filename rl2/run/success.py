"""What success is: the reward part that rollout.score names, or the whole reward without that key.

This is its only definition, of one answer and of the metric that has its mean. Filters, curricula,
evaluations, trainer.save_best, the console, reports and commands take it from here.
"""

import re
from collections.abc import Mapping

from rl2.run.records import Record

RIGHT_SCORE = 1 - 1e-6  # 1, but for the rounding of a sum of parts
REWARD = "reward/mean"  # the metric of the whole reward


def score_of(rewards: Mapping[str, float], reward: float, part: str | None) -> float:
    """Returns the score of an answer with these parts: 0 where it lacks the one that is success.

    `part` is rollout.score. If it is None, the score is `reward`, the weighted sum of the parts.
    """
    return reward if part is None else rewards.get(part, 0.0)


def is_right(score: float) -> bool:
    return score >= RIGHT_SCORE


def reward_metric(part: str) -> str:
    """The metric of a reward part. One called mean or std does not take the place of these."""
    return f"reward/parts/{part}" if part in ("mean", "std") else f"reward/{part}"


def training_metric(part: str | None) -> str:
    """The metric of success in training, the mean score."""
    return REWARD if part is None else reward_metric(part)


def held_out_metric(part: str | None, num_samples: int) -> str:
    """The metric of success of a test set: the mean reward, or the share of right answers."""
    return REWARD if part is None else f"avg@{num_samples}"


def held_out_results(
    metrics: Mapping[str, float], part: str | None
) -> dict[tuple[str, str], float]:
    """Returns success and loss on each test set, by its name ("" without one) and the metric.

    `part` is rollout.score; the run may have sampled any number of answers to a question.
    """
    success = REWARD if part is None else r"avg@\d+"
    # A part of the reward may be called loss, too.
    pattern = rf"test/(?:(?!reward/)(\w+)/)?({success}|loss)"
    results = {}
    for metric, value in metrics.items():
        if match := re.fullmatch(pattern, metric):
            results[match[1] or "", match[2]] = value
    return results


def saved_score(config: Record) -> str | None:
    """Returns rollout.score of the content of a config.yaml, which may be of an old run."""
    part: str | None = config.get("rollout", {}).get("score")
    return part
