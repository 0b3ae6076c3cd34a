"""The linear layers of the embedded engine: packed weights on a CPU, and a trial of their rows."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl2.attention.pages import MIN_ROWS, exact_factors, queries_are_independent
from rl2.rounding import ceil_div

STEP_ROWS_MULTIPLE = 8  # of a step that leaves free slots out


def pack_linear_layers(model: Any, head_dtype: torch.dtype, max_rows: int, exact: bool) -> None:
    """Gives linear layers copies of their weights in the layout of oneDNN's kernels.

    The kernels convert plain weights in every call, which takes 1.25 times as long with 64 rows,
    twice as long with 8. The head is packed in `head_dtype`, without its bias. `max_rows` is the
    number of rows that the layout is for. With `exact`, a layer stays plain if its packed bits
    differ.
    """
    ops = torch.ops.mkldnn
    head = model.get_output_embeddings()
    if head.weight.device.type != "cpu" or not hasattr(ops, "_linear_pointwise"):
        return
    unpack_linear_layers(model)  # what is not packed below must not keep a copy of other weights
    for module in model.modules():
        if type(module) is not nn.Linear:
            continue
        weight = module.weight.to(head_dtype) if module is head else module.weight
        if not can_pack(weight.dtype):
            continue
        bias = None if module is head else module.bias
        with exact_factors(module.weight.dtype):
            packed = ops._reorder_linear_weight(weight, max_rows)
            linear = partial(_packed_linear, packed, bias)
            if exact and not _is_plain(linear, weight, bias):
                linear = partial(F.linear, weight=weight, bias=bias)
        module.__dict__["forward"] = linear


def unpack_linear_layers(model: nn.Module) -> None:
    """Frees the packed copies: layers compute with their own weights again."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__dict__.pop("forward", None)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this CPU computes with packed weights of `dtype`."""
    ops = torch.ops.mkldnn
    if dtype == torch.bfloat16:
        return ops._is_mkldnn_bf16_supported()
    if dtype == torch.float16:
        return ops._is_mkldnn_fp16_supported()
    return dtype == torch.float32


def _is_plain(linear: Any, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `linear` gives the bits of the plain layer that the trainer has.

    The rows of the weight serve as input.
    """
    rows = _repeat_rows(weight, MIN_ROWS)
    return torch.equal(linear(rows), F.linear(rows, weight, bias))


def _repeat_rows(weight: Tensor, count: int) -> Tensor:
    """The first `count` rows of the weight, from the first one on again if it has fewer."""
    return weight[:count].repeat(ceil_div(count, len(weight)), 1)[:count]


def _packed_linear(weight: Tensor, bias: Tensor | None, inputs: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")


def head_logits(head: nn.Linear, hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """hidden [n, E] -> logits [n, V] in `dtype`, the one that a packed head has."""
    logits = _head_products(head, hidden, dtype)
    bias = getattr(head, "bias", None)
    return logits if bias is None else logits.add_(bias)


def _head_products(head: nn.Linear, hidden: Tensor, dtype: torch.dtype) -> Tensor:
    if hidden.is_cuda and hidden.dtype != dtype:
        return torch.mm(hidden, head.weight.T, out_dtype=dtype)
    with exact_factors(hidden.dtype):
        hidden = hidden.to(dtype)
        if "forward" in head.__dict__:  # packed
            return head(hidden)
        return hidden @ head.weight.to(dtype).T


@torch.inference_mode()
def rows_are_independent(
    model: Any, head_dtype: torch.dtype, max_rows: int, max_prefill_rows: int
) -> bool:
    """Whether a row has the same bits however many rows are computed with it.

    In a step of up to `max_rows`, all of whose sizes are tried, and in a prefill of up to
    `max_prefill_rows`, of which some are. Attention and linear layers are tried, one of each shape.
    Other modules with weights in matrices, such as experts, are not tried: a model that has some is
    not independent.
    """
    head = model.get_output_embeddings()
    linear_layers = {}  # by shape
    tried = set()
    for module in model.modules():
        if type(module) in (nn.Linear, nn.Embedding):
            tried.add(id(module.weight))
        if type(module) is nn.Linear:
            linear_layers[module.weight.shape] = module
    for weight in model.parameters():
        if weight.ndim > 1 and id(weight) not in tried:
            return False
    if not queries_are_independent(model.get_input_embeddings().weight.dtype):
        return False
    steps = [*range(MIN_ROWS, max_rows, STEP_ROWS_MULTIPLE), max_rows]
    sizes = [*steps, *_prefill_sizes(max_rows, max_prefill_rows)]
    for layer in linear_layers.values():
        compute = partial(head_logits, head, dtype=head_dtype) if layer is head else layer
        # A prefill has no logits.
        if not _is_independent(compute, layer.weight, steps if layer is head else sizes):
            return False
    return True


def _prefill_sizes(smallest: int, largest: int) -> list[int]:
    """Numbers of rows from `smallest` to `largest`, each about twice the one before."""
    sizes = [largest]
    while sizes[-1] > 2 * smallest:
        sizes.append(sizes[-1] // 2 // STEP_ROWS_MULTIPLE * STEP_ROWS_MULTIPLE)
    return sizes


def _is_independent(compute: Any, weight: Tensor, sizes: list[int]) -> bool:
    """Whether these numbers of rows give the same bits. The rows of the weight are the input."""
    largest = max(sizes)
    rows = _repeat_rows(weight, largest)
    expected = compute(rows)
    return all(
        torch.equal(compute(rows[:num_rows]), expected[:num_rows])
        for num_rows in sizes
        if num_rows < largest
    )
