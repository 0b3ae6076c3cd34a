"""FSDP2: how a model is cut over the processes, and how one full copy of its weights gets there."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from .mesh import Mesh


def shard(model: nn.Module, mesh: Mesh, dtype: torch.dtype | None, checkpointing: bool) -> None:
    """Shards the TokenModel `model`, layer by layer and then the rest. `dtype`: what is computed in, gradients are
    summed in fp32; None = in what the parameters are kept in."""
    kinds = model.hf._no_split_modules or ()
    layers = [module for module in model.hf.modules() if type(module).__name__ in kinds]
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32) if dtype else MixedPrecisionPolicy()
    for layer in layers:
        if checkpointing:  # around forward, so FSDP's hooks stay outside and parameter names stay the same
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        # One shard has nothing to free between forward and backward.
        fully_shard(layer, mesh=mesh.fsdp, mp_policy=policy, reshard_after_forward=mesh.fsdp.size(-1) > 1)
    fully_shard(model, mesh=mesh.fsdp, mp_policy=policy)


def scatter(model: nn.Module, full: dict[str, Tensor] | None, mesh: Mesh) -> None:
    """Gives every parameter, which is on the meta device, its memory and its values: `full` holds them by name on the
    first process, which loses them on the way, and is None elsewhere."""
    buffers = dict(model.named_buffers())
    model.to_empty(device=mesh.device)
    model.hf.tie_weights()
    for name, buffer in buffers.items():
        model.get_buffer(name).copy_(buffer)
    for name, parameter in model.hf.named_parameters():
        value = torch.empty(parameter.shape, dtype=parameter.dtype) if full is None else full.pop(name)
        value = value.to(mesh.device)
        if mesh.tp is not None:
            cut = parameter.placements[mesh.fsdp.ndim :] or [Replicate()]
            value = distribute_tensor(value, mesh.tp, cut).to_local()
        sharded = [*[Replicate()] * (mesh.fsdp.ndim - 1), Shard(0)]
        parameter.data.to_local().copy_(distribute_tensor(value, mesh.fsdp, sharded).to_local())
