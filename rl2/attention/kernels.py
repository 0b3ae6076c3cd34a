"""Attention by blocks, its kernels, and the one place where Hugging Face models are hooked.

A block lets queries attend to the keys of their own document only and gives (out, lse). The
log-sum-exp lets the results of several blocks over different keys be merged into what one softmax
over all of them gives: out = sum_i exp(lse_i - lse) out_i with lse = log sum_i exp(lse_i). The
backward pass of each block takes the merged out and lse (as ring attention does: Liu et al., 2023,
arXiv:2310.01889). A sink (gpt-oss) is one more block: a key of each head whose score is a weight
and whose value is 0.

Shapes: L packed tokens, H query heads, G key heads (H a multiple of G), D head size, S documents.
"""

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from rl2.parallel.device import copy_to_device, device_kind
from rl2.progress import mark
from rl2.rounding import round_up

aten = torch.ops.aten
NO_DROPOUT = 0.0
# Documents of at most this many tokens share a call of the CPU's kernel, padded to a multiple of
# WIDTH_MULTIPLE_TOKENS.
SHORT_DOCUMENT_TOKENS = 256
WIDTH_MULTIPLE_TOKENS = 16
# Up to this size the backward pass of a document runs in fp32 on the CPU: on 160 tokens the bf16
# kernel took twice as long, on 1,024 tokens the fp32 kernel took 1.4 times as long (AVX512-BF16).
FP32_BACKWARD_CELLS = SHORT_DOCUMENT_TOKENS**2  # queries times keys


