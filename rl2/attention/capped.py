"""Attention whose scores are capped: cap * tanh(score / cap), as in Gemma 2.

The kernels of torch have no cap, so this is plain matrix products with the same results: (out, lse)
and gradients of one call. Everything is fp32. The scores of a slice of the queries are there at a
time.

Shapes: n documents, H query heads, G key heads (H a multiple of G), W queries, K keys, D head size.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

SCORES_PER_SLICE = 2**22  # 16 MiB, of which a few copies exist


def attend_capped(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """q [n, H, W, D], k and v [n, G, K, D] -> out [n, H, W, D] as q, lse [n, H, W] float32.

    If `causal`, W = K and query i sees keys 0 to i.
    """
    out = torch.empty_like(q)
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    for rows in _slices(q, k):
        keys, values = _visible(rows, causal, k, v)
        scores, _ = _scores(q[:, :, rows], keys, rows, causal, scale, softcap)
        slice_lse = scores.logsumexp(-1)
        probs = (scores - slice_lse[..., None]).exp()
        out[:, :, rows] = (probs @ values).view_as(out[:, :, rows]).to(q.dtype)
        lse[:, :, rows] = slice_lse.view_as(lse[:, :, rows])
    return out, lse


def attend_capped_backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v in fp32; `out` and `lse` may be merged with those of other keys.

    With p = exp(s - lse) and s = c tanh(x / c): ds = p (d_out v - d_out out), and
    dx = ds (1 - tanh(x / c)^2).
    """
    dq = torch.zeros_like(q, dtype=torch.float32)
    dk = torch.zeros_like(k, dtype=torch.float32)
    dv = torch.zeros_like(v, dtype=torch.float32)
    groups = k.shape[1]
    for rows in _slices(q, k):
        keys, values = _visible(rows, causal, k, v)
        num_keys = keys.shape[2]
        scores, tanh = _scores(q[:, :, rows], keys, rows, causal, scale, softcap)
        slice_d_out = _rows_by_key_head(d_out[:, :, rows], groups)
        slice_out = _rows_by_key_head(out[:, :, rows], groups)
        probs = (scores - lse[:, :, rows].reshape(*scores.shape[:3], 1)).exp()
        dv[:, :, :num_keys] += probs.mT @ slice_d_out
        change = (slice_d_out * slice_out).sum(-1, keepdim=True)
        d_scores = probs * (slice_d_out @ values.mT - change) * (1 - tanh.square()) * scale
        dq[:, :, rows] = (d_scores @ keys).view_as(dq[:, :, rows])
        dk[:, :, :num_keys] += d_scores.mT @ _rows_by_key_head(q[:, :, rows], groups)
    return dq, dk, dv


def _slices(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Slices of the queries, of about SCORES_PER_SLICE scores each."""
    n, heads, num_queries, _ = q.shape
    size = max(1, SCORES_PER_SLICE // (n * heads * k.shape[2]))
    for start in range(0, num_queries, size):
        yield slice(start, min(start + size, num_queries))


def _visible(rows: slice, causal: bool, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The keys and values that any of the queries sees, in fp32."""
    end = rows.stop if causal else k.shape[2]
    return k[:, :, :end].float(), v[:, :, :end].float()


def _scores(
    q: Tensor, k: Tensor, rows: slice, causal: bool, scale: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Capped scores [n, G, H / G * w, K], -inf where a key is hidden, and their tanh, never inf.

    q [n, H, w, D] are the queries `rows`.
    """
    scores = _rows_by_key_head(q, k.shape[1]) @ k.mT
    tanh = scores.mul_(scale / softcap).tanh_()
    scores = tanh * softcap
    if causal:
        queries = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
        hidden = torch.arange(k.shape[2], device=q.device) > queries
        scores.unflatten(2, (-1, len(queries))).masked_fill_(hidden, -torch.inf)
    return scores, tanh


def _rows_by_key_head(heads: Tensor, groups: int) -> Tensor:
    """[n, H, w, D] -> [n, G, H / G * w, D] in fp32: all rows that meet the keys of one head."""
    return heads.float().unflatten(1, (groups, -1)).flatten(2, 3)
