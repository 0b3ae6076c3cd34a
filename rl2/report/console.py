"""Shows a run on the console: one line per step, and the time left."""

import re
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from tqdm import tqdm

from rl2.config.conditions import compares_pairs, has_section
from rl2.report.health import Metrics, Samples, learns_from_groups_alone
from rl2.run.success import REWARD, held_out_pattern, training_metric

# The time left is estimated from the mean of this many steps: a usual trainer.save_freq, so that
# the mean includes its share of the saves.
RECENT_STEPS = 20
MAX_REWARD_PARTS = 4  # per line


@dataclass(frozen=True)
class Column:
    """A metric on the console."""

    metric: str
    name: str
    format: str
    is_shown_at_zero: bool = True


COLUMNS = [
    Column("rollout/truncated", "cut", ".0%"),
    Column("rollout/failed", "failed", ".0%", is_shown_at_zero=False),
    Column("actor/loss", "loss", ".4f"),
    Column("actor/accuracy", "accuracy", ".3f"),
    Column("actor/margin", "margin", ".3f"),
    Column("actor/kl", "kl", ".4f"),
    # Exactly 0 with one update a step.
    Column("actor/approx_kl", "approx_kl", ".4f", is_shown_at_zero=False),
    Column("actor/entropy", "entropy", ".3f"),
    Column("critic/loss", "value loss", ".4f"),
    Column("rollout/length", "length", ".0f"),
    Column("test/loss", "test loss", ".4f"),
    Column("test/perplexity", "test perplexity", ".3f"),
    Column("test/accuracy", "test accuracy", ".3f"),
    Column("test/margin", "test margin", ".3f"),
    Column("actor/grad_norm", "grad", ".2f"),
    Column("critic/grad_norm", "critic grad", ".2f"),
    Column("actor/skipped", "skipped", ".0%", is_shown_at_zero=False),
    Column("critic/skipped", "critic skipped", ".0%", is_shown_at_zero=False),
    Column("tokens/per_second", "tok/s", ".0f"),
]


class Console:
    """A progress bar with one line per step above it. `start` steps are already done.

    `config` is that of the trainer.
    """

    def __init__(self, config: Any, start: int, num_steps: int):
        self.compares_groups = has_section(config, "adv") and learns_from_groups_alone(config)
        self.score: str | None = config.rollout.score if has_section(config, "rollout") else None
        self.num_steps = num_steps
        self.test_freq = config.trainer.test_freq or num_steps
        self.test_seconds = 0.0  # of the last evaluation
        self.recent_seconds: deque[float] = deque(maxlen=RECENT_STEPS)  # without evaluations
        self.bar = tqdm(
            total=num_steps,
            initial=start,
            unit="step",
            dynamic_ncols=True,
            disable=None,
            smoothing=0.1,
        )

    def log(self, step: int, metrics: Metrics, samples: Samples) -> None:
        self.bar.update(step - self.bar.n)
        self.test_seconds = metrics.get("time/test", self.test_seconds)
        line = format_line(metrics, self.num_steps, self.compares_groups, self.score)
        if step > 0:
            self.recent_seconds.append(metrics["time/step"] - metrics.get("time/test", 0.0))
            line += f"  {timedelta(seconds=round(self._seconds_left(step)))} left"
        self.print(line)

    def _seconds_left(self, step: int) -> float:
        """Assumes that steps take as long as recent ones, and evaluations as the last one."""
        if step == self.num_steps:
            return 0.0
        num_tests = self.num_steps // self.test_freq - step // self.test_freq
        num_tests += self.num_steps % self.test_freq > 0  # the last step evaluates anyway
        pace = sum(self.recent_seconds) / len(self.recent_seconds)
        return pace * (self.num_steps - step) + self.test_seconds * num_tests

    def print(self, text: str) -> None:
        self.bar.write(text)

    def close(self) -> None:
        self.bar.close()


def describe_start(config: Any) -> list[str]:
    """Describes what a step is made of, and warns if the run saves no checkpoints.

    `config` is that of the trainer.
    """
    if config.trainer.eval_only:
        return []
    sentences = []
    if has_section(config, "adv"):
        sentences.append(_describe_step(config))
    else:
        sentences.append(_describe_rows(config))
    if config.trainer.save_freq is None and config.trainer.save_best is not None:
        sentences.append(
            "trainer.save_freq is not set, so only a best evaluation, Ctrl-C or SIGTERM save a "
            "checkpoint, and a killed run repeats the steps since then"
        )
    elif config.trainer.save_freq is None:
        sentences.append(
            "no checkpoints: trainer.save_freq is not set, so only Ctrl-C or SIGTERM save one, and "
            "a killed run starts over at step 0"
        )
    return sentences


