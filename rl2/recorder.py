"""What happens at the end of a step: a line of metrics, and what watches the steps.

All processes make the same calls; the first one writes.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful
from transformers import PreTrainedTokenizerBase

from rl2.parallel.mesh import any_rank
from rl2.parallel.offload import local_shard
from rl2.parallel.rank import is_first_rank
from rl2.report.health import Metrics
from rl2.report.loggers import MetricsLog
from rl2.run.folder import RunFolder
from rl2.run.records import Record
from rl2.run.signals import StopSignal, freeze_loaded
from rl2.run.start import BEST_MODEL
from rl2.worker import Worker

Evaluate = Callable[[int], Metrics]  # step -> metrics of the test data


class Watcher(NamedTuple):
    """What follows some steps, after their line of metrics. All processes ask and run it."""

    due: Callable[[int], bool]
    run: Callable[[int], None]


class Recorder:
    """Logs, evaluates, saves and exports a run when it is due.

    Before the first step, `begin` evaluates and starts to listen for signals.
    """

    def __init__(
        self,
        folder: RunFolder,
        tokenizer: PreTrainedTokenizerBase,
        workers: dict[str, Worker],
        objects: dict[str, Stateful],
        *,
        num_steps: int,
        device: torch.device,
        evaluate: Evaluate | None,
    ):
        """Restores workers and data from the checkpoint of the folder, if there is one.

        `workers` are exported as their configs say; a checkpoint has the state of them and of
        `objects`, the data among them. `evaluate(step)` returns the metrics of the test data; None
        without any.
        """
        self.folder = folder
        self.config = folder.config
        self.tokenizer = tokenizer
        self.workers = workers
        self.objects: dict[str, Stateful] = workers | objects
        self.device = device
        self.evaluate = evaluate
        self.start_step = self.last_step = folder.start.step  # the steps that are done
        self.num_steps = num_steps
        folder.resume(self.objects, num_steps)
        self.metrics_log = MetricsLog(folder.path, self.config, self.start_step, num_steps, workers)
        self.phase = self.metrics_log.phase
        self.health = self.metrics_log.health
        self.stop_signal = StopSignal()
        self.is_stopping = False  # after this step, as a signal asks
        self.lacks_test = False  # this step, which the launch that resumes makes up for
        self.watchers = [
            Watcher(self._is_checkpoint_due, self._save),
            Watcher(self._is_best, self._export_best),
        ]
        for worker in workers.values():
            due = partial(self._is_export_due, worker)
            self.watchers.append(Watcher(due, partial(self._export, worker)))

    def begin(self) -> None:
        """Evaluates before the first step, or what a stopped run left out at the resumed step.

        From here on a signal lets the current step finish.
        """
        step, start = self.start_step, self.folder.start
        freeze_loaded()
        if self._is_test_due(step) and (step == 0 or start.lacks_test):
            tests = self._evaluate(step)
            self._judge(step, tests)  # 0 is no candidate, but a metric that is not there is found
            log = self.metrics_log.write if step == 0 else self.metrics_log.complete
            log(step, tests)
        if self._is_best(step) and start.best_model_step != step:
            self._export_best(step)  # it was left out, or a kill came before it
        self.stop_signal.listen()

    def remaining_steps(self) -> Iterator[int]:
        """Yields the numbers of the steps that are not done yet; the first step is 1."""
        while self.last_step < self.num_steps:
            yield self.last_step + 1

    def finish_step(
        self,
        step: int,
        metrics: Metrics,
        records: Iterable[Record] | None = None,
        tokens: dict[str, np.ndarray] | None = None,
    ) -> bool:
        """Evaluates, logs, saves and exports where that is due.

        `records` are the transcripts of the step's rollout, `tokens` those to keep of it, see
        `RunFolder.write_records`.

        Returns whether a signal asked any process to stop after this step. The evaluation of such
        a step is left to the next launch: a machine that takes its processes away gives them
        seconds.
        """
        self.is_stopping = self.stop_signal.is_requested_anywhere(self.device)
        self.lacks_test = self.is_stopping and self._is_test_due(step)
        if self.lacks_test and is_first_rank():
            print(f"the evaluation of step {step} is left out; the same command does it first")
        if self._is_test_due(step) and not self.is_stopping:
            tests = self._evaluate(step)
            metrics = metrics | tests
            self._judge(step, tests)
            self.is_stopping = self.stop_signal.is_requested_anywhere(self.device)
        # From here on the other ranks generate, unless this step is saved; only the first writes.
        if records is not None:
            self.folder.write_records("train", step, records, tokens)
        # The line of a step is written before its checkpoint. So a kill in between repeats the step
        # and its line; in the other order the line would be lost.
        self.metrics_log.write(step, metrics)
        with self.phase("save"):
            self.folder.prune(self.health.proven_step)
            for watcher in self.watchers:
                if watcher.due(step):
                    watcher.run(step)
        self.last_step = step
        return self.is_stopping

    def _is_checkpoint_due(self, step: int) -> bool:
        save_freq = self.config.trainer.save_freq
        is_end = step == self.num_steps and save_freq
        is_needed = self.is_stopping or self._is_best(step)
        return bool(is_due(step, save_freq) or is_end or is_needed)

    def _save(self, step: int) -> None:
        """Saves a checkpoint and deletes old ones.

        Not of weights that have diverged: a run would resume from them, and fail again.
        """
        folder = self.folder
        if not self.health.is_diverging and self._weights_are_finite():
            folder.save(step, self.objects, self.num_steps)
            folder.prune(self.health.proven_step)
            return
        if is_first_rank():
            print(f"step {step} gets no checkpoint, since its weights may have diverged")

    def _is_export_due(self, worker: Worker, step: int) -> bool:
        is_last = step == self.num_steps
        return is_due(step, worker.config.save_freq) or bool(is_last and worker.config.save_dir)

    def _export(self, worker: Worker, step: int) -> None:
        folder = f"{worker.config.save_dir}/step_{step}"
        worker.export(folder, self.tokenizer, worker.config.save_optimizer)

    def _judge(self, step: int, metrics: Metrics) -> None:
        """Compares an evaluation with the best one."""
        if self.folder.best is not None:
            self.folder.best = self.folder.best.judge(step, metrics)

    def _is_best(self, step: int) -> bool:
        return 0 < step == self.folder.best_step

    def _export_best(self, step: int) -> None:
        """Exports the first worker as best_model/. All processes must call."""
        worker, best = next(iter(self.workers.values())), self.folder.best
        assert best is not None
        record = {"step": step, "metric": best.metric, "value": best.value}
        self.folder.export(
            BEST_MODEL, partial(worker.export, tokenizer=self.tokenizer), best=record
        )

    def _weights_are_finite(self) -> bool:
        """Returns whether all trained weights are finite. All processes must call."""
        is_finite = True
        for worker in self.workers.values():
            for parameter in worker.trained_parameters.values():
                shard = local_shard(worker.memory.state(parameter))
                is_finite = is_finite and bool(shard.isfinite().all())
        return not any_rank(not is_finite, self.device)

    def _is_test_due(self, step: int) -> bool:
        """Returns whether to evaluate: at the start, every trainer.test_freq steps, at the end."""
        if self.evaluate is None:
            return False
        return step in (0, self.num_steps) or is_due(step, self.config.trainer.test_freq)

    def _evaluate(self, step: int) -> Metrics:
        """Returns metrics of the test data as test/*."""
        assert self.evaluate is not None
        with self.phase("test"):
            metrics = self.evaluate(step)
        return {f"test/{name}": value for name, value in metrics.items()}

    def finish(self, worker: Worker) -> None:
        """Exports `worker` as the final model and ends the process group."""
        export = partial(worker.export, tokenizer=self.tokenizer)
        is_complete = self.last_step == self.num_steps and not self.lacks_test
        self.folder.export("model", export, model_step=self.last_step, is_complete=is_complete)
        if is_first_rank():
            print(f"model saved to {self.folder.path / 'model'}")
        self.folder.prune(self.health.proven_step + 1)  # the last step has no later update
        self.metrics_log.close()
        best = self.folder.best
        if is_first_rank() and best is not None and best.value is not None:
            place = self.folder.path / BEST_MODEL
            print(f"best: {best.metric} {best.value:.4g} of step {best.step}, in {place}")
        dist.destroy_process_group()


def is_due(step: int, every: int | None) -> bool:
    """Returns whether what happens every `every` steps (None = never) happens at this step."""
    return every is not None and step % every == 0
