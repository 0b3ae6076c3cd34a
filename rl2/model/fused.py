"""Elementwise parts of a model, each compiled into one kernel forward and one backward.

They are what transformers writes as several operations, each of which reads and writes its tensors
in the GPU's memory: norms, rotary positions, and the product behind the gate of an MLP. Matrix
products and attention stay as they are, so tensor parallelism, adapters, FSDP and checkpointing do
not notice. A class of another shape than those below stays as it is.
"""

from collections.abc import Callable
from functools import cache, wraps
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP

ROTARY = "apply_rotary_pos_emb"  # what the attention modules of transformers call
# A function is compiled once with a gradient and once without, for each number of axes, for each
# size of the last axis, for weights that are trained or frozen. torch gives up after 8.
MOST_VARIANTS = 64


@cache
def compiled(function: Callable[..., Any], num_static_axes: int = 1) -> Callable[..., Any]:
    """`function` compiled for tensors of any size.

    The sizes of the last `num_static_axes` axes are compiled in. A size of 1 is too. What the
    embedding gives under tensor parallelism, an AsyncCollectiveTensor, is not compiled for:
    torch.compile loses its gradient.
    """
    torch._dynamo.config.recompile_limit = MOST_VARIANTS
    compiled_function = torch.compile(function)

    @wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        if any(isinstance(tensor, AsyncCollectiveTensor) for tensor in tensors):
            return function(*arguments, **keywords)
        for tensor in tensors:
            for axis in range(tensor.ndim - num_static_axes):
                torch._dynamo.maybe_mark_dynamic(tensor, axis)
        return compiled_function(*arguments, **keywords)

    return call


def fuse(hf: nn.Module) -> None:
    """Compiles the elementwise parts of the Hugging Face model `hf`, when they run first."""
    for module in hf.modules():
        module_class = type(module)
        forward: Any = module_class.forward
        if not module_class.__module__.startswith("transformers."):
            continue
        if module_class.__name__.endswith("Norm"):
            module.forward = MethodType(compiled(forward), module)
        elif _does_the_same(forward, LlamaMLP.forward):
            module.forward = MethodType(_gated_mlp, module)
        elif _does_the_same(forward, Phi3MLP.forward):
            module.forward = MethodType(_gated_mlp_of_one_matrix, module)
        elif ROTARY in forward.__code__.co_names and ROTARY in forward.__globals__:
            module.forward = MethodType(_with_compiled_rotary(forward), module)


def _does_the_same(function: Any, other: Any) -> bool:
    """Whether two functions have the same code: transformers copies it from model to model."""
    code, other_code = function.__code__, other.__code__
    return (code.co_code, code.co_names) == (other_code.co_code, other_code.co_names)


def _gated_mlp(mlp: Any, x: Tensor) -> Tensor:
    """LlamaMLP.forward."""
    return mlp.down_proj(compiled(_gate)(mlp.act_fn, mlp.gate_proj(x), mlp.up_proj(x)))


def _gated_mlp_of_one_matrix(mlp: Any, x: Tensor) -> Tensor:
    """Phi3MLP.forward."""
    gate, up = mlp.gate_up_proj(x).chunk(2, dim=-1)
    return mlp.down_proj(compiled(_gate)(mlp.activation_fn, gate, up))


def _gate(activation: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
    return activation(gate) * up


@cache
def _with_compiled_rotary(forward: Any) -> FunctionType:
    """The forward of an attention module with its rotary function compiled, for this model only:
    other models of the process share the module's globals.
    """
    function = FunctionType(
        forward.__code__,
        {**forward.__globals__, ROTARY: compiled(forward.__globals__[ROTARY])},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    function.__kwdefaults__ = forward.__kwdefaults__
    return function
