"""From the config to worker and examples: what SFT, DPO and the reward model train with."""

from collections.abc import Callable
from math import nan, sqrt
from typing import Any

import torch

from rl2.batch import Batch, scored_spans
from rl2.config.conditions import compares_pairs
from rl2.config.schema import worker_names
from rl2.data.examples import DataCursor, Example, RowKind
from rl2.gpu_memory import choose_for_device
from rl2.inputs import (
    count_steps,
    make_chat_template,
    read_examples,
)
from rl2.model.folder import load_tokenizer
from rl2.parallel.mesh import init_distributed
from rl2.recorder import Recorder
from rl2.report.health import with_names
from rl2.run.folder import RunFolder
from rl2.worker import Loss, SharedReference, UpdateResult, Worker

Measure = Callable[["OfflineRun", Batch], dict[str, float]]  # a test set -> its metrics


class OfflineRun:
    """What `train` of SFT, DPO and the reward model works with: examples, a worker, a recorder."""

    def __init__(
        self,
        config: Any,  # of the trainer
        kind: RowKind,
        make_batch: Callable[["OfflineRun", list[Example]], Batch],
        measure: Measure,
    ):
        """`kind` is what the rows are.

        `make_batch(run, examples)` gives columns with their token weights, and `measure(run,
        batch)` the metrics of a test set.
        """
        self.config = config
        self.make_batch = make_batch
        self.measure = measure
        self.reference: Worker | SharedReference | None = None  # `train` of DPO loads it
        [self.worker_name] = worker_names(config)
        device = init_distributed()
        choose_for_device(config, device)
        folder = RunFolder(config)
        is_critic = self.worker_name == "critic"
        worker_config = getattr(config, self.worker_name)
        key = f"{self.worker_name}.model_name"
        self.tokenizer = load_tokenizer(key, worker_config.model_name, is_critic)
        template = make_chat_template(config.data, self.tokenizer, folder.start.date)
        examples, tests = read_examples(config, kind, template)
        num_steps = count_steps(examples, folder)
        self.cursor = DataCursor(examples)
        self.test_batches = {name: make_batch(self, list(rows)) for name, rows in tests.items()}
        torch.manual_seed(config.trainer.seed)  # of new weights, and their places in dither.py
        self.worker = Worker(worker_config, device, is_critic, num_updates=num_steps)
        self.recorder = Recorder(
            folder,
            self.tokenizer,
            {self.worker_name: self.worker},
            {"data": self.cursor},
            num_steps=num_steps,
            device=device,
            evaluate=self.evaluate if self.test_batches else None,
        )

    def evaluate(self, step: int) -> dict[str, float]:
        """Returns the metrics of the test sets."""
        metrics = {name: self.measure(self, batch) for name, batch in self.test_batches.items()}
        return with_names(metrics)

    def next_batch(self) -> Batch:
        """The batch of the next step."""
        with self.recorder.phase("data"):
            return self.make_batch(self, self.cursor.next_batch())

    def finish_step(self, step: int, batch: Batch, result: UpdateResult) -> bool:
        """Evaluates, logs and saves where that is due. Returns whether to stop here."""
        metrics = {f"{self.worker_name}/{name}": x for name, x in result.to_log().items()}
        metrics["tokens/trained"] = int(batch.mask.sum())
        metrics["tokens/total"] = sum(end for _, end in scored_spans(batch))
        return self.recorder.finish_step(step, metrics)

    def measure_loss(self, loss_fn: Loss, batch: Batch) -> dict[str, float]:
        """Returns the loss on test rows, and its metrics."""
        loss, tensors = loss_fn(batch, self.worker.score(batch))
        metrics = {name: value.item() for name, value in {"loss": loss, **tensors}.items()}
        if compares_pairs(self.config):
            share, num_pairs = min(1.0, metrics["accuracy"]), len(batch.mask) // 2
            error = sqrt(share * (1 - share) / (num_pairs - 1)) if num_pairs > 1 else nan
            metrics["accuracy_stderr"] = error
        return metrics

    def finish(self) -> None:
        """Saves the final model."""
        self.recorder.finish(self.worker)
