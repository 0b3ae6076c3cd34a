"""What a person and a program see of a run: metrics.jsonl, the console, and services such as wandb.

A service is a function in LOGGERS, by its name in trainer.loggers. It starts the service for a run
and returns a Logger, or None where the service cannot be used, after printing why. Services get
transcripts, so none is used unless it is named.
"""

import ctypes
import inspect
import json
import os
import resource
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import psutil
import torch
import torch.distributed as dist

from rl2 import cleanup, progress
from rl2.parallel.device import GIB
from rl2.report.console import Console, describe_start
from rl2.report.health import Health, Metrics, Samples
from rl2.report.page import write_page
from rl2.report.saved import read_lines
from rl2.run.records import MetricsFile, Records
from rl2.run.weights_hash import hash_weights

WANDB_SECONDS = 150.0  # it gives up by itself: after 107 s where there was no network
SAMPLE_FREQ = 10  # Services get samples every so many steps, and of steps with an evaluation.


class Logger(Protocol):
    """What every logger does. Only the first process has loggers."""

    def log(self, step: int, metrics: Metrics, samples: Samples) -> None:
        """Writes the metrics of a finished step, and the samples that a person may look at."""

    def close(self) -> None:
        """Ends the service. Nothing is logged after it."""


@dataclass(frozen=True)
class RunInfo:
    """What a service may know of a run."""

    folder: Path  # where the run writes
    config: dict[str, Any]  # all keys, as nested sections
    start_step: int = 0  # the steps that are done already

    def find_id(self, service: str) -> str:
        """The run's id in a service. A run that is resumed finds it in its folder."""
        file = self.folder / f"{service}_id"
        if not file.exists():
            file.write_text(secrets.token_hex(8))
        return file.read_text().strip()


class Report:
    """report.html in the run folder: at the end, and every `freq` steps if that is not None.

    A run that an error ends after its first step has a report too.
    """

    def __init__(self, folder: Path, freq: int | None):
        self.folder = folder
        self.freq = freq
        self.is_due_at_exit = False

    def log(self, step: int, metrics: Metrics, samples: Samples) -> None:
        if not self.is_due_at_exit:
            cleanup.register(self._write)
            self.is_due_at_exit = True
        if self.freq and step % self.freq == 0:
            self._write()

    def close(self) -> None:
        cleanup.unregister(self._write)
        self._write()

    def _write(self) -> None:
        try:
            write_page([self.folder], self.folder / "report.html")
        except Exception as error:  # the run itself is well
            print(f"warning: report.html could not be written: {error!r}")


class Wandb:
    """A run of Weights & Biases."""

    def __init__(self, run: Any, table: Callable[..., Any]):
        self.run = run
        self.table = table

    def log(self, step: int, metrics: Metrics, samples: Samples) -> None:
        tables = make_tables(samples, self.table)
        self.run.log({**metrics, **tables})  # with "step" among them

    def close(self) -> None:
        self.run.finish()


def start_wandb(run: RunInfo) -> Logger | None:
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
    if not (os.environ.get("WANDB_MODE") or _is_logged_in(wandb)):
        print(f"wandb is not logged in: metrics go to metrics.jsonl only (wandb login, {remedy})")
        return None
    trainer = run.config["trainer"]
    try:
        with progress.expecting(WANDB_SECONDS):
            started = wandb.init(
                dir=str(run.folder),
                id=run.find_id("wandb"),
                resume="allow",
                project=trainer["project"],
                name=trainer["experiment_name"],
                config=run.config,
            )
    except wandb.Error as error:  # no network, or the run of this id was deleted there
        print(f"wandb does not start: metrics go to metrics.jsonl only ({error}; {remedy})")
        return None
    # wandb's own count of steps only rises: it would drop the steps that a resumed run repeats.
    started.define_metric("*", step_metric="step")
    return Wandb(started, wandb.Table)


def _is_logged_in(wandb: ModuleType) -> bool:
    """Whether there is a key, without asking for one."""
    if "prompt" in inspect.signature(wandb.login).parameters:
        return wandb.login(prompt=False, verify=False)
    return bool(wandb.api.api_key)  # deprecated where `login` has `prompt`


