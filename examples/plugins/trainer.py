r"""A trainer: unlikelihood training (arXiv:1908.04319) makes the replies of the rows less likely.

    torchrun --nproc_per_node=2 examples/plugins/trainer.py data.path=ROWS.jsonl \
        actor.model_name=MODEL

`python examples/plugins/trainer.py key=value` runs it in one process. Rows, batches, keys and the
run folder are those of rl2/trainer/sft.py; the loop and the loss are its own.
"""

import torch

from rl2.algorithms.losses import LossAndMetrics
from rl2.batch import Batch
from rl2.config.schema import SFTConfig
from rl2.model.token_model import TokenScores
from rl2.trainer import sft
from rl2.trainer.launch import launch, train_and_finish
from rl2.trainer.offline_run import OfflineRun


def train(run: OfflineRun) -> None:
    """The whole algorithm. Every process holds the same batch; `update` splits the work."""
    run.recorder.begin()
    for step in run.recorder.remaining_steps():
        batch = run.next_batch()
        with run.recorder.phase("update"):
            result = run.worker.update(batch, unlikelihood)
        if run.finish_step(step, batch, result):
            break


def unlikelihood(batch: Batch, scores: TokenScores) -> LossAndMetrics:
    """The weighted sum of -log(1 - p) over the trained tokens, on whole sequences [b, T]."""
    assert scores.logps is not None and batch.token_weights is not None
    probabilities = scores.logps.exp().clamp(max=1 - 1e-4)
    return -(torch.log1p(-probabilities) * batch.token_weights).sum(), {}


def measure(run: OfflineRun, test: Batch) -> dict[str, float]:
    """Returns the loss on test rows."""
    return run.measure_loss(unlikelihood, test)


def start(config: SFTConfig) -> None:
    train_and_finish(sft.make_run(config, measure=measure), train)


def main() -> None:
    launch(SFTConfig, start)


if __name__ == "__main__":
    main()
