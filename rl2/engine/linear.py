"""The linear layers of the embedded engine: packed weights on a CPU, and the head."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from rl2.attention.pages import MIN_ROWS, exact_factors
from rl2.model.logits import head_products
from rl2.rounding import ceil_div


def pack_linear_layers(model: PreTrainedModel, max_rows: int, exact: bool) -> None:
    """Gives linear layers copies of their weights in the layout of oneDNN's kernels.

    The kernels convert plain weights in every call, which takes 1.25 times as long with 64 rows,
    twice as long with 8. The head is packed in float32, without its bias. `max_rows` is the
    number of rows that the layout is for. With `exact`, a layer stays plain if its packed bits
    differ.
    """
    ops = torch.ops.mkldnn
    head = model.get_output_embeddings()
    if head.weight.device.type != "cpu" or not hasattr(ops, "_linear_pointwise"):
        return
    for module in model.modules():
        if type(module) is not nn.Linear:
            continue
        weight = module.weight.float() if module is head else module.weight
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
    return dtype == torch.float32


def _is_plain(linear: Callable[[Tensor], Tensor], weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `linear` gives the bits of the plain layer that the trainer has.

    The rows of the weight serve as input.
    """
    rows = repeat_rows(weight, MIN_ROWS)
    return torch.equal(linear(rows), F.linear(rows, weight, bias))


def repeat_rows(weight: Tensor, count: int) -> Tensor:
    """The first `count` rows of the weight, from the first one on again if it has fewer."""
    return weight[:count].repeat(ceil_div(count, len(weight)), 1)[:count]


def _packed_linear(weight: Tensor, bias: Tensor | None, inputs: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")


def head_logits(head: nn.Linear, hidden: Tensor) -> Tensor:
    """hidden [n, E] -> products and bias [n, V] in float32, before the model's cap and divisor."""
    bias = getattr(head, "bias", None)
    if "forward" not in head.__dict__:  # it is not packed
        return head_products(hidden, head.weight, bias, slice(None))
    with exact_factors(hidden.dtype):
        logits = head(hidden.float())
    return logits if bias is None else logits.add_(bias)
