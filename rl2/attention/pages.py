"""Attention that gives the same bits in a decoding step, in a prefill and in a packed pass.

Every query meets the keys of its document page by page, counted from the document's first token, in
matrix products whose rows do not depend on how many rows share them. So the bits do not depend on
which queries and documents share a call.

Shapes: n documents of a call, G key heads, g query heads of each, W queries, N pages,
P = PAGE_SIZE_TOKENS, K = N * P keys, D head size, L packed tokens.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rl2.rounding import round_up

PAGE_SIZE_TOKENS = 64
# With fewer rows MKL takes kernels for vectors in fp32, which sum in another order: in the products
# of one head, and in those of all tokens: threads share their rows.
MIN_HEAD_ROWS = 4
MIN_ROWS = 16
WIDTH_MULTIPLE_TOKENS = 16  # queries of documents that share a call are padded to a multiple of it
NUMBERS_PER_PRODUCT = 2**20  # of a factor, all pages together: 4 MiB
CELLS_PER_CALL = 2**18  # queries times keys: the scores of ten heads take 10 MiB


@contextmanager
def exact_factors(dtype: torch.dtype) -> Iterator[None]:
    """Within it, products of float32 copies of tensors of `dtype` may take a CPU's kernels for it.

    The product of two bf16 numbers is exact in fp32, and sums are in fp32. oneDNN takes the place
    of MKL, and computes in bf16 on CPUs with AMX.
    """
    mkldnn: Any = torch.backends.mkldnn
    before = mkldnn.matmul.fp32_precision
    if dtype == torch.bfloat16:
        mkldnn.matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        mkldnn.matmul.fp32_precision = before


def attend_pages(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    hidden: Tensor,
    scaling: float,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """query [n, G, W, g, D], keys [N, n, G, D, P], values [N, n, G, P, D], hidden [n, W, K]
    -> out [n, G, W, g, D], scores [n, G, W, g, K], both float32.

    `hidden` is true where a query does not see a key; keys and values are finite there too. Scores
    are fp32 whatever the dtype, as in flash attention: those of some models (Qwen2) are too large
    for bf16.

    `sinks` [G * g] are one more score of each query head, of a value of 0. They fill a page before
    the others, so that they have the same place in the sums of every call; the scores that are
    returned begin with it: [n, G, W, g, P + K].
    """
    n, num_groups, width, group_size, _ = query.shape
    num_rows = width * group_size
    # The queries of one key head are the rows of one matrix, so no key is repeated.
    rows = query.float().reshape(n * num_groups, num_rows, -1)
    rows = F.pad(rows, (0, 0, 0, max(0, MIN_HEAD_ROWS - num_rows)))
    # Few queries meet several pages in one product, since calls would take most of the time.
    size = max(1, NUMBERS_PER_PRODUCT // max(keys[0].numel(), rows.numel()))
    page_scores: list[Tensor] = []
    with exact_factors(query.dtype):
        for pages in keys.split(size):
            page_scores += rows @ pages.flatten(1, 2).float()
    scores = torch.cat(page_scores, -1).mul_(scaling)

    def split(x: Tensor) -> Tensor:
        """[n * G, rows, *] -> [n, G, W, g, *], a view."""
        heads = x[:, :num_rows].unflatten(1, (width, group_size))
        return heads.unflatten(0, (n, num_groups))

    split(scores).masked_fill_(hidden[:, None, :, None], -math.inf)
    if sinks is not None:
        page = scores.new_full((*scores.shape[:2], PAGE_SIZE_TOKENS), -math.inf)
        split(page)[..., 0] = sinks.float().view(num_groups, 1, group_size)
        scores = torch.cat([page, scores], -1)
    probs = scores.softmax(-1)[..., -hidden.shape[-1] :].to(values.dtype)
    probs = probs.unflatten(-1, (len(keys), -1)).permute(2, 0, 1, 3)
    out = rows.new_zeros(*rows.shape[:2], values.shape[-1])
    for pages, page_probs in zip(values.split(size), probs.split(size), strict=True):
        for part in page_probs @ pages.flatten(1, 2):
            out += part.float()
    return split(out), split(scores)


def queries_are_independent(dtype: torch.dtype) -> bool:
    """Whether this CPU gives a query the same bits alone and among others, in a trial."""
    generator = torch.Generator().manual_seed(0)
    for head_size in (64, 128):
        query = torch.randn(8, 1, 48, 1, head_size, generator=generator).to(dtype)
        values = torch.randn(2, 8, 1, PAGE_SIZE_TOKENS, head_size, generator=generator).to(dtype)
        hidden = torch.zeros(8, 48, 2 * PAGE_SIZE_TOKENS, dtype=torch.bool)
        keys = values.mT.contiguous()
        among_others, _ = attend_pages(query, keys, values, hidden, 0.1)
        alone, _ = attend_pages(query[:1, :, 9:10], keys[:, :1], values[:, :1], hidden[:1, :1], 0.1)
        if not torch.equal(alone[0, :, 0], among_others[0, :, 9]):
            return False
    return True


@dataclass(frozen=True)
class Piece:
    """Some queries of a document, on at most one page of it."""

    document: Tensor  # the rows of the document in the pack, [length]
    first: int  # the position of the first query in the document
    end: int  # after the last one


@dataclass(frozen=True)
class Call:
    """Pieces of about the same size. Their attention is computed together."""

    q_rows: Tensor  # the rows of the queries in the pack, [n, W]
    k_rows: Tensor  # the rows of the keys, [n, K]
    hidden: Tensor  # whether a query does not see a key, [n, W, K]
    is_real: Tensor  # whether a query is one of the piece; others fill the matrix up, [n, W]


class Pages:
    """The attention of a pack on one process, by pages.

    `documents` are those of blocks.Layout. With `window` a token sees at most that many tokens, the
    last of which is itself.
    """

    def __init__(self, documents: Iterable[tuple[Tensor, int, int]], window: int | None):
        """Lays out the calls of all layers with the same window.

        A document is cut into pieces. Pieces with the same number of pages and the same width share
        a call.
        """
        pieces: dict[tuple[int, int], list[Piece]] = {}
        for document, first, end_of_document in documents:
            while first < end_of_document:
                page = first // PAGE_SIZE_TOKENS
                end = min(end_of_document, (page + 1) * PAGE_SIZE_TOKENS)
                width = round_up(end - first, WIDTH_MULTIPLE_TOKENS)
                pieces.setdefault((page + 1, width), []).append(Piece(document, first, end))
                first = end
        self.calls: list[Call] = []
        for (num_pages, width), same in pieces.items():
            num_keys = num_pages * PAGE_SIZE_TOKENS
            size = max(1, CELLS_PER_CALL // (width * num_keys))
            for i in range(0, len(same), size):
                self.calls.append(_make_call(same[i : i + size], width, num_keys, window))

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """q [L, H, D], k and v [L, G, D], sinks [H] -> out [L, H, D], lse [L, H] float32."""
        out = torch.zeros_like(q)  # tokens of no segment only fill the matrices up
        lse = q.new_zeros(q.shape[:2], dtype=torch.float32)
        for call in self.calls:
            query = q[call.q_rows].unflatten(2, (k.shape[1], -1)).transpose(1, 2)
            call_out, scores = attend_pages(
                query,
                _pages(k, call.k_rows).transpose(3, 4).contiguous(),
                _pages(v, call.k_rows).contiguous(),
                call.hidden,
                scale,
                sinks,
            )
            call_lse = scores.logsumexp(-1)
            rows = call.q_rows[call.is_real]
            out[rows] = call_out.transpose(1, 2).flatten(2, 3)[call.is_real].to(q.dtype)
            lse[rows] = call_lse.transpose(1, 2).flatten(2, 3)[call.is_real]
        return out, lse


def _make_call(pieces: list[Piece], width: int, num_keys: int, window: int | None) -> Call:
    """Pads the pieces to `width` queries and `num_keys` keys with tokens of their documents."""
    first = torch.tensor([piece.first for piece in pieces])[:, None]
    end = torch.tensor([piece.end for piece in pieces])[:, None]
    positions = first + torch.arange(width)
    keys = torch.arange(num_keys)
    distances = positions[..., None] - keys
    hidden = distances < 0
    if window is not None:
        hidden |= distances >= window
    q_places = positions.minimum(end - 1)
    q_rows, k_rows = [], []
    for piece, places in zip(pieces, q_places, strict=True):
        q_rows.append(piece.document[places])
        k_rows.append(piece.document[keys.clamp(max=len(piece.document) - 1)])
    return Call(
        q_rows=torch.stack(q_rows),
        k_rows=torch.stack(k_rows),
        hidden=hidden,
        is_real=positions < end,
    )


def _pages(tensor: Tensor, rows: Tensor) -> Tensor:
    """Rows [n, K] of [L, G, D] -> [N, n, G, P, D]."""
    pages = tensor[rows].unflatten(1, (-1, PAGE_SIZE_TOKENS))
    return pages.permute(1, 0, 3, 2, 4)
