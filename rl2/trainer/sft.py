"""Supervised fine-tuning: `torchrun --nproc_per_node=N -m rl2.trainer.sft key=value`. `train` is the algorithm."""

import math
import sys
from functools import partial

from rl2.algorithms import losses
from rl2.batch import Batch, collate
from rl2.config.parse import parse, user_errors
from rl2.config.rules import validate_sft
from rl2.config.schema import SFTConfig
from rl2.data.examples import render_sft, to_samples
from rl2.model.token_model import TokenScores
from rl2.trainer.build import ExampleRun


def train(run: ExampleRun) -> None:
    """The whole algorithm. Every process holds the same `batch` and runs the same lines; `update` splits its work."""
    evaluate = partial(perplexity, run)
    run.begin(evaluate)
    for step in range(run.step + 1, run.num_steps + 1):
        batch = run.batch(step)
        with run.phase("update"):
            result = run.worker.update(batch, loss_fn)
        if run.finish_step(step, result, batch, evaluate):
            break


def loss_fn(batch: Batch, scores: TokenScores):
    """Cross-entropy of the trained tokens, on whole sequences [b, T]."""
    return losses.cross_entropy(scores.logps, batch.token_weights), {}


def make_batch(run: ExampleRun, examples) -> Batch:
    """The rows as columns, and what each of their tokens weighs in the loss."""
    batch = collate(to_samples(examples))
    batch.token_weights = losses.token_weights(
        batch.mask, batch.trajectory, run.config.actor.average
    )
    return batch


def perplexity(run: ExampleRun) -> dict[str, float]:
    """Of the test rows, and its logarithm, over all their trained tokens alike, whatever the training's average."""
    test = run.test_batch
    test.token_weights = losses.token_weights(test.mask, test.trajectory, "token")
    loss = run.measure(loss_fn)["loss"]
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}


def main() -> None:
    config = parse(SFTConfig, sys.argv[1:], validate_sft, "rl2.trainer.sft")
    with user_errors():
        run = ExampleRun(config, "actor", partial(render_sft, turns=config.data.turns), make_batch)
        train(run)
        run.books.finish(run.worker)


if __name__ == "__main__":
    main()
