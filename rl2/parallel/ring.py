"""Zigzag ring attention over packed segments; with one process it is packed attention without
communication.

A segment is cut into 2 * size chunks, and rank r of `size` holds chunks r and 2 * size - 1 - r of
each, one behind the other: so all ranks have the same causal work. Keys and values travel around
the ring (Liu et al., 2023, arXiv:2310.01889) while the next block is computed. At rank r, with the
keys of rank `source`:

    source == r   causal over our two chunks: their positions ascend source <  r   all our queries
    see its first chunk, none its second source >  r   the queries of our second chunk see both of
    its chunks, those of our first see none

Chunks need not be equally long, so nothing is padded, and a short segment may leave a rank without
any of it.

Shapes: L local packed tokens, H query heads, G key heads, D head size, S segments.
"""

from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from rl2.parallel.attention import Block, backward_block, forward_block, merge


class Ring:
    """The processes of `group` in a circle; without a group, this process alone."""

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group
        self.rank, self.size = (
            (dist.get_rank(group), dist.get_world_size(group)) if group else (0, 1)
        )

    def start(self, tensor: Tensor, length: int):
        """Begins to pass `tensor` [n, rows, ...] on to the next rank; returns a function that waits
        for what the previous one passes, [n, length, ...].
        """
        received = tensor.new_empty(tensor.shape[0], length, *tensor.shape[2:])
        to, source = (
            dist.get_global_rank(self.group, (self.rank + i) % self.size) for i in (1, -1)
        )
        tensor = tensor.contiguous()
        ops = [
            dist.P2POp(dist.isend, tensor, to, self.group),
            dist.P2POp(dist.irecv, received, source, self.group),
        ]
        works = dist.batch_isend_irecv(ops)

        def wait(sent=tensor):  # which must live until then
            for work in works:
                work.wait()
            return received

        return wait


class PackedAttention:
    """The attention of one pack: what every layer of its forward is given as `attend`.

    `chunks[rank][s]`: lengths of the two chunks of segment s that each rank of the ring holds. A
    segment is causal within itself; a prefix (a, b, c) lets segments a..b see all of segment c as
    well. No dataclass: FSDP would copy it, and its blocks, at every layer.
    """

    def __init__(
        self,
        chunks: list[list[tuple[int, int]]],
        prefixes: list[tuple[int, int, int]],
        device,
        ring=None,
    ):
        self.ring = ring or Ring()
        starts = [list(accumulate((a + b for a, b in held), initial=0)) for held in chunks]
        rank, size = self.ring.rank, self.ring.size
        # A rank without a token of this pack runs one that nobody sees.
        self.lengths = [max(1, held[-1]) for held in starts]
        self.steps, self.sources = [], [(rank - step) % size for step in range(size)]
        for source in self.sources:
            pairs = []
            for s, (ours, theirs) in enumerate(zip(chunks[rank], chunks[source], strict=True)):
                q_start, k_start = starts[rank][s], starts[source][s]
                q_skipped = ours[0] if source > rank else 0
                k_seen = theirs[0] if source < rank else sum(theirs)
                pairs.append((q_start + q_skipped, starts[rank][s + 1], k_start, k_start + k_seen))
            if source == rank and not starts[rank][-1]:
                pairs = [(0, 1, 0, 1)]
            shared = [
                (starts[rank][a], starts[rank][b], *starts[source][c : c + 2])
                for a, b, c in prefixes
            ]
            blocks = [_block(pairs, source == rank, device), _block(shared, False, device)]
            self.steps.append([block for block in blocks if block])

    def __call__(self, module, query, key, value, scaling):
        """query [1, H, L, D], key and value [1, G, L, D] -> [1, L, H, D]."""
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return _Attention.apply(q, k, v, self, scaling)[None]

    def next_length(self, step: int) -> int:
        """Tokens of the rank whose keys come after those of `step`."""
        return self.lengths[self.sources[(step + 1) % len(self.sources)]]


def _block(pairs, causal, device) -> Block | None:
    """Queries a..b against keys c..d for each (a, b, c, d); pairs with nothing on a side are left
    out.
    """
    pairs = [(a, b, c, d) for a, b, c, d in pairs if a < b and c < d]
    if not pairs:
        return None
    cu_q = list(accumulate((b - a for a, b, _, _ in pairs), initial=0))
    cu_k = list(accumulate((d - c for _, _, c, d in pairs), initial=0))
    if causal:  # then these are all our tokens
        return Block(cu_q, cu_k, True)
    queries = torch.cat([torch.arange(a, b) for a, b, _, _ in pairs]).to(device)
    keys = torch.cat([torch.arange(c, d) for _, _, c, d in pairs]).to(device)
    return Block(cu_q, cu_k, False, queries, keys)


class _Attention(torch.autograd.Function):
    """q [L, H, D], k and v [L, G, D] -> [L, H, D]. The blocks of all steps are merged in fp32."""

    @staticmethod
    def forward(ctx, q, k, v, plan, scale):
        ring, out, lse = plan.ring, None, None
        kv = torch.stack((k, v)) if ring.size > 1 else (k, v)
        for step, blocks in enumerate(plan.steps):
            last = step + 1 == ring.size
            incoming = None if last else ring.start(kv, plan.next_length(step))
            for block in blocks:
                if block.causal:
                    out, lse = forward_block(q, *kv, block, scale)
                    continue
                rows, keys = block.queries, block.keys
                part = forward_block(q[rows], kv[0][keys], kv[1][keys], block, scale)
                out = out.float()
                out[rows], lse[rows] = merge(out[rows], lse[rows], part[0].float(), part[1])
            kv = kv if last else incoming()
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.scale = plan, scale
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        plan, ring, dq, returning = ctx.plan, ctx.plan.ring, None, None
        kv = torch.stack((k, v)) if ring.size > 1 else (k, v)
        for step, blocks in enumerate(plan.steps):
            last = step + 1 == ring.size
            incoming = None if last else ring.start(kv, plan.next_length(step))
            dkv = torch.zeros(2, *kv[0].shape, device=q.device) if step else None
            for block in blocks:
                if block.causal:
                    dq, *dkv = backward_block(dout, q, *kv, out, lse, block, ctx.scale)
                    if len(plan.steps) > 1 or len(blocks) > 1:
                        dq, dkv = dq.float(), torch.stack(dkv).float()
                    continue
                rows, keys = block.queries, block.keys
                parts = (dout[rows], q[rows], kv[0][keys], kv[1][keys], out[rows], lse[rows])
                gq, *gkv = backward_block(*parts, block, ctx.scale)
                dq.index_add_(0, rows, gq.float())
                dkv.index_add_(1, keys, torch.stack(gkv).float())
            if (
                ring.size > 1
            ):  # the gradient travels with its keys, and after the last step goes home
                dkv = dkv + returning() if step else dkv
                returning = ring.start(dkv, plan.next_length(step))
            kv = kv if last else incoming()
        dk, dv = dkv if returning is None else returning()
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None, None
