"""Zigzag ring attention over packed segments; with one process it is packed attention without
communication.

A segment is cut into 2 * size chunks. Rank r of `size` holds chunks r and 2 * size - 1 - r of each
segment, one behind the other, so all ranks have the same causal work. Keys and values travel around
the ring (Liu et al., 2023, arXiv:2310.01889) while the next block is computed. What rank r computes
with the keys of rank `source`:

    source == r   causal attention over its two chunks, whose positions ascend
    source <  r   all its queries see the first chunk of `source`, none sees the second one
    source >  r   the queries of its second chunk see both chunks, those of its first one see none

Chunks need not be equally long, so nothing is padded, and a short segment may leave a rank without
any of its tokens.

Shapes: L local packed tokens, H query heads, G key heads, D head size, S segments.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl2.parallel.attention import Block, backward_block, forward_block, merge

Chunks = list[tuple[int, int]]  # [S], the lengths of the two chunks of each segment on one rank
Prefix = tuple[int, int, int]  # (a, b, c): segments a..b see all of segment c
Pair = tuple[int, int, int, int]  # (a, b, c, d): our queries a..b see keys c..d of a rank


@dataclass
class Transfer:
    """A message on its way to the next rank, and one on its way to us from the previous rank."""

    sent: Tensor  # its memory must live until the message has left
    received: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        """What the previous rank sent."""
        for work in self.works:
            work.wait()
        return self.received


class Ring:
    """The processes of `group` in a circle; without a group, this process alone."""

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group
        self.rank = dist.get_rank(group) if group else 0
        self.size = dist.get_world_size(group) if group else 1

    def pass_on(self, tensor: Tensor, length: int) -> Transfer:
        """Begins to send `tensor` [n, rows, ...] to the next rank.

        The transfer gives what the previous rank sends, [n, length, ...].
        """
        tensor = tensor.contiguous()
        received = tensor.new_empty(tensor.shape[0], length, *tensor.shape[2:])
        operations = [
            dist.P2POp(dist.isend, tensor, self._global_rank(1), self.group),
            dist.P2POp(dist.irecv, received, self._global_rank(-1), self.group),
        ]
        return Transfer(tensor, received, dist.batch_isend_irecv(operations))

    def _global_rank(self, offset: int) -> int:
        assert self.group is not None
        return dist.get_global_rank(self.group, (self.rank + offset) % self.size)


class PackedAttention:
    """The attention of one pack: every layer of its forward pass is given it as `attend`.

    `chunks[rank]` has the lengths of the two chunks of each segment on each rank of the ring. A
    segment is causal within itself; a prefix (a, b, c) lets segments a..b see all of segment c as
    well.

    In step i of the ring we have the keys of rank `sources[i]`. Step 0 has our own keys and begins
    with `causal_block`, which covers all our tokens. `cross_blocks[i]` are the step's other blocks.

    No dataclass: FSDP would copy it, and its blocks, at every layer.
    """

    def __init__(
        self,
        chunks: list[Chunks],
        prefixes: list[Prefix],
        device: torch.device,
        ring: Ring | None = None,
    ):
        self.ring = ring or Ring()
        self.chunks = chunks
        self.starts = [_segment_starts(rank_chunks) for rank_chunks in chunks]
        # [size], tokens on each rank. A rank without a token of this pack runs one that nobody
        # sees.
        self.lengths = [max(1, starts[-1]) for starts in self.starts]
        size = self.ring.size
        self.sources = [(self.ring.rank - step) % size for step in range(size)]
        self.causal_block = self._causal_block()
        self.cross_blocks: list[list[Block]] = []
        for source in self.sources:
            pairs = [self._chunk_pairs(source), self._prefix_pairs(prefixes, source)]
            blocks = [_cross_block(block_pairs, device) for block_pairs in pairs]
            self.cross_blocks.append([block for block in blocks if block is not None])

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float
    ) -> Tensor:
        """query [1, H, L, D], key and value [1, G, L, D] -> [1, L, H, D]."""
        q, k, v = (heads[0].transpose(0, 1) for heads in (query, key, value))
        return _Attention.apply(q, k, v, self, scaling)[None]

    def next_length(self, step: int) -> int:
        """Tokens of the rank whose keys come after those of `step`."""
        next_step = (step + 1) % self.ring.size
        return self.lengths[self.sources[next_step]]

    def _causal_block(self) -> Block:
        """Each segment's queries against its keys, over our own tokens."""
        starts = self.starts[self.ring.rank]
        # Segments without a token here drop out.
        boundaries = sorted(set(starts)) if starts[-1] else [0, 1]
        return Block(boundaries, boundaries, causal=True)

    def _chunk_pairs(self, source: int) -> list[Pair]:
        """Which queries of ours see which keys of another rank, by the table of this module."""
        rank = self.ring.rank
        if source == rank:
            return []
        pairs = []
        for (query_start, query_end), (key_start, key_end), ours, theirs in zip(
            pairwise(self.starts[rank]),
            pairwise(self.starts[source]),
            self.chunks[rank],
            self.chunks[source],
            strict=True,
        ):
            if source < rank:
                pairs.append((query_start, query_end, key_start, key_start + theirs[0]))
            else:
                pairs.append((query_start + ours[0], query_end, key_start, key_end))
        return pairs

    def _prefix_pairs(self, prefixes: list[Prefix], source: int) -> list[Pair]:
        """Our queries of the segments that see a prefix against its keys on rank `source`."""
        ours = self.starts[self.ring.rank]
        theirs = self.starts[source]
        return [(ours[a], ours[b], theirs[c], theirs[c + 1]) for a, b, c in prefixes]


