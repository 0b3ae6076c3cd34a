"""Attention on a block interface, its kernels, and the one place where Hugging Face models are
hooked.

A block is `forward_block(q, k, v, ...) -> (out, lse)` with its backward: queries attend to the keys
of their own document only, and the log-sum-exp lets the results of several blocks over different
keys be merged into what one softmax over all of them would give: out = sum_i exp(lse_i - lse)
out_i, lse = log sum_i exp(lse_i). The backward of each block takes the merged out and lse (as ring
attention does: Liu et al., 2023, arXiv:2310.01889).

Shapes: L packed tokens, H query heads, G key heads (H a multiple of G), D head size, S documents.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise

import torch
from torch import Tensor
from transformers import AttentionInterface

aten = torch.ops.aten
# Documents no longer than SHORT share a CPU kernel call, padded to a multiple of ROUND. Up to SHORT
# queries times SHORT keys go backward in fp32: on 160 tokens the bf16 kernel took twice as long, on
# 1,024 the fp32 one 1.4 times (AVX512-BF16).
SHORT, ROUND = 256, 16


@dataclass
class Block:
    """Which queries meet which keys: document s is queries[cu_q[s]:cu_q[s+1]] against
    keys[cu_k[s]:cu_k[s+1]]; none is empty on either side.
    """

    cu_q: list[int]  # [S + 1]
    cu_k: list[int]  # [S + 1]
    causal: bool  # then queries and keys are the same tokens
    queries: Tensor | None = None  # rows of the packed tokens; None = all
    keys: Tensor | None = None

    @cached_property
    def calls(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """The CPU kernel's calls: (query rows [n, w], key rows [n, v], which query rows are real
        [n, w]).

        Short documents of similar length are padded into one call. Padding repeats a document's
        last token: in a causal block it stands behind every real query, which hides it; in any
        other the keys must be equally many.
        """
        groups = {}
        for s in range(len(self.cu_q) - 1):
            queries, keys = self.cu_q[s + 1] - self.cu_q[s], self.cu_k[s + 1] - self.cu_k[s]
            short = queries <= SHORT
            width = -(-queries // ROUND) * ROUND if short else queries
            groups.setdefault((width, 0 if self.causal else keys, -1 if short else s), []).append(s)
        return [self._call(width, documents) for (width, *_), documents in groups.items()]

    def _call(self, width, documents):
        first, last = (
            torch.tensor([self.cu_q[s + i] - i for s in documents])[:, None] for i in (0, 1)
        )
        rows = first + torch.arange(width)
        q_rows = torch.minimum(rows, last)
        k_rows = (
            q_rows
            if self.causal
            else torch.stack([torch.arange(*self.cu_k[s : s + 2]) for s in documents])
        )
        return q_rows, k_rows, rows <= last

    def varlen(self, device) -> tuple[Tensor, Tensor, int, int]:
        """What CUDA kernels want: cu_q, cu_k, and the longest of each."""
        longest = [max(b - a for a, b in pairwise(cu)) for cu in (self.cu_q, self.cu_k)]
        cu_q, cu_k = (
            torch.tensor(cu, dtype=torch.int32, device=device) for cu in (self.cu_q, self.cu_k)
        )
        return cu_q, cu_k, *longest


def forward_block(
    q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float
) -> tuple[Tensor, Tensor]:
    """q [Lq, H, D], k and v [Lk, G, D] -> out [Lq, H, D], lse [Lq, H] float32."""
    if q.is_cuda:
        return _forward_cuda(q, k, v, block, scale)
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    for q_rows, k_rows, real in block.calls:
        # [n, w, H, D] -> [n, H, w, D]
        heads = [x[rows].transpose(1, 2) for x, rows in ((q, q_rows), (k, k_rows), (v, k_rows))]
        o, s = aten._scaled_dot_product_flash_attention_for_cpu(
            *heads, 0.0, block.causal, scale=scale
        )
        out[q_rows[real]] = o.transpose(1, 2)[real]
        lse[q_rows[real]] = s.transpose(1, 2)[real]
    return out, lse


def backward_block(
    dout, q, k, v, out, lse, block: Block, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, given the merged out [Lq, H, D] and lse [Lq, H] over all blocks of
    these queries.
    """
    if q.is_cuda:
        return _backward_cuda(dout, q, k, v, out, lse, block, scale)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for q_rows, k_rows, real in block.calls:
        dtype = torch.float32 if q_rows.shape[1] * k_rows.shape[1] <= SHORT**2 else q.dtype
        heads = [
            x[rows].to(dtype).transpose(1, 2)
            for x, rows in ((q, q_rows), (k, k_rows), (v, k_rows), (out, q_rows))
        ]
        d = (dout[q_rows] * real[..., None, None]).to(dtype).transpose(1, 2)
        s = lse[q_rows].transpose(1, 2)
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            d, *heads, s, 0.0, block.causal, scale=scale
        )
        gq, gk, gv = (g.transpose(1, 2).to(q.dtype) for g in grads)
        dq[q_rows[real]] = gq[real]
        kept = real if block.causal else torch.ones_like(k_rows, dtype=torch.bool)
        dk[k_rows[kept]] = gk[kept]
        dv[k_rows[kept]] = gv[kept]
    return dq, dk, dv


@cache
def _flash_attn():
    """The package flash-attn (2.7 and later) if it is installed and built for this torch, else
    None: then torch's own copy of the same kernel serves.
    """
    try:
        from flash_attn import flash_attn_interface
    except ImportError:
        return None
    return flash_attn_interface


def _forward_cuda(q, k, v, block, scale):
    varlen, package = block.varlen(q.device), _flash_attn()
    if package:
        out, lse, *_ = package._flash_attn_varlen_forward(
            q, k, v, *varlen, 0.0, scale, block.causal
        )
    else:
        out, lse, *_ = aten._flash_attention_forward(
            q, k, v, *varlen, 0.0, block.causal, False, scale=scale
        )
    return out, lse.T  # [H, L] -> [L, H]


def _backward_cuda(dout, q, k, v, out, lse, block, scale):
    given, varlen, package = (
        (dout, q, k, v, out, lse.T.contiguous()),
        block.varlen(q.device),
        _flash_attn(),
    )
    if package:
        gradients = tuple(x.new_empty(x.shape) for x in (q, k, v))
        settings = (
            0.0,
            scale,
            block.causal,
            -1,
            -1,
            0.0,
            None,
            False,
        )  # no window, cap, slopes; fastest order of sums
        package._flash_attn_varlen_backward(*given, *gradients, *varlen, *settings)
        return gradients
    rng = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of the dropout that there is not
    return aten._flash_attention_backward(
        *given, *varlen, 0.0, block.causal, rng, rng[:0], scale=scale
    )


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two partial softmax results over different keys as one, in fp32. out [L, H, D], lse [L,
    H].
    """
    merged = torch.logaddexp(lse, block_lse)
    return out * (lse - merged).exp()[..., None] + block_out * (block_lse - merged).exp()[
        ..., None
    ], merged


def _hook(module, query, key, value, attention_mask, scaling=None, attend=None, **_):
    """Hugging Face's attention contract: query [B, H, L, D] in, (output [B, L, H, D], None) out.

    What attends is the `attend` the caller passed to the model's forward: it travels through every
    layer as a keyword, so no global can go stale.
    """
    return attend(module, query, key, value, scaling), None


AttentionInterface.register("rl2", _hook)
