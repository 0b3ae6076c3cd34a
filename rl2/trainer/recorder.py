"""When to log, evaluate, save, export and stop. All processes make the same calls; the first writes."""

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from rl2.config.parse import dump
from rl2.report.loggers import Console, JsonLines, Logger, RunName, start_loggers
from rl2.run_folder import Checkpoints, Parts, find_checkpoint, prepare_folder, write_records
from rl2.signals import StopSignal
from rl2.worker import Worker


def resume(config: Any, parts: Parts, num_steps: int) -> int:
    """Restores the parts from the checkpoint that trainer.resume names, if there is one.

    Makes the run folder ready to go on from there. Returns how many steps are done.
    """
    trainer = config.trainer
    checkpoints = Checkpoints(f"{trainer.save_dir}/checkpoints")
    checkpoint = find_checkpoint(trainer.resume, checkpoints.folder)
    step = checkpoints.load(checkpoint, parts) if checkpoint else 0
    if dist.get_rank() == 0:
        prepare_folder(trainer.save_dir, step)
        Path(trainer.save_dir, "config.yaml").write_text(dump(config))
        if checkpoint:
            print(f"resumed from {checkpoint}: {step} of {num_steps} steps are done", flush=True)
    dist.barrier()
    return step


class Recorder:
    """Keeps the books of a run: metrics, transcripts, checkpoints and exports.

    `workers` are exported as their configs say; `parts`, the workers among them, are what a
    checkpoint holds. `start_step` steps are done already.
    """

    def __init__(
        self,
        config: Any,
        *,
        tokenizer: PreTrainedTokenizerBase,
        workers: dict[str, Worker],
        parts: Parts,
        start_step: int,
        num_steps: int,
        stop_signal: StopSignal,
    ):
        trainer = config.trainer
        self.config = config
        self.tokenizer = tokenizer
        self.workers = workers
        self.parts = parts
        self.num_steps = num_steps
        self.stop_signal = stop_signal
        self.folder = Path(trainer.save_dir)
        self.checkpoints = Checkpoints(self.folder / "checkpoints", trainer.keep_checkpoints)
        self.phase_seconds: dict[str, float] = {}
        self.loggers: list[Logger] = []
        self.console: Console | None = None
        if dist.get_rank() == 0:
            run = RunName(self.folder, trainer.project, trainer.experiment_name)
            services = start_loggers(run, disabled={"wandb"} if trainer.disable_wandb else set())
            self.console = Console(start_step, num_steps)
            self.loggers = [JsonLines(self.folder), *services, self.console]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the seconds spent inside to time/`name` of this step."""
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        self.phase_seconds[name] = self.phase_seconds.get(name, 0.0) + seconds

    def log(self, step: int, metrics: dict[str, float]) -> None:
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

    def write_records(self, split: str, step: int, records: list[dict[str, Any]]) -> None:
        """Writes the transcripts of the `split` (train | test) of a step."""
        if dist.get_rank() == 0:
            write_records(self.folder, split, step, records)

    def should_stop(self) -> bool:
        """Whether a signal asked any process to stop after this step."""
        return self.stop_signal.is_requested_anywhere()

    def should_evaluate(self, step: int, is_last: bool) -> bool:
        """Whether to evaluate: at the start, every trainer.test_freq steps and at the end."""
        every = self.config.trainer.test_freq
        return is_last or step == 0 or bool(every and step % every == 0)

    def finish_step(self, step: int, metrics: dict[str, float], is_stopping: bool) -> None:
        """Writes metrics, then the checkpoint and the exports that are due."""
        # In this order a kill in between repeats the step and its line. The other order would lose
        # the line.
        self.log(step, metrics)
        with self.phase("save"):
            every = self.config.trainer.save_freq
            if is_stopping or (every and step % every == 0):
                self.checkpoints.save(step, self.parts, dump(self.config))
            for worker in self.workers.values():
                config = worker.config
                if config.save_freq and step % config.save_freq == 0:
                    folder = f"{config.save_dir}/step_{step}"
                    worker.export(folder, self.tokenizer, with_optimizer=config.save_optimizer)

    def finish(self, worker: Worker) -> None:
        """Exports `worker` as the final model and ends the process group."""
        folder = f"{self.folder}/model"
        worker.export(folder, self.tokenizer)
        if self.console is not None:
            self.console.print(f"model saved to {folder}")
        for logger in reversed(self.loggers):
            logger.close()
        dist.destroy_process_group()


def peak_memory() -> float:
    """The most memory that this process has used, in GiB: the GPU's if there is one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
