"""Sample -> Batch -> Pack: ragged trajectories, aligned columns, packed micro-batches, and the way back.

Shapes: B sequences, T columns of the longest one, L packed tokens, P scored pairs.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass
class Sample:
    """One training sequence of n tokens; a trajectory is one or several of them."""

    tokens: list[int]  # [n]
    mask: list[int]  # [n] 1 = sampled by the policy, so trained
    logps: list[float]  # [n] the engine's log-probability of each sampled token, 0 elsewhere
    rewards: list[float]  # [n] the reward, at the token that earned it
    group: int  # the prompt it answers
    trajectory: int  # several sequences of one trajectory are in order of time


@dataclass
class Batch:
    """Columns [B, T], right-padded. Column t reads inputs[:, :t+1] and predicts targets[:, t]: tokens are shifted here,
    once, and every other column sits beside the token that is predicted.

    Tokens [5, 6, 7, 2] with mask [0, 0, 1, 1] become inputs [5, 6, 7], targets [6, 7, 2], mask [0, 1, 1].
    """

    inputs: Tensor  # [B, T] int64
    targets: Tensor  # [B, T] int64
    mask: Tensor  # [B, T] float32, 1 = trained
    engine_logps: Tensor  # [B, T]
    rewards: Tensor  # [B, T]
    group: Tensor  # [B] int64
    trajectory: Tensor  # [B] int64
    old_logps: Tensor | None = None  # [B, T] of the policy that starts the update
    ref_logps: Tensor | None = None  # [B, T]
    values: Tensor | None = None  # [B, T] of the critic that starts the update
    advantages: Tensor | None = None  # [B, T]
    returns: Tensor | None = None  # [B, T]
    token_weights: Tensor | None = None  # [B, T] of each token in the mean that the loss is
    pair_margin: Tensor | None = None  # [B] of the pair that a reply to compare belongs to

    def select(self, rows) -> "Batch":
        """The same columns of some rows only."""
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        return Batch(
            **{name: None if column is None else column[rows] for name, column in columns.items()}
        )


@dataclass
class Pack:
    """One micro-batch. Segment s is tokens[cu_seqlens[s]:cu_seqlens[s+1]] and attends causally to itself; a prefix
    (a, b, c) lets the segments a..b attend to all of segment c as well: answers to the prompt they share.

    Pairs, not positions, are scored: where a prompt is shared, its last hidden state predicts every answer's first token.
    `zigzag` leaves one process's tokens and pairs; the segments then are still those of all.
    """

    tokens: Tensor  # [1, L] int64
    positions: Tensor  # [1, L] int64
    cu_seqlens: list[int]  # segment boundaries
    prefixes: list[tuple[int, int, int]]
    hidden_index: Tensor  # [P] int64, index of the hidden state
    targets: Tensor  # [P] int64, the token it should predict
    rows: Tensor  # [P] int64, which row of the packed rows it belongs to
    columns: Tensor  # [P] int64
    chunks: list[list[tuple[int, int]]] | None = (
        None  # [process][segment] lengths of its two chunks, see `zigzag`
    )


def collate(samples: list[Sample]) -> Batch:
    """Ragged samples to columns. A sample of one token has nothing to predict and becomes an all-masked row."""
    width = max([len(sample.tokens) - 1 for sample in samples] + [1])

    def column(values, dtype):
        out = torch.zeros(len(samples), width, dtype=dtype)
        for row, value in zip(out, values, strict=True):
            row[: len(value)] = torch.tensor(value, dtype=dtype)
        return out

    return Batch(
        inputs=column([sample.tokens[:-1] for sample in samples], torch.int64),
        targets=column([sample.tokens[1:] for sample in samples], torch.int64),
        mask=column([sample.mask[1:] for sample in samples], torch.float32),
        engine_logps=column([sample.logps[1:] for sample in samples], torch.float32),
        rewards=column([sample.rewards[1:] for sample in samples], torch.float32),
        group=torch.tensor([sample.group for sample in samples]),
        trajectory=torch.tensor([sample.trajectory for sample in samples]),
    )


def scored_spans(batch: Batch) -> list[tuple[int, int]]:
    """(prompt, end) of each row: the columns before the first trained one plus that one, and the last trained one plus
    one. What lies behind is never run. A row with nothing to train is (0, 0)."""
    trained = batch.mask > 0
    first = trained.int().argmax(1)
    last = trained.shape[1] - trained.flip(1).int().argmax(1)
    columns = zip(first.tolist(), last.tolist(), trained.any(1).tolist(), strict=True)
    return [(f + 1, e) if t else (0, 0) for f, e, t in columns]


def minibatches(batch: Batch, count: int, seed: int) -> list[Batch]:
    """`batch` in `count` parts of nearly equal numbers of trajectories, shuffled by `seed`; none of them empty.

    All sequences of a trajectory stay together, so that sequence averages mean the same in every part.
    """
    if count == 1:
        return [batch]
    trajectories = batch.trajectory.unique()
    count = min(count, len(trajectories))
    order = trajectories[
        torch.randperm(len(trajectories), generator=torch.Generator().manual_seed(seed))
    ]
    return [batch.select(torch.isin(batch.trajectory, part)) for part in order.tensor_split(count)]
