"""Direct preference optimization: `torchrun --nproc_per_node=N -m rl2.trainer.dpo key=value`. `train` is the algorithm."""

import sys
from functools import partial

import torch

from rl2.algorithms import losses
from rl2.batch import Batch, collate
from rl2.config.parse import parse, user_errors
from rl2.config.rules import validate_dpo
from rl2.config.schema import DPOConfig
from rl2.data.examples import render_pair, to_samples
from rl2.model.token_model import TokenScores
from rl2.trainer.build import ExampleRun


def train(run: ExampleRun, reference) -> None:
    """The whole algorithm. Every process holds the same `batch` and runs the same lines; the workers split their work."""
    loss_fn = partial(preference_loss, run.config.dpo)
    if run.test_batch is not None:
        run.test_batch.ref_logps = reference(run.test_batch).logps
    evaluate = partial(run.measure, loss_fn)
    run.begin(evaluate)
    for step in range(run.step + 1, run.num_steps + 1):
        batch = run.batch(step)
        with run.phase("reference"):
            batch.ref_logps = reference(batch).logps
        with run.phase("update"):
            result = run.worker.update(batch, loss_fn, keep_groups_together=True)
        if run.finish_step(step, result, batch, evaluate):
            break


def preference_loss(dpo, batch: Batch, scores: TokenScores):
    """DPO's loss on whole sequences [b, T], where the rejected reply follows the chosen one."""
    columns = (scores.logps, batch.ref_logps, batch.mask, batch.token_weights)
    return losses.dpo_loss(*columns, dpo.beta, dpo.loss, dpo.label_smoothing)


def make_batch(run: ExampleRun, examples) -> Batch:
    """Two rows of columns for each row of the data, chosen and rejected, which weigh the same."""
    batch = collate(to_samples(examples))
    batch.trajectory = torch.arange(len(batch.mask))
    batch.token_weights = losses.token_weights(batch.mask, batch.trajectory, "sequence")
    return batch


def main() -> None:
    config = parse(DPOConfig, sys.argv[1:], validate_dpo, "rl2.trainer.dpo")
    with user_errors():
        run = ExampleRun(config, "actor", render_pair, make_batch)
        train(run, reference=run.worker.reference())
        run.books.finish(run.worker)


if __name__ == "__main__":
    main()
