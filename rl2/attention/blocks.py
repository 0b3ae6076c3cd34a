"""Which queries meet which keys: the blocks of a pack, for full attention and for sliding windows.

A segment is cut into 2 * size chunks. Rank r of `size` holds chunks r and 2 * size - 1 - r of each
segment, one after the other, so all ranks have the same causal work. What rank r computes with the
keys of rank `source`:

    source == r   causal attention over its two chunks, in ascending positions
    source <  r   all its queries see the first chunk of `source`, none sees the second one
    source >  r   the queries of its second chunk see both chunks, those of its first one see none

Chunks need not be equally long, so nothing is padded, and a short segment may leave a rank without
any of its tokens. The answers to a shared prompt, its prefix, see all of it.

With a sliding window a query sees the key d tokens before it if 0 <= d < window. The tokens are cut
into pieces of `window` tokens, and each piece is causal within itself. What remains for a
query are the keys of the piece before that are later in their piece than the query is in its own.
For a window of 4:

    keys   piece before   own piece
           . x x x        x . . .
           . . x x        x x . .
           . . . x        x x x .
           . . . .        x x x x

The left triangle is causal too if its queries and its keys are taken in reverse order. So the
kernels need no window, and they compute what is visible and nothing else.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise, product

import torch
from torch import Tensor

from rl2.attention.kernels import Block
from rl2.attention.pages import Pages
from rl2.parallel.device import copy_to_device

Chunks = list[tuple[int, int]]  # [S], the lengths of the two chunks of each segment on one rank
Prefix = tuple[int, int, int]  # (a, b, c): segments a..b see all of segment c
Pair = tuple[int, int, int, int]  # (a, b, c, d): our queries a..b meet keys c..d of a rank


@dataclass
class Blocks:
    """The blocks of all layers with the same window.

    `causal` covers all our tokens, with our own keys. `cross[i]` are the other blocks of step i of
    the ring, and a query occurs in each of them once at most.
    """

    causal: Block
    cross: list[list[Block]]
    pages: Pages | None = None  # if set, what the forward pass takes in their place


@dataclass(frozen=True)
class Run:
    """Tokens of one segment whose positions follow each other on one rank."""

    start: int  # rows start..end of the rank's tokens
    end: int
    position: int  # of the first token in its document: a prefix counts

    def cut(self, length: int) -> list["Run"]:
        """Runs of at most `length` tokens."""
        return [
            Run(start, min(start + length, self.end), self.position + start - self.start)
            for start in range(self.start, self.end, length)
        ]


class Layout:
    """Where the tokens of a pack are, as rank `rank` sees it.

    `chunks[rank]` has the lengths of the two chunks of each segment on each rank of the ring. A
    segment is causal within itself; a prefix (a, b, c) lets segments a..b see all of segment c as
    well.
    """

    def __init__(
        self, chunks: list[Chunks], prefixes: list[Prefix], device: torch.device, rank: int
    ):
        self.chunks = chunks
        self.prefixes = prefixes
        self.device = device
        self.rank = rank
        self.starts = [_segment_starts(rank_chunks) for rank_chunks in chunks]
        # Tokens of each segment on all ranks.
        lengths = [sum(map(sum, segment)) for segment in zip(*chunks, strict=True)]
        # The length of the prefix of each segment, 0 without one.
        self.first_positions = [0] * len(chunks[0])
        for a, b, c in prefixes:
            self.first_positions[a:b] = [lengths[c]] * (b - a)
        # Tokens of the longest segment, its prefix included.
        self.longest_document = max(map(sum, zip(lengths, self.first_positions, strict=True)))

    def documents(self) -> Iterator[tuple[Tensor, int, int]]:
        """Yields, for each segment, the rows of its document and where the segment is in it.

        For one process. The document of an answer begins with its prompt. The segment has the
        positions from the first number up to, and without, the second one.
        """
        [starts] = self.starts
        prompt_of = {}  # by the number of the segment
        for first_answer, end, prompt in self.prefixes:
            for answer in range(first_answer, end):
                prompt_of[answer] = prompt
        for segment in range(len(starts) - 1):
            rows = torch.arange(starts[segment], starts[segment + 1])
            if segment in prompt_of:
                prompt = prompt_of[segment]
                rows = torch.cat([torch.arange(starts[prompt], starts[prompt + 1]), rows])
            yield rows, self.first_positions[segment], len(rows)

    def full_blocks(self, sources: list[int]) -> Blocks:
        """The blocks without a window. In step i of the ring the keys are those of `sources[i]`."""
        cross = []
        for source in sources:
            pairs = [self._chunk_pairs(source), self._prefix_pairs(source)]
            cross.append(self._cross_blocks(pairs))
        return Blocks(_causal_block(self.starts[self.rank]), cross)

    def _chunk_pairs(self, source: int) -> list[Pair]:
        """Which queries of ours see which keys of another rank, by the table of this module."""
        if source == self.rank:
            return []
        ours = self.starts[self.rank]
        theirs = self.starts[source]
        pairs = []
        for s in range(len(ours) - 1):
            if source < self.rank:
                first, _ = self.chunks[source][s]
                pairs.append((ours[s], ours[s + 1], theirs[s], theirs[s] + first))
            else:
                first, _ = self.chunks[self.rank][s]
                pairs.append((ours[s] + first, ours[s + 1], theirs[s], theirs[s + 1]))
        return pairs

    def _prefix_pairs(self, source: int) -> list[Pair]:
        """Our queries of the segments that see a prefix against its keys on rank `source`."""
        ours = self.starts[self.rank]
        theirs = self.starts[source]
        return [(ours[a], ours[b], theirs[c], theirs[c + 1]) for a, b, c in self.prefixes]

    def window_blocks(self, sources: list[int], window: int) -> Blocks:
        """The blocks of layers in which a query sees `window` keys at most, its own included."""
        boundaries = [0]
        for runs in self._runs(self.rank):
            for run in runs:
                boundaries += [piece.end for piece in run.cut(window)]
        cross = []
        for source in sources:
            rectangles: dict[tuple[str, int], list[Pair]] = defaultdict(list)
            triangles: dict[tuple[str, int], list[Pair]] = defaultdict(list)
            for group, queries, keys in self._earlier_keys(source, window):
                pairs, triangle = _visible_pairs(queries, keys, window)
                rectangles[group] += pairs
                triangles[group].append(triangle)
            cross.append(
                self._cross_blocks(rectangles.values())
                + self._cross_blocks(triangles.values(), are_triangles=True)
            )
        return Blocks(_causal_block(boundaries), cross)

    def _earlier_keys(self, source: int, window: int) -> Iterator[tuple[tuple[str, int], Run, Run]]:
        """(group, our queries, earlier keys of their document on rank `source`).

        A query occurs once in each group.
        """
        ours = self._runs(self.rank)
        theirs = self._runs(source)
        for our_runs, their_runs in zip(ours, theirs, strict=True):
            for queries, (i, keys) in product(our_runs, enumerate(their_runs)):
                if queries == keys:
                    for before, piece in pairwise(queries.cut(window)):
                        yield ("segment", i), piece, before
                elif keys.position < queries.position:
                    yield ("segment", i), queries, keys
        for a, b, c in self.prefixes:
            for our_runs, (i, keys) in product(ours[a:b], enumerate(theirs[c])):
                for queries in our_runs:
                    yield ("prefix", i), queries, keys

    def _cross_blocks(
        self, groups: Iterable[list[Pair]], are_triangles: bool = False
    ) -> list[Block]:
        """A block of each group that has a pair with both queries and keys.

        Triangles are causal in reverse order.
        """
        blocks = []
        for pairs in groups:
            queries, keys = [], []
            for query_start, query_end, key_start, key_end in pairs:
                if query_start < query_end and key_start < key_end:
                    query_rows = torch.arange(query_start, query_end)
                    key_rows = torch.arange(key_start, key_end)
                    queries.append(query_rows.flip(0) if are_triangles else query_rows)
                    keys.append(key_rows.flip(0) if are_triangles else key_rows)
            if queries:
                block = Block(
                    cu_q=list(accumulate(map(len, queries), initial=0)),
                    cu_k=list(accumulate(map(len, keys), initial=0)),
                    causal=are_triangles,
                    queries=copy_to_device(torch.cat(queries), self.device),
                    keys=copy_to_device(torch.cat(keys), self.device),
                )
                blocks.append(block)
        return blocks

    def _runs(self, rank: int) -> list[list[Run]]:
        """[S], the one or two runs of each segment on `rank`."""
        size = len(self.chunks)
        runs = []
        for s, (first, second) in enumerate(self.chunks[rank]):
            lengths = [rank_chunks[s][0] for rank_chunks in self.chunks]
            lengths += [rank_chunks[s][1] for rank_chunks in reversed(self.chunks)]
            positions = list(accumulate(lengths, initial=self.first_positions[s]))
            start = self.starts[rank][s]
            if rank == size - 1:  # it holds the two chunks in the middle
                runs.append([Run(start, start + first + second, positions[rank])])
            else:
                middle = start + first
                opposite = positions[2 * size - 1 - rank]
                runs.append(
                    [Run(start, middle, positions[rank]), Run(middle, middle + second, opposite)]
                )
        return runs


def _segment_starts(chunks: Chunks) -> list[int]:
    """[S + 1], the first local token of each segment and the number of all tokens."""
    return list(accumulate((first + second for first, second in chunks), initial=0))


def _causal_block(boundaries: list[int]) -> Block:
    """Queries against keys between each two boundaries, over our own tokens."""
    # Segments without a token here drop out. A rank without a token runs one that nobody sees.
    distinct = sorted(set(boundaries))
    cu_seqlens = distinct if distinct[-1] else [0, 1]
    return Block(cu_seqlens, cu_seqlens, causal=True)


def _visible_pairs(queries: Run, keys: Run, window: int) -> tuple[list[Pair], Pair]:
    """What `queries` see of the earlier `keys`: pairs that meet completely, and a triangle.

    In the triangle (a, b, c, d) the query a + i meets the keys c + i..d. Pairs may be empty.
    """
    query, key = queries.start, keys.start
    # Query i sees the keys from `first` + i on.
    first = queries.position - keys.position - window + 1
    pairs = []
    if first <= 0:
        num_queries = min(1 - first, queries.end - query)
        pairs.append((query, query + num_queries, key, keys.end))
        query += num_queries
        first = 1
    key += first
    size = min(queries.end - query, keys.end - key)
    pairs.append((query, query + size, key + size, keys.end))
    return pairs, (query, query + size, key, key + size)