class TensorBoard:
    """Event files in the run folder. The steps that a resumed run repeats replace the old ones."""

    def __init__(self, run: RunInfo):
        from torch.utils.tensorboard import SummaryWriter

        first_step = run.start_step + 1 if run.start_step else None
        self.writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=first_step)
        self.writer.add_text("config", _as_code(run.config), run.start_step)

    def log(self, step: int, metrics: Metrics, samples: Samples) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        for split, rows in samples.items():
            self.writer.add_text(f"samples/{split}", _as_code(rows), step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


def _as_code(value: Any) -> str:
    """Text of Markdown that shows the value as JSON."""
    text = json.dumps(value, indent=2, ensure_ascii=False, default=str)
    return "".join(f"    {line}\n" for line in text.splitlines())


class Trackio:
    """A run of trackio, on this machine unless its variables (TRACKIO_SPACE_ID) say otherwise."""

    def __init__(self, run: RunInfo):
        import trackio

        trainer = run.config["trainer"]
        self.table = trackio.Table
        self.run = trackio.init(
            project=trainer["project"],
            name=f"{trainer['experiment_name']}-{run.find_id('trackio')}",
            config=run.config,
            resume="allow",
            embed=False,
        )

    def log(self, step: int, metrics: Metrics, samples: Samples) -> None:
        line = {**metrics, **make_tables(samples, self.table)}
        del line["step"]  # which trackio would rename
        self.run.log(line, step=step)

    def close(self) -> None:
        self.run.finish()


LOGGERS: dict[str, Callable[[RunInfo], Logger | None]] = {
    "wandb": start_wandb,
    "tensorboard": TensorBoard,
    "trackio": Trackio,
}


def make_tables(samples: Samples, table: Callable[..., Any]) -> dict[str, Any]:
    """The samples as tables of a service: samples/SPLIT -> table. All cells are texts."""
    import pandas

    tables = {}
    for split, rows in samples.items():
        tables[f"samples/{split}"] = table(dataframe=pandas.DataFrame(rows).astype(str))
    return tables


def make_samples(records: Records) -> Samples:
    """Returns the samples of the transcripts of a step, by split."""
    samples: Samples = {}
    for split in sorted(records):
        if records[split]:
            samples[split] = [_to_row(record) for record in records[split]]
    return samples


def _to_row(record: dict[str, Any]) -> dict[str, Any]:
    texts = [f"{message['role']}: {message.get('content')}" for message in record["messages"]]
    return {
        "conversation": "\n\n".join(texts),
        "answer": record["row"].get("answer"),
        "reward": record["reward"],
        "finish_reason": record["finish_reason"],
    }


def release_freed_memory() -> None:
    """Gives the host memory that is free in this process back to the system.

    glibc keeps small blocks. The samples of a step are small blocks: together they are as large as
    the batch that they become. Other C libraries have no such call.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)


class MetricsLog:
    """Times the phases of a step and writes its metrics to all loggers.

    All processes make the same calls; the first one has the loggers. `folder` and `config` are
    those of the run; `start_step` of `num_steps` are done already. `workers` are those whose
    weights change, by name.
    """

    def __init__(
        self,
        folder: Path,
        config: Any,
        start_step: int,
        num_steps: int,
        workers: dict[str, Any] | None = None,
    ):
        self.folder = folder
        self.workers = workers or {}
        self.phase_seconds: dict[str, float] = {}
        self.file: MetricsFile | None = None
        self.loggers: list[Logger] = []
        self.has_services = False
        self.health = Health(folder, config, start_step)
        self.warnings: dict[str, str] = {}  # since the last line, reasons by the name of a problem
        self.console: Console | None = None
        if dist.get_rank() == 0:
            run = RunInfo(folder, asdict(config), start_step)
            names = set(config.trainer.loggers)
            if config.trainer.disable_wandb:
                names.discard("wandb")
            started = [start(run) for name, start in LOGGERS.items() if name in names]
            services = [logger for logger in started if logger is not None]
            self.has_services = bool(services)
            self.console = Console(config, start_step, num_steps)
            report = Report(folder, config.trainer.report_freq)
            self.file = MetricsFile(folder)
            self.loggers = [report, *services, self.console]
            cleanup.register(self._abandon, at_exit=False)
        self._print(describe_start(config))
        self.last_write = time.perf_counter()
        self.last_cpu_seconds = time.process_time()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the seconds spent inside to time/`name` of this step.

        Beside a GPU the host's freed memory goes back to the system. A CPU soon needs it again.
        """
        progress.enter(name)
        start, cpu_start = time.perf_counter(), time.process_time()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            release_freed_memory()
        seconds = time.perf_counter() - start
        self.phase_seconds[name] = self.phase_seconds.get(name, 0.0) + seconds
        if name == "update" and not torch.cuda.is_available():
            cpu_seconds = time.process_time() - cpu_start
            for text in self.health.check_cores(seconds, cpu_seconds, torch.get_num_threads()):
                self.warnings["waited for cores"] = text
                self._print([text])

    def write(self, step: int, metrics: Metrics, records: Records | None = None) -> None:
        """Writes the metrics of a finished step, with its times and the peak of memory.

        Services may get samples of `records`, the first transcripts that the step has written. The
        file gets the hashes of the weights and the warnings too.
        Prints what is wrong with the step, and raises RuntimeError if the run has diverged.
        A step lasts from the line before its own, or from when this log was made, to its own line.
        """
        hashes = self._hash_weights()
        now = time.perf_counter()
        step_seconds = now - self.last_write
        self.last_write = now
        times = {f"time/{name}": seconds for name, seconds in self.phase_seconds.items()}
        self.phase_seconds = {}
        line = {"step": step, **metrics, **times}
        line["time/other"] = step_seconds - sum(times.values())
        line["time/step"] = step_seconds
        line["memory/peak_gib"] = peak_memory()
        num_tokens = metrics.get("tokens/sampled") or metrics.get("tokens/total")
        if num_tokens:
            line["tokens/per_second"] = num_tokens / step_seconds
        cpu_seconds = time.process_time()
        line["resources/cpu_cores"] = (cpu_seconds - self.last_cpu_seconds) / step_seconds
        self.last_cpu_seconds = cpu_seconds
        line |= measure_machine(self.folder)
        is_evaluated = any(name.startswith("test/") for name in metrics)
        samples: Samples = {}
        if self.has_services and (is_evaluated or step % SAMPLE_FREQ == 0):
            samples = make_samples(records or {})
        problems = self.health.check(line)
        self.warnings |= {problem.name: problem.reason for problem in problems}
        if self.file is not None:
            self.file.write(line, hashes, self.warnings)
        self.warnings = {}
        for logger in self.loggers:
            logger.log(step, line, samples)
        self._print(self.health.describe(step, problems))
        self.health.stop_if_diverged()

    def complete(self, step: int, metrics: Metrics, records: Records) -> None:
        """Adds the metrics of an evaluation to the line of its step, which a stop left without.

        The services get the whole line once more, with samples of the evaluation's `records`.
        """
        seconds = self.phase_seconds.pop("test", 0.0)
        if self.file is not None:
            line = self.file.complete(step, {**metrics, "time/test": seconds})
            samples = make_samples(records) if self.has_services else {}
            for logger in self.loggers:
                logger.log(step, line, samples)
        self.last_write = time.perf_counter()
        self.last_cpu_seconds = time.process_time()

    def _hash_weights(self) -> dict[str, str]:
        if not self.workers:
            return {}
        with self.phase("hash"):
            return hash_weights(self.workers)

    def close(self) -> None:
        lines = read_lines(self.folder / "metrics.jsonl")[0] if self.file is not None else []
        self._print(self.health.summary(lines))
        cleanup.unregister(self._abandon)
        for logger in reversed(self.loggers):
            logger.close()

    def _abandon(self) -> None:
        """Ends the services and the bar of a run that fails; `Report` cares for itself."""
        for logger in reversed(self.loggers):
            if not isinstance(logger, Report):
                logger.close()

    def _print(self, sentences: list[str]) -> None:
        """Prints the sentences on the first process, above the progress bar."""
        if self.console is not None:
            for sentence in sentences:
                self.console.print(sentence)


def peak_memory() -> float:
    """The most memory that this process has used, in GiB: the GPU's if there is one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure_machine(folder: Path) -> dict[str, float]:
    """What this machine has in use now, as metrics in GiB; of its disks, that of `folder`."""
    memory = psutil.virtual_memory()
    used = {
        "resources/host_gib": (memory.total - memory.available) / GIB,
        "resources/disk_free_gib": psutil.disk_usage(str(folder)).free / GIB,
    }
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        used["resources/gpu_gib"] = (total - free) / GIB
    return used
