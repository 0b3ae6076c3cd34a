"""Packs: which rows run together, in one packed sequence, cut over the processes, and the way back.

Shapes: B rows, T columns, L packed tokens, P scored pairs.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise

import numpy as np
import torch
from torch import Tensor

from rl2.batch import Batch, Pack, scored_spans
from rl2.rounding import ceil_div

Span = tuple[int, int]  # (prompt, end) of a row, see `scored_spans`


@dataclass
class Bin:
    """Rows that run together, and what they cost.

    A bin is filled with units, bins themselves, which are not cut: the rows of a prompt or a group.
    """

    cost: float = 0.0  # tokens + attention_cost * pairs of tokens that attend
    tokens: int = 0
    rows: list[int] = field(default_factory=list)

    def add(self, unit: "Bin") -> None:
        """Adds the rows of `unit`."""
        self.cost += unit.cost
        self.tokens += unit.tokens
        self.rows += unit.rows


def plan_micro_batches(
    batch: Batch,
    budget: int,
    num_ranks: int,
    share_prompts: bool = True,
    attention_cost: float = 0.0,
    keep_groups_together: bool = False,
    repeats_prompts: bool = False,
) -> list[list[list[int]]]:
    """Which rows each data-parallel rank runs in each micro-batch: plan[micro_batch][rank] = rows.

    A sequence of n tokens costs n + attention_cost * n^2, since attention meets every pair. The
    costliest unit is placed first, into as few bins as keep each within `budget` tokens. Every rank
    gets the same number of micro-batches; some are empty where there are fewer rows than ranks.
    Bins of similar cost share a micro-batch, since FSDP makes ranks wait for each other in each.

    A group stays together, so that its prompt runs once, or in a few parts where that is estimated
    to be faster. With `keep_groups_together` all its rows follow each other in one micro-batch, for
    a loss that compares them. With `repeats_prompts` a shared prompt counts once for each answer,
    since the recurrent layers of the model run it so.

    ValueError if a sequence, or a group that must stay together, has more than `budget` tokens.
    """
    spans = scored_spans(batch)
    numbers = batch.group.tolist()
    order = sorted(range(len(numbers)), key=numbers.__getitem__)
    groups = _rows_by_prompt(batch, spans, order, share_prompts)
    if keep_groups_together:
        units = _cut_groups(groups, spans, budget, attention_cost, repeats_prompts)
        units = _merge_groups(units, numbers)
        bins = _fill_bins(units, num_ranks, budget, "group")
    else:
        # No part of a group has more tokens than a rank's share, or half, a quarter, ... of it.
        share = sum(end for _, end in spans) // num_ranks
        can_be_cut = num_ranks > 1 and any(len(rows) > 1 for rows in groups)
        divisors = (1, 2, 4, 8) if can_be_cut else (1,)
        candidates = []
        for longest in dict.fromkeys(min(budget, share // divisor + 1) for divisor in divisors):
            units = _cut_groups(groups, spans, longest, attention_cost, repeats_prompts)
            candidates.append(_fill_bins(units, num_ranks, budget, "sequence"))
        # Bins are in order of cost, so the first one of a micro-batch is its slowest.
        bins = min(candidates, key=lambda bins: sum(bin_.cost for bin_ in bins[::num_ranks]))
    rows = [bin_.rows for bin_ in bins]
    return [rows[i : i + num_ranks] for i in range(0, len(rows), num_ranks)]


def _rows_by_prompt(
    batch: Batch, spans: Sequence[Span], rows: Iterable[int], share_prompts: bool
) -> list[list[int]]:
    """The `rows` with a trained token; those that follow each other and share a prompt together."""
    trained_rows = [row for row in rows if spans[row][1] > 0]

    def prompt(row: int) -> tuple[int, bytes]:
        return int(batch.group[row]), batch.inputs[row, : spans[row][0]].numpy().tobytes()

    if not share_prompts:
        return [[row] for row in trained_rows]
    return [list(group) for _, group in groupby(trained_rows, prompt)]


def _cut_groups(
    groups: Iterable[list[int]],
    spans: Sequence[Span],
    limit: int,
    attention_cost: float,
    repeats_prompts: bool,
) -> list[Bin]:
    """The rows of each prompt in units of at most `limit` tokens, or of one row."""
    parts: list[list[int]] = []
    for rows in groups:
        shared = 0 if repeats_prompts else spans[rows[0]][0]
        room = -1  # tokens of answers for which the last part has room; the first row begins one
        for row in rows:
            answer = spans[row][1] - shared
            if answer > room:
                parts.append([])
                room = limit - shared
            parts[-1].append(row)
            room -= answer
    return [_make_unit(part, spans, attention_cost, repeats_prompts) for part in parts]


def _make_unit(
    rows: list[int], spans: Sequence[Span], attention_cost: float, repeats_prompts: bool
) -> Bin:
    """Rows of one prompt, which runs once; each answer attends to the prompt and to itself."""
    prompt = spans[rows[0]][0]
    ends = [spans[row][1] for row in rows]
    tokens = sum(ends) - (len(rows) - 1) * (0 if repeats_prompts else prompt)
    pairs = sum(end**2 for end in ends) - (len(rows) - 1) * prompt**2
    return Bin(tokens + attention_cost * pairs, tokens, rows)


def _merge_groups(units: list[Bin], numbers: list[int]) -> list[Bin]:
    """One unit a group. It had several where its rows have different prompts."""
    merged: dict[int, Bin] = defaultdict(Bin)
    for unit in units:
        merged[numbers[unit.rows[0]]].add(unit)
    return list(merged.values())


def _fill_bins(units: list[Bin], num_ranks: int, budget: int, kind: str) -> list[Bin]:
    """Bins for the fewest micro-batches that hold all units, the costliest bin first.

    ValueError if one unit alone, a sequence or a group as `kind` says, is over the budget.
    """
    longest = max((unit.tokens for unit in units), default=0)
    if longest > budget:
        raise ValueError(
            f"a {kind} of {longest} tokens exceeds max_length_per_device x sp_size = {budget}"
        )
    units = sorted(units, key=lambda unit: (-unit.cost, unit.rows))
    # No bin holds more than the budget, or two units of more than half of it.
    fewest_bins = max(
        ceil_div(sum(unit.tokens for unit in units), budget),
        sum(2 * unit.tokens > budget for unit in units),
    )
    num_micro_batches = max(1, ceil_div(fewest_bins, num_ranks))
    while (bins := _place_units(units, num_micro_batches * num_ranks, budget)) is None:
        num_micro_batches += 1
    return bins


def _place_units(units: list[Bin], num_bins: int, budget: int) -> list[Bin] | None:
    """Each unit in order goes to the bin of least cost that has room for its tokens.

    Returns the bins, the costliest first. None if there is no room for some unit.
    """
    bins = [Bin() for _ in range(num_bins)]
    costs, tokens = np.zeros(num_bins), np.zeros(num_bins)
    for unit in units:
        has_room = tokens + unit.tokens <= budget
        if not has_room.any():
            return None
        i = int(np.where(has_room, costs, np.inf).argmin())
        bins[i].add(unit)
        costs[i], tokens[i] = bins[i].cost, bins[i].tokens
    return sorted(bins, key=lambda bin_: -bin_.cost)


def pack(batch: Batch, share_prompts: bool = True) -> Pack:
    """All rows of `batch` in one packed sequence, without padding.

    With `share_prompts`, rows of a group that follow each other and have equal prompts run the
    prompt once. A row that shares no prompt is one segment.

    Two answers [3, 4] and [5] to the prompt [1, 2]: nothing is predicted from their last tokens, so
    there are the tokens [1, 2, 3] in segments 0:2 and 2:3, the prefix (1, 2, 0), and the pairs of
    hidden state and target (1, 3), (2, 4), (1, 5).
    """
    tokens: list[Tensor] = []
    positions: list[Tensor] = []
    cu_seqlens = [0]

    def add_segment(segment: Tensor, first_position: int) -> None:
        tokens.append(segment)
        positions.append(torch.arange(first_position, first_position + len(segment)))
        cu_seqlens.append(cu_seqlens[-1] + len(segment))

    prefixes: list[tuple[int, int, int]] = []
    pairs = [(torch.zeros(0, dtype=torch.int64),) * 4]  # hidden index, target, row, column
    counts, ids = [], []  # of candidates
    experts: list[Tensor] = []
    spans = scored_spans(batch)
    for group in _rows_by_prompt(batch, spans, range(len(spans)), share_prompts):
        prompt, end = spans[group[0]]
        if len(group) == 1:
            prompt = end
        prompt_start = cu_seqlens[-1]
        add_segment(batch.inputs[group[0], :prompt], 0)
        if batch.experts is not None:  # of a shared prompt: those of the first answer
            experts.append(batch.experts[group[0]][:prompt])
        first_answer = len(tokens)
        for row in group:
            end = spans[row][1]
            answer_start = cu_seqlens[-1]
            if end > prompt:
                add_segment(batch.inputs[row, prompt:end], prompt)
                if batch.experts is not None:
                    experts.append(batch.experts[row][prompt:end])
            scored = batch.mask[row].nonzero().squeeze(1)
            pairs.append(
                (
                    _places(scored, prompt, prompt_start, answer_start),
                    batch.targets[row, scored],
                    torch.full_like(scored, row),
                    scored,
                )
            )
            if batch.candidates is not None:
                row_counts = batch.candidates.counts[row]
                is_scored = batch.mask[row].bool().repeat_interleave(row_counts)
                counts.append(row_counts[scored])
                ids.append(batch.candidates.ids[row][is_scored])
        if len(tokens) > first_answer:
            prefixes.append((first_answer, len(tokens), first_answer - 1))
    if not tokens:
        # A rank without rows runs one token and scores nothing, so that it meets the collectives.
        add_segment(torch.zeros(1, dtype=torch.int64), 0)
    hidden_index, targets, rows, columns = map(torch.cat, zip(*pairs, strict=True))
    return Pack(
        tokens=torch.cat(tokens).long()[None],
        positions=torch.cat(positions)[None],
        cu_seqlens=cu_seqlens,
        prefixes=prefixes,
        hidden_index=hidden_index,
        targets=targets,
        rows=rows,
        columns=columns,
        candidate_counts=torch.cat(counts) if counts else None,
        candidate_ids=torch.cat(ids) if ids else None,
        experts=torch.cat(experts) if experts else None,
    )


def _places(columns: Tensor, prompt: int, prompt_start: int, answer_start: int) -> Tensor:
    """Where the columns of a row are in the pack, whose first `prompt` ones are its prompt."""
    in_prompt = prompt_start + columns
    return torch.where(columns < prompt, in_prompt, answer_start + columns - prompt)


def zigzag(pack: Pack, size: int, rank: int) -> Pack:
    """The part of `pack` that process `rank` of a ring of `size` processes holds.

    Each segment is cut into 2 * size chunks. Process `rank` holds the chunks rank and
    2 * size - 1 - rank of it, one after the other, so that all have the same causal work.

    Chunks differ by at most one token, and nothing is padded. Segment s of n tokens ends chunk
    i - 1 at (i * n + s % (2 * size)) // (2 * size): the last term deals the odd tokens of short
    segments to all processes. A process without a token runs one that nobody sees. For size 2 and
    segments of 4 and 1 tokens, process 0 holds the tokens 0 and 3, process 1 the others.
    """
    num_chunks = 2 * size
    chunks: list[list[tuple[int, int]]] = [[] for _ in range(size)]
    parts = [torch.zeros(0, dtype=torch.int64)]
    for s, (start, end) in enumerate(pairwise(pack.cu_seqlens)):
        length = end - start
        cuts = [start + (i * length + s % num_chunks) // num_chunks for i in range(num_chunks + 1)]
        for process in range(size):
            opposite = num_chunks - 1 - process
            first = (cuts[process], cuts[process + 1])
            second = (cuts[opposite], cuts[opposite + 1])
            chunks[process].append((first[1] - first[0], second[1] - second[0]))
            if process == rank:
                parts += [torch.arange(*first), torch.arange(*second)]
    local_tokens = torch.cat(parts)
    # The place of each token of the whole pack among ours, -1 where another process holds it.
    place = torch.full((pack.cu_seqlens[-1],), -1)
    place.index_copy_(0, local_tokens, torch.arange(len(local_tokens)))
    is_ours = place[pack.hidden_index] >= 0
    if not len(local_tokens):
        local_tokens = torch.zeros(1, dtype=torch.int64)
    counts, ids = pack.candidate_counts, pack.candidate_ids
    if counts is not None and ids is not None:
        counts, ids = counts[is_ours], ids[is_ours.repeat_interleave(counts)]
    return replace(
        pack,
        tokens=pack.tokens[:, local_tokens],
        positions=pack.positions[:, local_tokens],
        hidden_index=place[pack.hidden_index[is_ours]],
        targets=pack.targets[is_ours],
        rows=pack.rows[is_ours],
        columns=pack.columns[is_ours],
        candidate_counts=counts,
        candidate_ids=ids,
        experts=None if pack.experts is None else pack.experts[local_tokens],
        chunks=chunks,
    )


def unpack(pack: Pack, scores: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Scores of the pairs [P] back to columns `shape` = [b, T], 0 where nothing is scored.

    It is differentiable in the scores.
    """
    return scores.new_zeros(shape).index_put((pack.rows, pack.columns), scores)
