"""Supervised fine-tuning: `torchrun --nproc_per_node=N -m rl2.trainer.sft key=value`.

`train` is the whole algorithm; read it first.
"""

from rl2.config.help import answer_trainer

if __name__ == "__main__":
    answer_trainer("sft")  # --help, before the imports below, which take seconds

import math

from rl2.algorithms import losses
from rl2.batch import Batch, collate
from rl2.config.schema import SFTConfig
from rl2.data.examples import SFT_ROWS, Example, to_samples
from rl2.model.token_model import TokenScores
from rl2.trainer.launch import launch, train_and_finish
from rl2.trainer.offline_run import Measure, OfflineRun


def train(run: OfflineRun) -> None:
    """The whole algorithm.

    Every process holds the same `batch` and runs the same lines. The worker splits the work of
    `update` and `score`.
    """
    run.recorder.begin()
    for step in run.recorder.remaining_steps():
        batch = run.next_batch()
        with run.recorder.phase("update"):
            result = run.worker.update(batch, sft_loss)
        if run.finish_step(step, batch, result):
            break


def sft_loss(batch: Batch, scores: TokenScores) -> losses.LossAndMetrics:
    """Cross-entropy of the trained tokens, on whole sequences [b, T]."""
    weights = batch.token_weights
    return -(losses.masked(weights, scores.logps) * weights).sum(), {}


def make_batch(run: OfflineRun, examples: list[Example]) -> Batch:
    """One row for each sequence of the examples, weighted as actor.average says."""
    batch = collate(to_samples(examples))
    average = run.config.actor.average
    batch.token_weights = losses.token_weights(batch.mask, batch.trajectory, average)
    return batch


def perplexity(run: OfflineRun, test: Batch) -> dict[str, float]:
    """Perplexity of the test rows, and its logarithm, as a mean over all their trained tokens."""
    test.token_weights = losses.token_weights(test.mask, test.trajectory, "token")
    loss = run.measure_loss(sft_loss, test)["loss"]
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}  # e^710 overflows


def make_run(config: SFTConfig, measure: Measure = perplexity) -> OfflineRun:
    """`measure` gives the metrics of a test set."""
    return OfflineRun(config, SFT_ROWS, make_batch, measure)


def start(config: SFTConfig) -> None:
    train_and_finish(make_run(config), train)


def main() -> None:
    launch(SFTConfig, start)


if __name__ == "__main__":
    main()