def _describe_step(config: Any) -> str:
    """Describes the trajectories, sampled tokens and updates of a step of PPO."""
    num_prompts = config.data.prompts_per_rollout
    num_answers = config.data.responses_per_prompt
    num_trajectories = num_prompts * num_answers
    num_updates = config.actor.updates_per_step
    updates = f"then {num_updates} update{'s' if num_updates > 1 else ''} of the actor"
    if config.trainer.rollouts_from:
        return f"each step: the saved trajectories, {updates}"
    most_tokens = config.rollout.train_sampling_params.max_new_tokens * config.rollout.max_turns
    return (
        f"each step: {num_prompts} prompts x {num_answers} answers = {num_trajectories} "
        f"trajectories of up to {most_tokens:,} sampled tokens (up to "
        f"{num_trajectories * most_tokens:,} per step), {updates}"
    )


def _describe_rows(config: Any) -> str:
    """Describes the rows and tokens of a step of SFT, DPO or the reward model."""
    num_rows, what = config.data.batch_size, "rows"
    if compares_pairs(config):  # a chosen and a rejected reply, each with its prompt
        num_rows, what = 2 * num_rows, f"rows, 2 for each of {num_rows} pairs,"
    most_tokens = config.data.max_length
    return (
        f"each step: {num_rows} {what} of up to {most_tokens:,} tokens (up to "
        f"{num_rows * most_tokens:,} per step), then 1 update"
    )


def format_line(
    metrics: Metrics, num_steps: int, compares_groups: bool, score: str | None = None
) -> str:
    """Formats the line of a step, with the metrics that it has and its longest phase.

    `score` is rollout.score.
    """
    values = [f"step {metrics['step']}/{num_steps}"]
    if "reward/mean" in metrics:
        values += _reward_values(metrics, score)
    if "rollout/zero_variance" in metrics and compares_groups:
        values.append(f"teaching {1 - metrics['rollout/zero_variance']:.0%}")
    if "reward/mean" in metrics:
        # The loss of PPO is near 0 whether the policy learns or not.
        values += _format_columns({**metrics, "actor/loss": None}, score)
    else:  # a reward model is a critic without an actor
        by_name = {name.replace("critic/", "actor/"): metrics[name] for name in metrics}
        values += _format_columns(by_name, score)
    phases = {}
    for metric, seconds in metrics.items():
        if metric.startswith("time/") and metric != "time/step":
            phases[metric.removeprefix("time/")] = seconds
    longest = max(phases, key=lambda phase: phases[phase])
    values.append(f"{metrics['time/step']:.1f}s ({longest} {phases[longest]:.1f})")
    return "  ".join(values)


def _reward_values(metrics: Metrics, score: str | None) -> list[str]:
    """Formats success, where it is a part of the reward, and the reward with its other parts."""
    success = training_metric(score)
    values = []
    if score is not None and success in metrics:
        values.append(f"{score} {metrics[success]:.3f}")
    parts = []
    for metric, value in metrics.items():
        if metric.startswith("reward/") and metric not in (REWARD, "reward/std", success):
            parts.append(f"{metric.removeprefix('reward/')} {value:.2f}")
    if len(parts) > MAX_REWARD_PARTS:
        parts = [*parts[:MAX_REWARD_PARTS], "..."]
    reward = f"reward {metrics['reward/mean']:.3f}"
    return [*values, f"{reward} ({' '.join(parts)})" if parts else reward]


def _format_columns(metrics: dict[str, Any], score: str | None) -> list[str]:
    success = held_out_pattern(score)
    values = []
    for metric, value in metrics.items():
        if named := re.fullmatch(rf"test/(?!reward/)(\w+)/({success}|loss)", metric):
            values.append(f"test {named[1]} {value:.3f}")
        elif alone := re.fullmatch(rf"test/({success})", metric):
            name = "reward" if score is None else alone[1]
            values.append(f"test {name} {value:.3f}")
    for column in COLUMNS:
        value = metrics.get(column.metric)
        # A mean over no tokens is NaN, and is left out where 0 is.
        if value is not None and (value > 0 or column.is_shown_at_zero):
            values.append(f"{column.name} {value:{column.format}}")
    return values
