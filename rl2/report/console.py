"""Shows a run on the console: one line per step, and the time left."""

from datetime import timedelta

from rl2.config.schema import Config, PPOConfig
from rl2.report.health import Metrics, learns_from_groups_alone
from rl2.run.success import REWARD, held_out_results, training_metric

MAX_REWARD_PARTS = 4  # per line
# The metrics of a line, each with its name and format there. A reward model has those of its critic
# in the place of an actor's.
COLUMNS = {
    "rollout/truncated": ("cut", ".0%"),
    "rollout/failed": ("failed", ".0%"),
    "actor/loss": ("loss", ".4f"),
    "actor/accuracy": ("accuracy", ".3f"),
    "actor/margin": ("margin", ".3f"),
    "actor/kl": ("kl", ".4f"),
    "actor/approx_kl": ("approx_kl", ".4f"),
    "actor/entropy": ("entropy", ".3f"),
    "critic/loss": ("value loss", ".4f"),
    "rollout/length": ("length", ".0f"),
    "test/perplexity": ("test perplexity", ".3f"),
    "test/accuracy": ("test accuracy", ".3f"),
    "test/margin": ("test margin", ".3f"),
    "actor/grad_norm": ("grad", ".2f"),
    "critic/grad_norm": ("critic grad", ".2f"),
    "actor/skipped": ("skipped", ".0%"),
    "critic/skipped": ("critic skipped", ".0%"),
    "tokens/per_second": ("tok/s", ".0f"),
}
# approx_kl is exactly 0 with one update a step.
HIDDEN_AT_ZERO = ("rollout/failed", "actor/approx_kl", "actor/skipped", "critic/skipped")


class Console:
    """Prints a line a step. `config` is that of the trainer."""

    def __init__(self, config: Config, num_steps: int):
        self.compares_groups = isinstance(config, PPOConfig) and learns_from_groups_alone(config)
        self.score = config.rollout.score if isinstance(config, PPOConfig) else None
        self.num_steps = num_steps
        self.num_logged = 0  # steps
        self.seconds = 0.0  # that these took, with evaluations and saves

    def log(self, step: int, metrics: Metrics) -> None:
        line = self._format(metrics)
        if step > 0:
            self.num_logged += 1
            self.seconds += metrics["time/step"]
            pace = self.seconds / self.num_logged
            line += f"  {timedelta(seconds=round(pace * (self.num_steps - step)))} left"
        print(line)

    def close(self) -> None:
        """Every step is printed already."""

    def _format(self, metrics: Metrics) -> str:
        """Formats the line of a step, with the metrics that it has and its longest phase."""
        values = [f"step {metrics['step']}/{self.num_steps}"]
        if REWARD in metrics:
            values += _reward_values(metrics, self.score)
            # The loss of PPO is near 0 whether the policy learns or not.
            metrics = {name: metrics[name] for name in metrics if name != "actor/loss"}
        else:  # a reward model is a critic without an actor
            metrics = {name.replace("critic/", "actor/"): metrics[name] for name in metrics}
        if "rollout/zero_variance" in metrics and self.compares_groups:
            values.append(f"teaching {1 - metrics['rollout/zero_variance']:.0%}")
        for (test_set, metric), result in held_out_results(metrics, self.score).items():
            name = test_set or ("reward" if metric == REWARD else metric)
            values.append(f"test {name} {result:.3f}")
        for metric, (name, form) in COLUMNS.items():
            value = metrics.get(metric)
            # A mean over no tokens is NaN, and is left out where 0 is.
            if value is not None and (value > 0 or metric not in HIDDEN_AT_ZERO):
                values.append(f"{name} {value:{form}}")
        phases = [name for name in metrics if name.startswith("time/") and name != "time/step"]
        longest = max(phases, key=lambda phase: metrics[phase])
        share = f"{longest.removeprefix('time/')} {metrics[longest]:.1f}"
        values.append(f"{metrics['time/step']:.1f}s ({share})")
        return "  ".join(values)


def warn_of_checkpoints(config: Config) -> list[str]:
    """Says whether the run saves none. `config` is that of the trainer."""
    trainer = config.trainer
    if trainer.eval_only or trainer.save_freq is not None:
        return []
    title, saves = "no checkpoints: ", "Ctrl-C or SIGTERM"
    if trainer.save_best is not None:
        title, saves = "", "a best evaluation, Ctrl-C or SIGTERM"
    return [
        f"{title}trainer.save_freq is not set, so a checkpoint comes from {saves} alone, and a "
        "killed run repeats the steps since then"
    ]


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
        parts = parts[:MAX_REWARD_PARTS] + ["..."]
    reward = f"reward {metrics[REWARD]:.3f}"
    values.append(f"{reward} ({' '.join(parts)})" if parts else reward)
    return values
