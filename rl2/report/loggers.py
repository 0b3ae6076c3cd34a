"""What a person and a program see of a run: metrics.jsonl, the console, and services such as wandb.

A service is a function in LOGGERS. It starts the service for a run and returns a Logger, or None
where the service cannot be used, after printing why.
"""

import json
import math
import os
import resource
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
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


class MetricsLog:
    """Times the phases of a step and writes its metrics to all loggers.

    All processes make the same calls; the first one has the loggers. `start_step` of `num_steps`
    are done already. `disabled` are names of LOGGERS that are not started.
    """

    def __init__(self, run: RunName, start_step: int, num_steps: int, disabled: set[str]):
        self.phase_seconds: dict[str, float] = {}
        self.loggers: list[Logger] = []
        if dist.get_rank() == 0:
            started = [start(run) for name, start in LOGGERS.items() if name not in disabled]
            services = [logger for logger in started if logger is not None]
            self.loggers = [JsonLines(run.folder), *services, Console(start_step, num_steps)]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the seconds spent inside to time/`name` of this step."""
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        self.phase_seconds[name] = self.phase_seconds.get(name, 0.0) + seconds

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Writes the metrics of a finished step, with its times and the peak of memory."""
        times = {f"time/{name}": seconds for name, seconds in self.phase_seconds.items()}
        self.phase_seconds = {}
        step_seconds = sum(times.values())
        line = {"step": step, **metrics, **times}
        line["time/step"] = step_seconds
        line["memory/peak_gib"] = peak_memory()
        num_tokens = metrics.get("tokens/sampled") or metrics.get("tokens/total")
        if num_tokens:
            line["tokens/per_second"] = num_tokens / step_seconds
        for logger in self.loggers:
            logger.log(step, line)

    def close(self) -> None:
        for logger in reversed(self.loggers):
            logger.close()


def peak_memory() -> float:
    """The most memory that this process has used, in GiB: the GPU's if there is one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


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
