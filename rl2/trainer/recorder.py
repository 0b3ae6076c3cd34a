"""When to log, evaluate, save, export and stop. All processes make the same calls; the first writes."""

import resource
import time
from collections.abc import Callable, Iterator
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

Evaluate = Callable[[int], dict[str, float]]  # step -> metrics of the test data


class Recorder:
    """Keeps the books of a run: metrics, transcripts, checkpoints and exports.

    `workers` are exported as their configs say. `parts`, the workers among them, are what a
    checkpoint holds. Call `resume` first, then `begin`.
    """

    def __init__(
        self,
        config: Any,
        tokenizer: PreTrainedTokenizerBase,
        workers: dict[str, Worker],
        parts: Parts,
        num_steps: int,
        device: torch.device,
    ):
        self.config = config
        self.tokenizer = tokenizer
        self.workers = workers
        self.parts = parts
        self.num_steps = num_steps
        self.folder = Path(config.trainer.save_dir)
        keep = config.trainer.keep_checkpoints
        self.checkpoints = Checkpoints(self.folder / "checkpoints", keep)
        self.stop_signal = StopSignal(device)
        self.evaluate: Evaluate | None = None
        self.phase_seconds: dict[str, float] = {}
        self.loggers: list[Logger] = []

    def resume(self) -> int:
        """Restores the parts from the checkpoint that trainer.resume names, if there is one.

        Makes the run folder ready to go on from there. Returns how many steps are done.
        """
        checkpoint = find_checkpoint(self.config.trainer.resume, self.checkpoints.folder)
        step = self.checkpoints.load(checkpoint, self.parts) if checkpoint else 0
        if dist.get_rank() == 0:
            prepare_folder(self.folder, step)
            (self.folder / "config.yaml").write_text(dump(self.config))
            if checkpoint:
                done = f"{step} of {self.num_steps} steps are done"
                print(f"resumed from {checkpoint}: {done}", flush=True)
            self.loggers = self._start_loggers(step)
        dist.barrier()
        return step

    def _start_loggers(self, start_step: int) -> list[Logger]:
        trainer = self.config.trainer
        run = RunName(self.folder, trainer.project, trainer.experiment_name)
        services = start_loggers(run, disabled={"wandb"} if trainer.disable_wandb else set())
        return [JsonLines(self.folder), *services, Console(start_step, self.num_steps)]

    def begin(self, start_step: int, evaluate: Evaluate | None) -> None:
        """Evaluates before the first step, unless the run goes on from a checkpoint.

        `evaluate(step)` returns the metrics of the test data; None where there is none.
        """
        self.evaluate = evaluate
        if start_step == 0:
            metrics = self._evaluate_if_due(0)
            if metrics:
                self.log(0, metrics)

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

    def finish_step(self, step: int, metrics: dict[str, float]) -> bool:
        """Evaluates, logs, saves and exports where that is due.

        Returns whether a signal asked any process to stop after this step.
        """
        is_stopping = self.stop_signal.is_requested_anywhere()
        is_last = is_stopping or step == self.num_steps
        # The line of a step is written before its checkpoint. So a kill in between repeats the step
        # and its line; in the other order the line would be lost.
        self.log(step, metrics | self._evaluate_if_due(step, is_last))
        with self.phase("save"):
            save_freq = self.config.trainer.save_freq
            if is_stopping or is_due(step, save_freq):
                self.checkpoints.save(step, self.parts, dump(self.config))
            for worker in self.workers.values():
                config = worker.config
                if is_due(step, config.save_freq):
                    folder = f"{config.save_dir}/step_{step}"
                    worker.export(folder, self.tokenizer, with_optimizer=config.save_optimizer)
        return is_stopping

    def _evaluate_if_due(self, step: int, is_last: bool = False) -> dict[str, float]:
        """Metrics as test/*: at the start, every trainer.test_freq steps and at the end."""
        test_freq = self.config.trainer.test_freq
        if self.evaluate is None or not (is_last or step == 0 or is_due(step, test_freq)):
            return {}
        with self.phase("test"):
            metrics = self.evaluate(step)
        return {f"test/{name}": value for name, value in metrics.items()}

    def finish(self, worker: Worker) -> None:
        """Exports `worker` as the final model and ends the process group."""
        folder = f"{self.folder}/model"
        worker.export(folder, self.tokenizer)
        for logger in reversed(self.loggers):
            logger.close()
        if dist.get_rank() == 0:
            print(f"model saved to {folder}", flush=True)
        dist.destroy_process_group()


def is_due(step: int, every: int | None) -> bool:
    """Whether something that happens every so many steps (None = never) happens at this step."""
    return bool(every) and step % every == 0


def peak_memory() -> float:
    """The most memory that this process has used, in GiB: the GPU's if there is one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
