"""What a person and a program see of a run: metrics.jsonl, the console, and services such as wandb.

A service sees the config and the metrics, so none is used unless trainer.loggers names it.
"""

import os
import resource
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rl2 import cleanup, progress
from rl2.config.schema import Config
from rl2.parallel.device import GIB
from rl2.report.console import Console, warn_of_checkpoints
from rl2.report.health import Health, Metrics
from rl2.report.page import write_page
from rl2.run.records import MetricsFile, read_lines
from rl2.run.weights_hash import hash_weights

Keys = dict[str, Any]  # all of a config, as nested sections
WANDB_SECONDS = 150.0  # it gives up by itself: after 107 s where there was no network


class Wandb:
    """A run of Weights & Biases. A run that is resumed finds its id in its folder."""

    def __init__(self, folder: Path, config: Keys):
        import wandb

        if not (os.environ.get("WANDB_MODE") or wandb.login(prompt=False, verify=False)):
            raise RuntimeError("it is not logged in")
        id_file = folder / "wandb_id"
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(8))
        with progress.expecting(WANDB_SECONDS):
            self.run = wandb.init(
                dir=str(folder),
                id=id_file.read_text().strip(),
                resume="allow",
                project=config["trainer"]["project"],
                name=config["trainer"]["experiment_name"],
                config=config,
            )
        # Its own count of steps only rises: it would drop the steps that a resumed run repeats.
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Metrics) -> None:
        self.run.log(metrics)  # with "step" among them

    def close(self) -> None:
        self.run.finish()


def start_wandb(folder: Path, config: Keys) -> Wandb | None:
    """Weights & Biases; None, after printing why, where it cannot be used."""
    try:
        return Wandb(folder, config)
    except Exception as error:  # also: the run of this id was deleted there
        print(
            f"wandb does not start, so metrics go to metrics.jsonl only: {error} "
            "(pip install -U wandb, wandb login, or trainer.disable_wandb=true)"
        )
        return None


class MetricsLog:
    """Times the phases of a step and writes its metrics to all loggers.

    All processes make the same calls; the first one has the loggers. `folder` and `config` are
    those of the run; `start_step` of `num_steps` are done already. `workers` are those whose
    weights change, by name. report.html is written at the end, also at that of a run that fails.
    """

    def __init__(
        self,
        folder: Path,
        config: Config,
        start_step: int,
        num_steps: int,
        workers: dict[str, Any] | None = None,
    ):
        self.folder = folder
        self.workers = workers or {}
        self.phase_seconds: dict[str, float] = {}
        self.file: MetricsFile | None = None
        self.loggers: list[Console | Wandb] = []
        self.health = Health(folder, config, start_step)
        if dist.get_rank() == 0:
            if "wandb" in config.trainer.loggers and not config.trainer.disable_wandb:
                if logger := start_wandb(folder, asdict(config)):
                    self.loggers.append(logger)
            self.loggers.append(Console(config, num_steps))
            self.file = MetricsFile(folder)
            cleanup.register(self._write_report)
            cleanup.register(self._close_loggers, at_exit=False)
        self._print(warn_of_checkpoints(config))
        self.last_write = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the seconds spent inside to time/`name` of this step."""
        progress.enter(name)
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        self.phase_seconds[name] = self.phase_seconds.get(name, 0.0) + seconds

    def write(self, step: int, metrics: Metrics) -> None:
        """Writes the metrics of a finished step, with its times and the peak of memory.

        The file gets the hashes of the weights and the warnings too.
        Prints what is wrong with the step, and raises RuntimeError if the run has diverged.
        A step lasts from the line before its own, or from when this log was made, to its own line.
        """
        hashes = {}
        if self.workers:
            with self.phase("hash"):
                hashes = hash_weights(self.workers)
        now = time.perf_counter()
        step_seconds = now - self.last_write
        self.last_write = now
        times = {f"time/{name}": seconds for name, seconds in self.phase_seconds.items()}
        self.phase_seconds = {}
        line: Metrics = {"step": step}
        line |= metrics | times
        line["time/other"] = step_seconds - sum(times.values())
        line["time/step"] = step_seconds
        num_tokens = metrics.get("tokens/sampled") or metrics.get("tokens/total")
        if num_tokens:
            line["tokens/per_second"] = num_tokens / step_seconds
        line["memory/peak_gib"] = measure_peak_gib()
        problems = self.health.check(line)
        if self.file is not None:
            self.file.write(line, hashes, {problem.name: problem.reason for problem in problems})
        for logger in self.loggers:
            logger.log(step, line)
        self._print(self.health.describe(step, problems))
        self.health.stop_if_diverged()

    def complete(self, step: int, metrics: Metrics) -> None:
        """Adds the metrics of an evaluation to the line of its step, which a stop left without.

        The services get the whole line once more.
        """
        seconds = self.phase_seconds.pop("test", 0.0)
        if self.file is not None:
            line = self.file.complete(step, metrics | {"time/test": seconds})
            for logger in self.loggers:
                logger.log(step, line)
        self.last_write = time.perf_counter()

    def close(self) -> None:
        if self.file is not None:
            self._print(self.health.summary(read_lines(self.file.path)[0]))
        cleanup.unregister(self._close_loggers)
        cleanup.unregister(self._write_report)
        self._close_loggers()
        self._write_report()

    def _close_loggers(self) -> None:
        for logger in reversed(self.loggers):
            logger.close()

    def _write_report(self) -> None:
        if self.file is None or not self.file.path.exists():
            return
        try:
            write_page([self.folder], self.folder / "report.html")
        except Exception as error:  # the run itself is well
            print(f"warning: report.html could not be written: {error!r}")

    def _print(self, sentences: list[str]) -> None:
        """Prints the sentences on the first process."""
        if self.file is not None:
            for sentence in sentences:
                print(sentence)


def measure_peak_gib() -> float:
    """The peak of this process's memory: that of its GPU, if there is one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
