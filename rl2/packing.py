"""Sample -> Batch -> Pack: ragged trajectories, aligned columns, packed micro-batches, and the way back.

Shapes: B sequences, T columns of the longest one, L packed tokens, P scored pairs.
"""

import heapq
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from rl2.batch import Batch, Pack, scored_spans


def plan_micro_batches(
    batch: Batch,
    budget: int,
    num_ranks: int,
    share_prompts: bool = True,
    attention_cost: float = 0.0,
    whole: bool = False,
) -> list[list[list[int]]]:
    """Which rows each data-parallel rank runs in each micro-batch: `plan[micro][rank]` is a list of rows.

    A sequence of n tokens costs n + quadratic * n^2: attention meets every pair. Costliest-first greedy into as few bins
    as keep each within `budget` tokens; every rank gets the same number of micro-batches, some of them empty when there
    are fewer rows than ranks. Bins of similar cost meet in one micro-batch, since FSDP makes ranks wait for each other in
    each. A group stays together for its prompt's sake, or in a few parts where that is estimated to be faster. With
    `whole` its rows are in one micro-batch, one behind the other: a loss may compare them.
    """
    lengths = scored_spans(batch)
    groups = _groups(batch, lengths, share_prompts)
    total = sum(end for _, end in lengths)
    plans = []
    for parts in (1, 2, 4, 8) if share_prompts and num_ranks > 1 and not whole else (1,):
        limit = budget if whole else min(budget, total // num_ranks // parts + 1)
        units = _units(groups, lengths, limit, attention_cost)
        if whole:
            units = _joined(units, batch.group.tolist())
        longest = max((tokens for _, tokens, _ in units), default=0)
        if longest > budget:
            what = "group" if whole else "sequence"
            raise ValueError(
                f"a {what} of {longest} tokens exceeds max_length_per_device x sp_size = {budget}"
            )
        num_micro = max(1, -(-sum(tokens for _, tokens, _ in units) // (budget * num_ranks)))
        while (bins := _fill(units, num_micro * num_ranks, budget)) is None:
            num_micro += 1
        # Largest first, so the first bin of a micro-batch is its slowest.
        slowest = sum(cost for cost, _ in bins[::num_ranks])
        plans.append((slowest, parts, [rows for _, rows in bins]))
    rows = min(plans)[2]
    return [rows[i : i + num_ranks] for i in range(0, len(rows), num_ranks)]


def _groups(batch, lengths, share_prompts) -> list[list[int]]:
    """Rows with something to train, those with a prompt in common together."""
    groups, number = [], batch.group.tolist()
    for row in sorted(range(len(number)), key=lambda row: (number[row], row)):
        prompt, end = lengths[row]
        first = groups[-1][0] if groups and share_prompts else None
        alike = first is not None and (number[first], lengths[first][0]) == (number[row], prompt)
        if alike and torch.equal(batch.inputs[first, :prompt], batch.inputs[row, :prompt]):
            groups[-1].append(row)
        elif end:
            groups.append([row])
    return groups


def _units(groups, lengths, limit, attention_cost) -> list[tuple[float, int, list[int]]]:
    """(cost, tokens, rows) of groups cut into parts of at most `limit` tokens, or of one row."""
    units = []
    for group in groups:
        prompt, tokens, square, rows = lengths[group[0]][0], 0, 0, []
        for row in group:
            end = lengths[row][1]
            if rows and tokens + end - prompt > limit:
                units.append((tokens + attention_cost * square, tokens, rows))
                rows = []
            # The prompt's pairs come once; an answer's are with the prompt and with itself: end^2 - prompt^2.
            tokens, square = (
                (tokens + end - prompt, square + end**2 - prompt**2) if rows else (end, end**2)
            )
            rows = [*rows, row]
        units.append((tokens + attention_cost * square, tokens, rows))
    return units


def _joined(units, number) -> list[tuple[float, int, list[int]]]:
    """The units with all those of a group in one; where its prompts differ there were several."""
    joined = {}
    for cost, tokens, rows in units:
        before = joined.get(number[rows[0]], (0.0, 0, []))
        joined[number[rows[0]]] = (before[0] + cost, before[1] + tokens, before[2] + rows)
    return list(joined.values())


def _fill(units, num_bins, budget) -> list[tuple[float, list[int]]] | None:
    """The next costliest unit goes to the bin with the least cost that has room for its tokens. (cost, rows) of each bin,
    costliest first; None if some unit has no room."""
    heap = [(0.0, i) for i in range(num_bins)]
    held, members = [0] * num_bins, [[] for _ in range(num_bins)]
    for cost, tokens, rows in sorted(units, key=lambda unit: (-unit[0], unit[2])):
        full = []
        while heap and held[heap[0][1]] + tokens > budget:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        load, i = heap[0]
        heapq.heapreplace(heap, (load + cost, i))
        held[i] += tokens
        members[i] += rows
        for item in full:
            heapq.heappush(heap, item)
    return [(load, members[i]) for load, i in sorted(heap, key=lambda item: (-item[0], item[1]))]


def pack(batch: Batch, share_prompts: bool = True) -> Pack:
    """All rows of `batch` in one packed sequence, without padding. Rows of a group with equal prompts follow each other
    and run the prompt once when `share_prompts`.

    Two answers [3, 4] and [5] to the prompt [1, 2]: nothing is predicted from their last tokens, so tokens [1, 2, 3],
    segments 0:2 and 2:3, prefix (1, 2, 0), and the pairs (1, 3), (2, 4), (1, 5) of hidden state and target.
    """
    tokens, positions, cu_seqlens, prefixes = [], [], [0], []
    hidden, targets, rows, columns = [], [], [], []

    def segment(inputs, start):
        tokens.append(inputs)
        positions.append(torch.arange(start, start + len(inputs)))
        cu_seqlens.append(cu_seqlens[-1] + len(inputs))

    key = None
    for row, (prompt, end) in enumerate(scored_spans(batch)):
        if end == 0:
            continue
        inputs = batch.inputs[row]
        head = (batch.group[row].item(), inputs[:prompt].tolist()) if share_prompts else None
        if head is None or head != key:
            key, at, shared = head, cu_seqlens[-1], len(cu_seqlens) - 1
            segment(inputs[: prompt if share_prompts else end], 0)
        tail = cu_seqlens[-1]
        if share_prompts and end > prompt:
            segment(inputs[prompt:end], prompt)
            if prefixes and prefixes[-1][2] == shared:
                prefixes.pop()
            prefixes.append((shared + 1, len(cu_seqlens) - 1, shared))
        scored = batch.mask[row].nonzero().squeeze(1)
        hidden.append(
            torch.where(scored < prompt, at + scored, tail + scored - prompt)
            if share_prompts
            else at + scored
        )
        targets.append(batch.targets[row, scored])
        rows.append(torch.full_like(scored, row))
        columns.append(scored)
    if not tokens:  # a rank without rows still runs the model, so that collectives meet: one token, nothing scored
        segment(torch.zeros(1, dtype=torch.int64), 0)
    none = torch.zeros(0, dtype=torch.int64)
    return Pack(
        tokens=torch.cat(tokens)[None],
        positions=torch.cat(positions)[None],
        cu_seqlens=cu_seqlens,
        prefixes=prefixes,
        hidden_index=torch.cat([none, *hidden]),
        targets=torch.cat([none, *targets]),
        rows=torch.cat([none, *rows]),
        columns=torch.cat([none, *columns]),
    )


def zigzag(pack: Pack, size: int, rank: int) -> Pack:
    """The part of `pack` that process `rank` of `size` holds: chunks rank and 2 * size - 1 - rank of the 2 * size that each
    segment is cut into, one behind the other, so that all have the same causal work.

    Chunks differ by at most one token, and nothing is padded. Segment s of n tokens ends chunk i - 1 at
    (i * n + s % (2 * size)) // (2 * size): the last term deals the odd tokens of short segments to all. A process
    without a token runs one that nobody sees. Size 2, segments of 4 and 1: process 0 holds tokens 0, 3, process 1 the rest.
    """
    parts = 2 * size
    chunks, held = [[] for _ in range(size)], []
    for s, (start, end) in enumerate(pairwise(pack.cu_seqlens)):
        cuts = [start + (i * (end - start) + s % parts) // parts for i in range(parts + 1)]
        for r in range(size):
            both = [(cuts[i], cuts[i + 1]) for i in (r, parts - 1 - r)]
            chunks[r].append(tuple(b - a for a, b in both))
            held += [torch.arange(a, b) for a, b in both if r == rank]
    held = torch.cat(held)
    local = torch.full((pack.cu_seqlens[-1],), -1).index_copy(0, held, torch.arange(len(held)))
    ours = local[pack.hidden_index] >= 0
    pairs = {name: getattr(pack, name)[ours] for name in ("targets", "rows", "columns")}
    if not len(held):
        held = torch.zeros(1, dtype=torch.int64)
    tokens, positions = pack.tokens[:, held], pack.positions[:, held]
    return replace(
        pack,
        tokens=tokens,
        positions=positions,
        hidden_index=local[pack.hidden_index[ours]],
        chunks=chunks,
        **pairs,
    )


def unpack(pack: Pack, scores: Tensor, shape: tuple[int, int]) -> Tensor:
    """Scores of the pairs [P] back to columns `shape` = [b, T], 0 where nothing is scored; differentiable."""
    return scores.new_zeros(shape).index_put((pack.rows, pack.columns), scores)