@dataclass
class Block:
    """Which queries meet which keys.

    Document s is queries[cu_q[s]:cu_q[s+1]] against keys[cu_k[s]:cu_k[s+1]]. No document is empty
    on either side.
    """

    cu_q: list[int]  # [S + 1]
    cu_k: list[int]  # [S + 1]
    causal: bool  # a document's query i sees its keys 0 to i, and there are equally many of both
    queries: Tensor | None = None  # [cu_q[-1]], which packed tokens; None = all
    keys: Tensor | None = None  # [cu_k[-1]], which packed tokens; None = all
    _varlen: tuple[Tensor, Tensor, int, int] | None = field(default=None, init=False)

    @cached_property
    def calls(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """The calls of the CPU's kernel, each on n documents padded to the same width.

        A call is (rows of the queries [n, width], rows of the keys [n, keys], which query rows are
        real [n, width]).

        Padding repeats a document's last token. In a causal block it comes after all real
        queries, which do not see it. In other blocks documents share a call only if they have
        equally many keys, which are not padded.
        """
        groups: dict[tuple[int, int, int], list[int]] = {}
        for s in range(len(self.cu_q) - 1):
            num_queries = self.cu_q[s + 1] - self.cu_q[s]
            num_keys = 0 if self.causal else self.cu_k[s + 1] - self.cu_k[s]
            width = num_queries
            call = s  # a long document has a call of its own
            if num_queries <= SHORT_DOCUMENT_TOKENS:
                width = round_up(num_queries, WIDTH_MULTIPLE_TOKENS)
                call = -1
            groups.setdefault((width, num_keys, call), []).append(s)
        return [self._call(width, documents) for (width, _, _), documents in groups.items()]

    def _call(self, width: int, documents: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        first = torch.tensor([self.cu_q[s] for s in documents])[:, None]
        last = torch.tensor([self.cu_q[s + 1] - 1 for s in documents])[:, None]
        rows = first + torch.arange(width)
        q_rows = torch.minimum(rows, last)
        k_rows = q_rows
        if not self.causal:
            k_rows = torch.stack([torch.arange(self.cu_k[s], self.cu_k[s + 1]) for s in documents])
        return q_rows, k_rows, rows <= last

    def varlen(self, device: torch.device) -> tuple[Tensor, Tensor, int, int]:
        """The arguments of CUDA kernels: cu_q, cu_k, the longest queries and the longest keys.

        They are made once, for all layers and for the backward pass.
        """
        if self._varlen is None:
            cu_q = copy_to_device(torch.tensor(self.cu_q, dtype=torch.int32), device)
            cu_k = cu_q
            if self.cu_k != self.cu_q:
                cu_k = copy_to_device(torch.tensor(self.cu_k, dtype=torch.int32), device)
            self._varlen = cu_q, cu_k, _longest(self.cu_q), _longest(self.cu_k)
        return self._varlen


def _longest(boundaries: list[int]) -> int:
    return max(end - start for start, end in pairwise(boundaries))


def forward_block(
    q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float
) -> tuple[Tensor, Tensor]:
    """q [Lq, H, D], k and v [Lk, G, D] -> out [Lq, H, D], lse [Lq, H] float32."""
    if device_kind(q.device) == "cuda":
        return _forward_cuda(q, k, v, block, scale)
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    for q_rows, k_rows, is_real in block.calls:
        call_out, call_lse = aten._scaled_dot_product_flash_attention_for_cpu(
            _heads(q, q_rows),
            _heads(k, k_rows),
            _heads(v, k_rows),
            NO_DROPOUT,
            block.causal,
            scale=scale,
        )
        out[q_rows[is_real]] = call_out.transpose(1, 2)[is_real]
        lse[q_rows[is_real]] = call_lse.transpose(1, 2)[is_real]
    return out, lse


def backward_block(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    block: Block,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, see `forward_block`.

    out [Lq, H, D], its gradient d_out, and lse [Lq, H] are merged over all blocks of these queries.
    """
    mark()
    if device_kind(q.device) == "cuda":
        return _backward_cuda(d_out, q, k, v, out, lse, block, scale)
    dq = torch.zeros_like(q)
    dk = torch.zeros_like(k)
    dv = torch.zeros_like(v)
    for q_rows, k_rows, is_real in block.calls:
        cells = q_rows.shape[1] * k_rows.shape[1]
        dtype = torch.float32 if cells <= FP32_BACKWARD_CELLS else q.dtype
        call_d_out = d_out[q_rows] * is_real[..., None, None]  # 0 where a query is padding
        gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            call_d_out.to(dtype).transpose(1, 2),
            _heads(q, q_rows, dtype),
            _heads(k, k_rows, dtype),
            _heads(v, k_rows, dtype),
            _heads(out, q_rows, dtype),
            lse[q_rows].transpose(1, 2),
            NO_DROPOUT,
            block.causal,
            scale=scale,
        )
        call_dq, call_dk, call_dv = (heads.transpose(1, 2).to(q.dtype) for heads in gradients)
        dq[q_rows[is_real]] = call_dq[is_real]
        is_real_key = is_real if block.causal else torch.ones_like(k_rows, dtype=torch.bool)
        dk[k_rows[is_real_key]] = call_dk[is_real_key]
        dv[k_rows[is_real_key]] = call_dv[is_real_key]
    return dq, dk, dv


def _heads(tensor: Tensor, rows: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Rows [n, width] of [L, H, D] as the CPU's kernel takes them: [n, H, width, D]."""
    return tensor[rows].to(dtype or tensor.dtype).transpose(1, 2)


def _forward_cuda(q, k, v, block: Block, scale: float) -> tuple[Tensor, Tensor]:
    cu_q, cu_k, max_q, max_k = block.varlen(q.device)
    return_mask = False
    results = aten._flash_attention_forward(
        q, k, v, cu_q, cu_k, max_q, max_k, NO_DROPOUT, block.causal, return_mask, scale=scale
    )
    return results[0], results[1].T  # lse [H, L] -> [L, H]


def _backward_cuda(d_out, q, k, v, out, lse, block: Block, scale: float):
    cu_q, cu_k, max_q, max_k = block.varlen(q.device)
    random_state = torch.empty(2, dtype=torch.uint64, device=q.device)  # of dropout: not used
    unused = random_state[:0]
    return aten._flash_attention_backward(
        d_out,
        q,
        k,
        v,
        out,
        lse.T.contiguous(),  # [L, H] -> [H, L]
        cu_q,
        cu_k,
        max_q,
        max_k,
        NO_DROPOUT,
        block.causal,
        random_state,
        unused,
        scale=scale,
    )


def merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Two softmax results over different keys as one, in fp32: out [L, H, D] and lse [L, H]."""
    merged_lse = torch.logaddexp(lse, block_lse)
    share = (lse - merged_lse).exp()[..., None]
    block_share = (block_lse - merged_lse).exp()[..., None]
    return out * share + block_out * block_share, merged_lse


def merge_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Adds the score `sinks` [H] to each softmax, in fp32: out [L, H, D] and lse [L, H]."""
    merged_lse = torch.logaddexp(lse, sinks.float())
    return out.float() * (lse - merged_lse).exp()[..., None], merged_lse


def sinks_gradient(d_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of `sinks` [H], whose value is 0, from the merged out [L, H, D], lse [L, H]."""
    shares = (sinks.float() - lse).exp()
    return -(shares * (d_out.float() * out.float()).sum(-1)).sum(0).to(sinks.dtype)


# Keywords that models hand to their attention and that change nothing in a causal pack.
HARMLESS_KEYWORDS = {"position_ids", "cache_position", "use_cache"}


def _check_keywords(module: nn.Module, dropout: float, keywords: dict[str, object]) -> None:
    """ValueError for a keyword that would change the result and that rl2 does not compute."""
    is_causal = keywords.pop("is_causal", None)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    names = [] if is_causal else ["is_causal=False"]
    for name, value in keywords.items():
        if name not in HARMLESS_KEYWORDS and value is not None and value is not False:
            names.append(name)
    attention_name = type(module).__name__
    if names:
        raise ValueError(
            f"{attention_name} asks for {', '.join(names)}, which rl2 does not compute: choose "
            "another model"
        )
    if dropout:
        raise ValueError(
            f"{attention_name} asks for dropout={dropout}, which rl2 does not compute: set the "
            "dropout of attention to 0 in the model's config.json"
        )


def _hook(
    module,
    query,
    key,
    value,
    attention_mask,
    scaling=None,
    dropout=0.0,
    sliding_window=None,
    s_aux=None,
    attend=None,
    **unknown: object,
) -> tuple[Tensor, None]:
    """Hugging Face's attention contract: query [B, H, L, D] in, (output [B, L, H, D], None) out.

    `attend` is the PackedAttention that the caller passed to the model's forward. It travels
    through every layer as a keyword, so no global can go stale.
    """
    if attend is None:
        raise ValueError(
            f"{type(module).__name__} is not given the keywords of the model's forward"
        )
    _check_keywords(module, dropout, {"attention_mask": attention_mask, **unknown})
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    return attend(module, query, key, value, scaling, sliding_window, s_aux), None


AttentionInterface.register("rl2", _hook)
