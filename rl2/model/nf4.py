"""Frozen linear layers in 4 bits, by the kernels of bitsandbytes (QLoRA: Dettmers et al., 2023,
arXiv:2305.14314).

A block is 64 neighbours in a row of a weight [out, in]. A weight becomes the nearest of 16 values
(NF4) times the scale of its block, the largest magnitude in it. A row takes in / 2 bytes of codes,
and then in / 16 bytes of scales, in float32: 4.5 bits a weight. Blocks never cross rows, so a shard
of rows has the blocks of the whole. The rows are one parameter of bytes, which FSDP2 cuts and
gathers like any other, and does not cast.

Shapes: [out, in] of a weight, [out, 9 in / 16] of its bytes.
"""

import logging
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rl2.model.classes import idle_parts
from rl2.parallel.offload import as_sharded

BLOCK = 64  # weights with a scale in common

# Without the warnings of bitsandbytes that other packages are missing, which rl2 does not need. It
# may not be installed, and peft imports it too.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def quantize(weight: Tensor) -> Tensor:
    """[out, in] -> uint8 [out, 9 in / 16]; `in` is a multiple of 64."""
    from bitsandbytes.functional import quantize_4bit

    codes, state = quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
    num_rows = len(weight)
    return torch.cat(
        [codes.view(num_rows, -1), state.absmax.view(num_rows, -1).view(torch.uint8)], 1
    )


def dequantize(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [out, 9 in / 16] -> [out, in] in `dtype`."""
    num_rows, num_bytes = rows.shape
    shape = (num_rows, num_bytes * 16 // 9)
    if num_rows == 0:  # of a process without a part of the weight
        return rows.new_empty(shape, dtype=dtype)
    codes, scales = rows.split([shape[1] // 2, shape[1] // 16], 1)
    from bitsandbytes.functional import QuantState, dequantize_4bit

    state = QuantState(
        absmax=scales.contiguous().view(torch.float32).view(-1),
        shape=shape,
        dtype=dtype,
        blocksize=BLOCK,
        quant_type="nf4",
    )
    return dequantize_4bit(codes.contiguous().view(-1), state)


class _FrozenLinear(torch.autograd.Function):
    """x W^T + bias, which keeps the bytes of W for the backward pass and not W itself."""

    @staticmethod
    def forward(ctx, x, rows, bias):
        ctx.save_for_backward(rows)
        return F.linear(x, dequantize(rows, x.dtype), bias)

    @staticmethod
    def backward(ctx, gradient):
        [rows] = ctx.saved_tensors
        return gradient @ dequantize(rows, gradient.dtype), None, None


class Nf4Linear(nn.Module):
    """A frozen linear layer whose weight is in 4 bits, in the place of `layer`.

    The bias stays in its dtype, and the memory of the weight is not initialised.
    """

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.in_features = layer.in_features
        self.out_features = layer.out_features
        self.dtype = layer.weight.dtype  # of the computation
        rows = torch.empty(
            (self.out_features, self.in_features * 9 // 16),
            dtype=torch.uint8,
            device=layer.weight.device,
        )
        self.weight = nn.Parameter(rows, requires_grad=False)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return _FrozenLinear.apply(x, self.weight, self.bias)

    def dequantized(self, rows: DTensor) -> DTensor:
        """The weight, in the dtype of the computation and cut as its bytes `rows` are."""
        return as_sharded(dequantize(rows.to_local(), self.dtype), rows, self.in_features)


def replace_linears(hf: PreTrainedModel, names: Iterable[str]) -> None:
    """Puts an `Nf4Linear` in the place of each of these linear layers of `hf`.

    ValueError if a row of a weight ends inside a block, and for experts, which are no linear layers
    and would keep most of the weights in 16 bits.
    """
    in_towers = {weight for tower in idle_parts(hf) for weight in tower.parameters()}
    for name, parameter in hf.named_parameters():
        is_stack = parameter.ndim >= 3 and min(parameter.shape[-2:]) > 1
        if is_stack and parameter not in in_towers:
            raise ValueError(
                f"quantize_base=nf4: {name} is one tensor of all experts, which cannot be stored "
                "in 4 bits; leave the key out"
            )
    for name in names:
        layer = hf.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        if layer.in_features % BLOCK:
            raise ValueError(
                f"quantize_base=nf4: {name.removesuffix('.base_layer')} has rows of "
                f"{layer.in_features} weights, which blocks of {BLOCK} do not divide; leave the "
                "key out"
            )
        hf.set_submodule(name, Nf4Linear(layer))
