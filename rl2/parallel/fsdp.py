"""FSDP2: how a model is cut over the processes, and how one full copy of its weights gets there."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from rl2.parallel.mesh import Mesh, is_single_process
from rl2.parallel.recompute import Context, recompute
from rl2.parallel.whole import as_one_shard
from rl2.progress import mark, track


def find_layers(hf: nn.Module, idle: Sequence[nn.Module] = ()) -> list[Any]:
    """The layers of a Hugging Face model, but for those within the modules `idle`."""
    classes: Any = getattr(hf, "_no_split_modules", None) or ()
    never_run = {part for module in idle for part in module.modules()}
    layers = []
    for module in hf.modules():
        if type(module).__name__ in classes and module not in never_run:
            layers.append(module)
    return layers


def shard(
    model: Any,
    mesh: Mesh,
    compute_dtype: torch.dtype | None,
    gradient_checkpointing: bool | int,
    contexts: Callable[[], tuple[Context, Context]],
    idle: Sequence[nn.Module],
    keep_gathered: bool,
) -> None:
    """Shards the TokenModel `model`: each of its layers, then the rest.

    With `compute_dtype`, weights are cast to it for compute and gradients are summed in fp32.
    Without, both happen in the dtype of the parameters.

    `gradient_checkpointing` recomputes layers in the backward pass: all of them, none, or this many
    of the first; the backward pass reaches these last, when it has freed what the others kept.
    `contexts` are those of these layers. `idle` modules never run: they are sharded by themselves,
    and never gathered. With `keep_gathered` the whole weights of a trained model stay from pass to
    pass, see `ShardedWeights`; a process that is alone then needs no FSDP, see `WholeWeights`.
    """
    layers = find_layers(model.hf, idle)
    num_recomputed = len(layers) if gradient_checkpointing else 0
    if type(gradient_checkpointing) is int:
        num_recomputed = gradient_checkpointing
    for layer in layers[:num_recomputed]:
        # Only `forward` is wrapped: FSDP's hooks stay outside and the names of parameters stay the
        # same.
        layer.forward = partial(recompute, layer.forward, contexts)
    if is_single_process() and (keep_gathered or compute_dtype is None):
        as_one_shard(model, mesh.fsdp)
        return
    # Inputs keep their dtype, as in transformers: some models have rotary angles in fp32.
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if compute_dtype is not None:
        policy = replace(policy, param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for module in idle:
        fully_shard(module, mesh=mesh.fsdp)
    for i, layer in enumerate(layers):
        mark()
        # Even a single shard frees the copy in `compute_dtype` of a layer that runs again. It takes
        # 2 bytes a parameter.
        is_freed = i < num_recomputed or mesh.fsdp.size(-1) > 1
        fully_shard(
            layer,
            mesh=mesh.fsdp,
            mp_policy=policy,
            reshard_after_forward=is_freed and not keep_gathered,
        )
    fully_shard(model, mesh=mesh.fsdp, mp_policy=policy)
    register_fsdp_forward_method(model, "head_inputs")
    # The next layer is gathered before this one computes, so that a host which is barely ahead of
    # the device, as with small models, does not keep the network waiting. In the backward pass FSDP
    # does so by itself.
    for module, following in pairwise([model] + layers):
        module.set_modules_to_forward_prefetch([following])


class ShardedWeights:
    """The weights of a model that FSDP2 shards.

    With `keep_gathered` each process holds the whole weights, and the sum of its own gradients in
    fp32, from the first to the last micro-batch. They travel once an update, which takes 6 bytes a
    weight of the whole model with bf16.
    """

    def __init__(self, model: Any, keep_gathered: bool):
        self.model = model
        self.keep_gathered = keep_gathered
        self.is_last = True  # by FSDP's own setting

    @contextmanager
    def computing(self) -> Iterator[None]:
        """A context for forward and backward passes, after which FSDP has its shards only."""
        yield
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def before_backward(self, is_last: bool) -> None:
        """Says whether this is the last micro-batch of an update."""
        if is_last == self.is_last:  # the setters visit all modules
            return
        self.is_last = is_last
        if self.keep_gathered:
            self.model.set_reshard_after_backward(is_last)
            self.model.set_requires_gradient_sync(is_last)
            self.model.set_is_last_backward(is_last)
        else:  # copies of the model sum their gradients once
            self.model.set_requires_all_reduce(is_last)


def persistent_buffers(hf: nn.Module) -> list[tuple[str, Tensor]]:
    """The buffers that belong to the weights, by name: they are in the files of a model."""
    names = hf.state_dict(keep_vars=True).keys()  # without views of the parameters
    return [(name, buffer) for name, buffer in hf.named_buffers() if name in names]


def scatter(
    model: Any,
    full: dict[str, Tensor] | None,
    mesh: Mesh,
    changes: Iterable[Callable[[str, Tensor], Tensor]],
) -> None:
    """Gives memory and values to `model`, which has its parameters on the meta device.

    `full` holds the whole weights by name on rank 0 and is None elsewhere. It is emptied on the
    way, so that no weight is there twice for longer than needed. Each of the `changes` is given the
    name and the whole weight, and returns what is cut in its place. All processes must call.
    """
    buffers = dict(model.named_buffers())
    model.to_empty(device=mesh.device)
    model.hf.tie_weights()
    for name, buffer in buffers.items():
        model.get_buffer(name).copy_(buffer)
    for name, buffer in persistent_buffers(model.hf):
        if full is not None:
            buffer.copy_(full.pop(name))
        dist.broadcast(buffer, src=0)
    fsdp_placements: list[Placement] = [Replicate()] * (mesh.fsdp.ndim - 1)
    fsdp_placements.append(Shard(0))
    for name, parameter in track(list(model.hf.named_parameters()), "weights"):
        if full is None:  # rank 0 sends its values
            value = torch.empty(parameter.shape, dtype=parameter.dtype, device=mesh.device)
        else:
            value = full.pop(name).to(mesh.device)
            if parameter.dtype.is_floating_point:  # a change makes bytes
                value = value.to(parameter.dtype)
            for change in changes:
                value = change(name, value)
        if mesh.tp is not None:
            tp_placements = parameter.placements[mesh.fsdp.ndim :] or [Replicate()]
            value = distribute_tensor(value, mesh.tp, tp_placements).to_local()
        value = distribute_tensor(value, mesh.fsdp, fsdp_placements).to_local()
        parameter.data.to_local().copy_(value)
