"""Sample -> Batch -> Pack: the three forms of the same data.

A Sample is ragged, a Batch has aligned columns, and a Pack is a packed micro-batch; `packing.py`
makes packs. Shapes: B sequences, T columns of the longest one, L packed tokens, P scored pairs.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor


class Sample:
    """One training sequence of n tokens, in 13 bytes a token without experts.

    A trajectory is one or several of them.
    """

    def __init__(
        self,
        tokens: Iterable[int],
        mask: Iterable[int],
        logps: Iterable[float],
        rewards: Iterable[float],
        group: int,
        trajectory: int,
        candidate_counts: Iterable[int] = (),
        candidate_ids: Iterable[int] = (),
        experts: Iterable[np.ndarray] = (),
    ):
        """Copies the columns into typed arrays."""
        self.tokens = array("i", tokens)  # [n] int32
        self.mask = array("b", mask)  # [n] int8, 1 = sampled by the policy, so trained
        self.logps = array("f", logps)  # [n] float32, the engine's if sampled, 0 elsewhere
        self.rewards = array("f", rewards)  # [n] float32, at the token that earned it
        self.group = group  # the number of the prompt that it answers
        self.trajectory = trajectory  # the sequences of one trajectory are in order of time
        # What was left to draw from, where the engine tells it. Both are empty without.
        # [up to n] int32, of each token, 0 = the whole vocabulary
        self.candidate_counts = array("i", candidate_counts)
        self.candidate_ids = array("i", candidate_ids)  # [sum of the counts] int32
        # With actor.routing_replay: int16 parts of [up to n - 1, routers, choices], which experts
        # the engine sent each token to, in the order of the tokens. Else empty.
        self.experts = list(experts)


@dataclass
class Candidates:
    """What was left to draw each token from: sets of token ids, beside columns [B, T].

    The policy is the softmax among them, so the trainer's log-probabilities are of that.
    """

    counts: Tensor  # [B, T] int32, 0 = the whole vocabulary
    ids: list[Tensor]  # [sum of its counts] int32 of each row, in order of the columns

    def __getitem__(self, rows: Tensor | Sequence[int]) -> "Candidates":
        """Those of these rows only, in this order."""
        return Candidates(self.counts[rows], _pick(self.ids, rows))


def _pick(values: list[Tensor], rows: Tensor | Sequence[int]) -> list[Tensor]:
    """The values of these rows, which are numbers or a mask."""
    return [values[number] for number in torch.arange(len(values))[rows].tolist()]


@dataclass
class Batch:
    """Columns [B, T], right-padded. Column t reads inputs[:, :t+1] and predicts targets[:, t].

    Tokens are shifted here, once. Every other column is beside the token that is predicted:
    tokens [5, 6, 7, 2] with mask [0, 0, 1, 1] have inputs [5, 6, 7], targets [6, 7, 2] and
    mask [0, 1, 1].
    """

    tokens: Tensor  # [B, T + 1] int32
    mask: Tensor  # [B, T] int8, 1 = trained
    engine_logps: Tensor  # [B, T] float32, of the engine that sampled
    rewards: Tensor  # [B, T] float32
    group: Tensor  # [B] int64
    trajectory: Tensor  # [B] int64
    # [B, T] of the old policy, to which the ratio is: that which starts the updates of the step, or
    # that which sampled (`Sampling`). None: the only update of the step computes them itself.
    old_logps: Tensor | None = None
    ref_logps: Tensor | None = None  # [B, T] of the reference model
    ages: Tensor | None = None  # [B, T] updates since the weights that sampled, if the loss asks
    teacher_logps: Tensor | None = None  # [B, T] of the teacher
    values: Tensor | None = None  # [B, T] of the critic that starts the update
    advantages: Tensor | None = None  # [B, T]
    returns: Tensor | None = None  # [B, T] what the critic learns
    token_weights: Tensor | None = None  # [B, T] of each token in the mean loss
    pair_margin: Tensor | None = None  # [B] by how much the pair's chosen reply is better
    label: Tensor | None = None  # [B] 1 = a desirable reply, 0 = an undesirable one
    reference_point: Tensor | None = None  # [B] KTO's estimate of the KL, the same in all rows
    candidates: Candidates | None = None  # None: each token is drawn from the whole vocabulary
    # [end, routers, choices] int16 of each row, see `scored_spans`: the experts that each router of
    # the engine chose for each token. None: those of the model choose.
    experts: list[Tensor] | None = None

    @property
    def inputs(self) -> Tensor:
        """[B, T] int32, a view of the tokens."""
        return self.tokens[:, :-1]

    @property
    def targets(self) -> Tensor:
        """[B, T] int32, a view of the tokens."""
        return self.tokens[:, 1:]

    def select(self, rows: Tensor | Sequence[int]) -> "Batch":
        """The batch of these rows only, in this order."""
        columns = dict(vars(self))
        for name, column in columns.items():
            if isinstance(column, list):
                columns[name] = _pick(column, rows)
            elif column is not None:
                columns[name] = column[rows]
        return Batch(**columns)


@dataclass
class Pack:
    """One micro-batch in one packed sequence.

    Segment s is tokens[cu_seqlens[s]:cu_seqlens[s+1]] and attends causally to itself. A prefix
    (a, b, c) lets the segments a to b - 1 attend to all of segment c too: they answer the prompt
    that they share.

    Pairs of a hidden state and a target are scored, not positions: the last hidden state of a
    shared prompt predicts the first token of every answer. `packing.zigzag` leaves the tokens and
    pairs of one process; the segments then are still those of all processes.
    """

    tokens: Tensor  # [1, L] int64
    positions: Tensor  # [1, L] int64
    cu_seqlens: list[int]  # [number of segments + 1] their boundaries
    prefixes: list[tuple[int, int, int]]
    hidden_index: Tensor  # [P] int64, place in L of the hidden state
    targets: Tensor  # [P] int64, the token that it should predict
    rows: Tensor  # [P] int64, which of the packed rows the pair belongs to
    columns: Tensor  # [P] int64
    candidate_counts: Tensor | None = None  # [P] int32, see `Candidates`
    candidate_ids: Tensor | None = None  # [sum of the counts] int32
    experts: Tensor | None = None  # [L, routers, choices] int16, see `Batch`
    chunks: list[list[tuple[int, int]]] | None = None  # lengths [process][segment], see `zigzag`


def collate(samples: list[Sample]) -> Batch:
    """Ragged samples to columns. A sample of one token predicts nothing: its row is all masked."""
    width = max([len(sample.tokens) for sample in samples] + [2])

    def column(name: str, dtype: torch.dtype, first: int = 1) -> Tensor:
        """The values of all samples from place `first` on."""
        out = torch.zeros(len(samples), width - first, dtype=dtype)
        for row, sample in zip(out.numpy(), samples, strict=True):
            values = getattr(sample, name)[first:]
            row[: len(values)] = values
        return out

    candidates = None
    if any(sample.candidate_ids for sample in samples):
        ids = [torch.tensor(sample.candidate_ids, dtype=torch.int32) for sample in samples]
        candidates = Candidates(column("candidate_counts", torch.int32), ids)
    experts = None
    parts = [part for sample in samples for part in sample.experts]
    if parts:
        none = parts[0][:0]  # of a sample without a generated token, which is not run
        rows = [np.concatenate([none] + sample.experts) for sample in samples]
        experts = [torch.from_numpy(row) for row in rows]
    return Batch(
        tokens=column("tokens", torch.int32, first=0),
        mask=column("mask", torch.int8),
        engine_logps=column("logps", torch.float32),
        rewards=column("rewards", torch.float32),
        group=torch.tensor([sample.group for sample in samples]),
        trajectory=torch.tensor([sample.trajectory for sample in samples]),
        candidates=candidates,
        experts=experts,
    )


def scored_spans(batch: Batch) -> list[tuple[int, int]]:
    """(prompt, end) of each row, in columns. A row without a trained token is (0, 0).

    `prompt` counts the columns up to the first trained one, that one included; `end` those up to
    the last trained one. The columns after `end` are never run.
    """
    first = batch.mask.argmax(1)
    end = batch.mask.shape[1] - batch.mask.flip(1).argmax(1)
    any_trained = batch.mask.any(1)
    prompts = torch.where(any_trained, first + 1, 0)
    ends = torch.where(any_trained, end, 0)
    return list(zip(prompts.tolist(), ends.tolist(), strict=True))


def split_minibatches(batch: Batch, count: int, seed: int) -> Iterator[Batch]:
    """`batch` in `count` parts with nearly equal numbers of trajectories, shuffled by `seed`.

    All sequences of a trajectory stay together, so that a mean over sequences has the same meaning
    in every part. No part is empty: there are fewer parts where there are fewer trajectories.
    """
    if count == 1:
        yield replace(batch)
        return
    trajectories = batch.trajectory.unique()
    count = min(count, len(trajectories))
    generator = torch.Generator().manual_seed(seed)
    order = trajectories[torch.randperm(len(trajectories), generator=generator)]
    for part in order.tensor_split(count):
        yield batch.select(torch.isin(batch.trajectory, part))


def drop_zero_advantages(batch: Batch) -> None:
    """Clears mask and token weights of the rows whose advantages are all 0: they are not run.

    Every answer of their group earned the same. It is for losses that have no gradient there. The
    weights of the other rows stay, so the loss is still the mean over all rows.
    """
    assert batch.advantages is not None and batch.token_weights is not None
    is_kept = batch.advantages.any(1, keepdim=True)
    batch.mask = batch.mask * is_kept
    batch.token_weights = batch.token_weights * is_kept