def _segment_starts(chunks: Chunks) -> list[int]:
    """[S + 1], the first local token of each segment and the number of all tokens."""
    return list(accumulate((first + second for first, second in chunks), initial=0))


def _cross_block(pairs: list[Pair], device: torch.device) -> Block | None:
    """The block of all pairs that have both queries and keys; None if there are none."""
    queries = []
    keys = []
    for query_start, query_end, key_start, key_end in pairs:
        if query_start < query_end and key_start < key_end:
            queries.append(torch.arange(query_start, query_end))
            keys.append(torch.arange(key_start, key_end))
    if not queries:
        return None
    return Block(
        cu_q=list(accumulate(map(len, queries), initial=0)),
        cu_k=list(accumulate(map(len, keys), initial=0)),
        causal=False,
        queries=torch.cat(queries).to(device),
        keys=torch.cat(keys).to(device),
    )


class _Attention(torch.autograd.Function):
    """q [L, H, D], k and v [L, G, D] -> [L, H, D]. The blocks of all steps are merged in fp32.

    In a ring `kv` is one tensor [2, L, G, D], so that one message carries both. A single process
    does not copy them into one.
    """

    @staticmethod
    def forward(ctx, q, k, v, attention, scale):
        ring = attention.ring
        kv = torch.stack((k, v)) if ring.size > 1 else (k, v)
        for step, blocks in enumerate(attention.cross_blocks):
            is_last = step + 1 == ring.size
            if not is_last:
                pending_kv = ring.pass_on(kv, attention.next_length(step))
            if step == 0:
                out, lse = forward_block(q, kv[0], kv[1], attention.causal_block, scale)
            for block in blocks:
                rows = block.queries
                block_k = kv[0][block.keys]
                block_v = kv[1][block.keys]
                block_out, block_lse = forward_block(q[rows], block_k, block_v, block, scale)
                out = out.float()
                out[rows], lse[rows] = merge(out[rows], lse[rows], block_out.float(), block_lse)
            if not is_last:
                kv = pending_kv.wait()
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.attention = attention
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, d_out):
        q, k, v, out, lse = ctx.saved_tensors
        attention = ctx.attention
        ring = attention.ring
        kv = torch.stack((k, v)) if ring.size > 1 else (k, v)
        pending_dkv = None
        for step, blocks in enumerate(attention.cross_blocks):
            is_last = step + 1 == ring.size
            if not is_last:
                pending_kv = ring.pass_on(kv, attention.next_length(step))
            # dq and dkv are sums over blocks, in fp32.
            if step == 0:
                dq, dk, dv = backward_block(
                    d_out, q, kv[0], kv[1], out, lse, attention.causal_block, ctx.scale
                )
                dq = dq.float()
                dkv = torch.stack((dk, dv)).float()
            else:
                dkv = torch.zeros(2, *kv[0].shape, device=q.device)
            for block in blocks:
                rows = block.queries
                block_k = kv[0][block.keys]
                block_v = kv[1][block.keys]
                block_dq, block_dk, block_dv = backward_block(
                    d_out[rows], q[rows], block_k, block_v, out[rows], lse[rows], block, ctx.scale
                )
                dq.index_add_(0, rows, block_dq.float())
                dkv.index_add_(1, block.keys, torch.stack((block_dk, block_dv)).float())
            # The gradient travels behind its keys, and after the last step it goes home.
            if pending_dkv is not None:
                dkv += pending_dkv.wait()
            if ring.size > 1:
                pending_dkv = ring.pass_on(dkv, attention.next_length(step))
            if not is_last:
                kv = pending_kv.wait()
        dk, dv = dkv if pending_dkv is None else pending_dkv.wait()
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None, None
