"""The best evaluation of a run so far, which trainer.save_best keeps."""

import math
import re
from dataclasses import dataclass
from statistics import fmean

from rl2.config.schema import Config, PPOConfig
from rl2.run.success import held_out_metric

FALLING = ("loss", "perplexity")  # metrics of which less is better
EVERY_SET = "*"  # in the place of the name of a test set: the mean over all of them


@dataclass(frozen=True)
class Best:
    """The best evaluation. It is in every checkpoint, so a resumed run decides as the whole one."""

    metric: str  # as in metrics.jsonl, such as test/reward/mean; test/*/loss is a mean over sets
    step: int = 0  # 0: none yet. The evaluation before training is no candidate
    value: float | None = None

    def judge(self, step: int, metrics: dict[str, float]) -> "Best":
        """Returns the best after the evaluation of `step`. Step 0 is no candidate.

        An equal or undefined value is not better. ValueError if the metric is not among those of
        the test rows.
        """
        pattern = re.escape(self.metric).replace(re.escape(EVERY_SET), r"\w+")
        values = [metrics[name] for name in metrics if re.fullmatch(pattern, name)]
        if not values:
            names = ", ".join(name.removeprefix("test/") for name in metrics)
            raise ValueError(
                f"trainer.save_best={self.metric.removeprefix('test/')}: the test rows have no "
                f"such metric; choose auto, or one of {names}"
            )
        value = fmean(values)
        if step == 0 or not math.isfinite(value) or not self._is_below(value):
            return self
        return Best(self.metric, step, value)

    def _is_below(self, value: float) -> bool:
        """Returns whether the best so far is worse than `value`."""
        if self.value is None:
            return True
        is_falling = self.metric.rpartition("/")[2] in FALLING
        return value < self.value if is_falling else value > self.value


def start_best(config: Config, saved: Best | None) -> Best | None:
    """Returns the best so far; None without trainer.save_best.

    `saved` is that of a checkpoint. One of another metric does not count.
    """
    metric = best_metric(config)
    if saved and saved.metric == metric:
        return saved
    return Best(metric) if metric else None


def best_metric(config: Config) -> str | None:
    """Returns the metric that trainer.save_best means, as in metrics.jsonl; None without it."""
    chosen = config.trainer.save_best
    if chosen is None:
        return None
    names, score = config.data.test_names, "loss"
    if isinstance(config, PPOConfig):
        score = held_out_metric(config.rollout.score, config.data.responses_per_test_prompt)
    if chosen == "auto":
        name = names[0] if len(names) == 1 else EVERY_SET
        return f"test/{name}/{score}" if name else f"test/{score}"
    return f"test/{chosen}/{score}" if chosen in names else f"test/{chosen}"
