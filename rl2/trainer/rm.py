"""Reward models: `torchrun --nproc_per_node=N -m rl2.trainer.rm key=value`.

`train` is the whole algorithm; read it first.
"""

from rl2.config.help import answer_trainer

if __name__ == "__main__":
    answer_trainer("rm")  # --help, before the imports below, which take seconds

import torch
from torch.nn.functional import logsigmoid

from rl2.algorithms import losses
from rl2.batch import Batch, Sample, collate, scored_spans
from rl2.config.schema import RMConfig
from rl2.data.examples import PAIR_ROWS, Example, to_samples
from rl2.data.formats import pair_margin
from rl2.model.token_model import TokenScores
from rl2.trainer.launch import launch, train_and_finish
from rl2.trainer.offline_run import OfflineRun


def train(run: OfflineRun) -> None:
    """The whole algorithm.

    Every process holds the same `batch` and runs the same lines. The worker splits the work of
    `update` and `score`.
    """
    run.recorder.begin()
    for step in run.recorder.remaining_steps():
        batch = run.next_batch()
        with run.recorder.phase("update"):
            result = run.worker.update(batch, reward_loss, keep_groups_together=True)
        if run.finish_step(step, batch, result):
            break


def reward_loss(batch: Batch, scores: TokenScores) -> losses.LossAndMetrics:
    """The weighted sum over pairs of -log sigmoid(r_chosen - r_rejected - pair_margin).

    This is Bradley-Terry with Llama 2's margin (arXiv:2307.09288), on whole sequences [b, T], where
    the rejected reply follows the chosen one. The reward of a row is its value at the one column
    that has a weight.
    """
    rewards = losses.masked(batch.token_weights, scores.values).sum(1)
    pair_weights, metrics = losses.pair_metrics(rewards, batch.token_weights)
    differences = rewards[::2] - rewards[1::2] - batch.pair_margin[::2]
    return (-logsigmoid(differences) * pair_weights).sum(), metrics


def make_batch(run: OfflineRun, examples: list[Example]) -> Batch:
    """Two rows for each example, the chosen and the rejected reply.

    The columns of the whole reply are scored, so that both replies share the prompt's pass. Only
    the last one has a weight.
    """
    pad_token_id = run.tokenizer.pad_token_id
    batch = collate([score_last(sample, pad_token_id) for sample in to_samples(examples)])
    batch.trajectory = torch.arange(len(batch.mask))
    last_column = torch.tensor([[end - 1] for _, end in scored_spans(batch)])
    weights = torch.zeros(batch.mask.shape)
    batch.token_weights = weights.scatter(1, last_column, 1 / len(weights))
    margins = torch.tensor([pair_margin(example.row) for example in examples])
    batch.pair_margin = margins.repeat_interleave(2)
    return batch


def score_last(sample: Sample, pad_token_id: int | None) -> Sample:
    """The sample with a column at which the reward is read.

    A column pairs a hidden state with the token that it predicts. The reward is read from the state
    of the last token, which predicts none: token 0, which nobody reads, stands in. Transformers
    reads the reward at the last token that is not `pad_token_id`. So a sample that ends in pad
    tokens (where pad is the end of a turn too) ends before them.
    """
    end = max(i + 1 for i, token in enumerate(sample.tokens) if token != pad_token_id)
    zeros = [0.0] * (end + 1)
    tokens = sample.tokens[:end].tolist() + [0]
    mask = sample.mask[:end].tolist() + [1]
    return Sample(tokens, mask, zeros, zeros, sample.group, sample.trajectory)


def measure(run: OfflineRun, test: Batch) -> dict[str, float]:
    """Returns the loss on test rows, and its metrics."""
    return run.measure_loss(reward_loss, test)


def make_run(config: RMConfig) -> OfflineRun:
    return OfflineRun(config, PAIR_ROWS, make_batch, measure)


def start(config: RMConfig) -> None:
    train_and_finish(make_run(config), train)


def main() -> None:
    launch(RMConfig, start)


if __name__ == "__main__":
    main()
