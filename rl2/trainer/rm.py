"""Reward models: `torchrun --nproc_per_node=N -m rl2.trainer.rm key=value`. `train` is the algorithm."""

import sys
from dataclasses import replace
from functools import partial

import torch

from rl2.algorithms import losses
from rl2.batch import Batch, Sample, collate
from rl2.config.parse import parse, user_errors
from rl2.config.rules import validate_rm
from rl2.config.schema import RMConfig
from rl2.data.examples import pair_margin, render_pair, to_samples
from rl2.model.token_model import TokenScores
from rl2.trainer.build import ExampleRun


def train(run: ExampleRun) -> None:
    """The whole algorithm. Every process holds the same `batch` and runs the same lines; `update` splits its work."""
    loss_fn = partial(reward_loss, run.config.rm.center)
    evaluate = partial(run.measure, loss_fn)
    run.begin(evaluate)
    for step in range(run.step + 1, run.num_steps + 1):
        batch = run.batch(step)
        with run.phase("update"):
            result = run.worker.update(batch, loss_fn, keep_groups_together=True)
        if run.finish_step(step, result, batch, evaluate):
            break


def reward_loss(center: float, batch: Batch, scores: TokenScores):
    """Bradley-Terry on whole sequences [b, T], where the rejected reply follows the chosen one."""
    return losses.reward_loss(scores.values, batch.token_weights, batch.pair_margin, center)


def make_batch(run: ExampleRun, examples) -> Batch:
    """Two rows of columns for each row of the data, chosen and rejected. The columns of the whole reply are scored, so
    that the two share the prompt's pass; only the last one weighs."""
    batch = collate(
        [score_last(sample, run.tokenizer.pad_token_id) for sample in to_samples(examples)]
    )
    batch.trajectory = torch.arange(len(batch.mask))
    last = batch.mask * (batch.mask.flip(1).cumsum(1).flip(1) == 1)
    batch.token_weights = losses.token_weights(last, batch.trajectory, "sequence")
    batch.pair_margin = torch.tensor(
        [pair_margin(example.row) for example in examples]
    ).repeat_interleave(2)
    return batch


def score_last(sample: Sample, pad: int | None) -> Sample:
    """A column pairs a hidden state with the token that it predicts. The reward is read from the state of the last token,
    which predicts none: token 0, which nobody reads, stands in. Transformers reads it at the last token that is not
    `pad`, so what ends in some (where pad is the end of a turn too) ends before them."""
    end = max(i + 1 for i, token in enumerate(sample.tokens) if token != pad)
    tokens, mask, zeros = [*sample.tokens[:end], 0], [*sample.mask[:end], 1], [0.0] * (end + 1)
    return replace(sample, tokens=tokens, mask=mask, logps=zeros, rewards=zeros)


def main() -> None:
    config = parse(RMConfig, sys.argv[1:], validate_rm, "rl2.trainer.rm")
    with user_errors():
        run = ExampleRun(config, "critic", render_pair, make_batch)
        train(run)
        run.books.finish(run.worker)


if __name__ == "__main__":
    main()
