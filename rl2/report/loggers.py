"""Where metrics go: metrics.jsonl, the console, and services such as wandb.

A service is a function in LOGGERS. It starts the service for a run and returns a Logger, or None
where the service cannot be used, after printing why.
"""

import json
import math
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

RECENT_STEPS = 10  # whose mean time tells the time left


class Logger(Protocol):
    """What every logger does. Only the first process has loggers."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Writes the metrics of a finished step."""

    def close(self) -> None:
        """Ends the service. Nothing is logged after it."""


@dataclass(frozen=True)
class RunName:
    """What services call a run."""

    folder: Path  # where the run writes
    project: str
    experiment: str


class JsonLines:
    """metrics.jsonl in the run folder: one object a step."""

    def __init__(self, folder: Path):
        self.path = folder / "metrics.jsonl"

    def log(self, step: int, metrics: dict[str, float]) -> None:
        line = {name: _to_json_number(value) for name, value in metrics.items()}
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            # A checkpoint of this step may follow, and must not reach the disk before the line.
            os.fsync(file.fileno())

    def close(self) -> None:
        pass


class Console:
    """A progress bar, and one line a step above it. `start` steps are done already."""

    def __init__(self, start: int, num_steps: int):
        self.num_steps = num_steps
        self.recent_seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self.bar = tqdm(
            total=num_steps,
            initial=start,
            unit="step",
            dynamic_ncols=True,
            disable=None,
            smoothing=0.1,
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.bar.update(step - self.bar.n)
        self.recent_seconds.append(metrics["time/step"])
        mean_seconds = sum(self.recent_seconds) / len(self.recent_seconds)
        left = timedelta(seconds=round(mean_seconds * (self.num_steps - step)))
        self.print(f"{_console_line(metrics, self.num_steps)}  {left} left")

    def print(self, text: str) -> None:
        self.bar.write(text)

    def close(self) -> None:
        self.bar.close()


class Wandb:
    """A run of Weights & Biases."""

    def __init__(self, run: Any):
        self.run = run

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.run.log(metrics, step=step)

    def close(self) -> None:
        self.run.finish()


def start_wandb(run: RunName) -> Logger | None:
    """Weights & Biases, where it is installed and logged in."""
    remedy = "or trainer.disable_wandb=true"
    try:
        import wandb
    except ImportError:
        print(
            "wandb is not installed: metrics go to metrics.jsonl only "
            f"(pip install wandb, {remedy})"
        )
        return None
    if not (wandb.api.api_key or os.environ.get("WANDB_MODE")):
        print(f"wandb is not logged in: metrics go to metrics.jsonl only (wandb login, {remedy})")
        return None
    started = wandb.init(
        dir=str(run.folder), resume="allow", project=run.project, name=run.experiment
    )
    return Wandb(started)


LOGGERS: dict[str, Callable[[RunName], Logger | None]] = {"wandb": start_wandb}


def start_loggers(run: RunName, disabled: set[str]) -> list[Logger]:
    """The services that can be used, but for the `disabled` ones."""
    started = [start(run) for name, start in LOGGERS.items() if name not in disabled]
    return [logger for logger in started if logger is not None]


# (metric, its name on the console, its format), in the order of the line.
CONSOLE_METRICS = [
    ("reward/mean", "reward", ".3f"),
    ("test/reward/mean", "test reward", ".3f"),
    ("rollout/length", "length", ".1f"),
    ("actor/loss", "loss", "+.4f"),
    ("actor/kl", "kl", ".4f"),
    ("actor/accuracy", "actor/accuracy", ".3f"),
    ("critic/accuracy", "critic/accuracy", ".3f"),
    ("test/accuracy", "test/accuracy", ".3f"),
    ("test/loss", "test loss", ".4f"),
    ("test/perplexity", "perplexity", ".3f"),
    ("actor/grad_norm", "grad", ".2f"),
    ("tokens/per_second", "tok/s", ".0f"),
]


def _console_line(metrics: dict[str, float], num_steps: int) -> str:
    values = []
    for metric, name, number_format in CONSOLE_METRICS:
        if metric in metrics:
            values.append(f"{name} {metrics[metric]:{number_format}}")
    phases = []
    for metric, seconds in metrics.items():
        if metric.startswith("time/") and metric != "time/step" and seconds >= 0.05:
            phases.append(f"{metric.removeprefix('time/')} {seconds:.1f}")
    step = f"step {metrics['step']}/{num_steps}"
    return f"{step}  {'  '.join(values)}  {metrics['time/step']:.1f}s ({' '.join(phases)})"


def _to_json_number(value: float) -> float | None:
    """A number that JSON can hold: None for NaN and infinities."""
    if not isinstance(value, int):
        value = float(value)
    return value if math.isfinite(value) else None
