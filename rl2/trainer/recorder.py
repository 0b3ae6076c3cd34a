"""When to log, evaluate, save, export and stop.

All processes make the same calls; the first one writes.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from rl2.config.parse import dump
from rl2.report.loggers import MetricsLog, RunInfo
from rl2.run_folder import Checkpoints, Parts, find_checkpoint, prepare_folder
from rl2.signals import StopSignal
from rl2.worker import Worker

Evaluate = Callable[[int], dict[str, float]]  # step -> metrics of the test data


@dataclass
class Recorder:
    """Logs, evaluates, saves and exports a run when it is due.

    Call `resume` first, then `begin`.
    """

    config: Any
    tokenizer: PreTrainedTokenizerBase
    workers: dict[str, Worker]  # exported as their configs say
    parts: Parts  # what a checkpoint holds, the workers among them
    num_steps: int
    device: torch.device

    def resume(self) -> None:
        """Restores the parts from the checkpoint that trainer.resume names, if there is one.

        Makes the run folder ready to go on from there.
        """
        trainer = self.config.trainer
        self.folder = Path(trainer.save_dir)
        self.checkpoints = Checkpoints(self.folder / "checkpoints", trainer.keep_checkpoints)
        checkpoint = find_checkpoint(trainer.resume, self.checkpoints.folder)
        # The number of steps that are done.
        self.start_step = self.checkpoints.load(checkpoint, self.parts) if checkpoint else 0
        if dist.get_rank() == 0:
            prepare_folder(self.folder, self.start_step)
            (self.folder / "config.yaml").write_text(dump(self.config))
            if checkpoint:
                done = f"{self.start_step} of {self.num_steps} steps are done"
                print(f"resumed from {checkpoint}: {done}", flush=True)
        dist.barrier()
        run = RunInfo(self.folder, asdict(self.config))
        self.metrics_log = MetricsLog(run, self.start_step, self.num_steps)
        self.phase = self.metrics_log.phase

    def begin(self, evaluate: Evaluate | None) -> None:
        """Evaluates before the first step, unless the run goes on from a checkpoint.

        `evaluate(step)` returns the metrics of the test data; None where there is none.
        """
        self.evaluate = evaluate
        if self.start_step == 0:
            metrics = self._evaluate_if_due(0)
            if metrics:
                self.metrics_log.write(0, metrics)
        self.stop_signal = StopSignal(self.device)

    def remaining_steps(self) -> range:
        """The numbers of the steps that are not done yet; the first step is 1."""
        return range(self.start_step + 1, self.num_steps + 1)

    def finish_step(self, step: int, metrics: dict[str, float]) -> bool:
        """Evaluates, logs, saves and exports where that is due.

        Returns whether a signal asked any process to stop after this step. Such a step is not
        evaluated: a machine that takes its processes away gives them seconds.
        """
        if not self.stop_signal.is_requested_anywhere():
            metrics = metrics | self._evaluate_if_due(step)
        is_stopping = self.stop_signal.is_requested_anywhere()
        # The line of a step is written before its checkpoint. So a kill in between repeats the step
        # and its line; in the other order the line would be lost.
        self.metrics_log.write(step, metrics)
        with self.phase("save"):
            # Weights that may have diverged do not push older ones out of the checkpoints.
            is_good = not self.metrics_log.health.is_diverging
            if is_stopping or is_good and is_due(step, self.config.trainer.save_freq):
                self.checkpoints.save(step, self.parts, dump(self.config))
            for worker in self.workers.values():
                if is_due(step, worker.config.save_freq):
                    folder = f"{worker.config.save_dir}/step_{step}"
                    worker.export(folder, self.tokenizer, worker.config.save_optimizer)
        return is_stopping

    def _evaluate_if_due(self, step: int) -> dict[str, float]:
        """Metrics as test/*: at the start, every trainer.test_freq steps and at the end."""
        due = step in (0, self.num_steps) or is_due(step, self.config.trainer.test_freq)
        if self.evaluate is None or not due:
            return {}
        with self.phase("test"):
            metrics = self.evaluate(step)
        return {f"test/{name}": value for name, value in metrics.items()}

    def finish(self, worker: Worker) -> None:
        """Exports `worker` as the final model and ends the process group."""
        folder = f"{self.folder}/model"
        worker.export(folder, self.tokenizer)
        self.metrics_log.close()
        if dist.get_rank() == 0:
            print(f"model saved to {folder}", flush=True)
        dist.destroy_process_group()


def is_due(step: int, every: int | None) -> bool:
    """Whether something that happens every so many steps (None = never) happens at this step."""
    return bool(every) and step % every == 0
