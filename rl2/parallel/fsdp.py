"""FSDP2: how a model is cut over the processes, and how one full copy of its weights gets there."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from rl2.parallel.mesh import Mesh

PART = (
    2**31
)  # bytes of optimizer state that are on the device at a time, if it is kept in host memory


def shard(model: nn.Module, mesh: Mesh, dtype: torch.dtype | None, checkpointing: bool) -> None:
    """Shards the TokenModel `model`, layer by layer and then the rest. `dtype`: what is computed in, gradients are
    summed in fp32; None = in what the parameters are kept in."""
    kinds = model.hf._no_split_modules or ()
    layers = [module for module in model.hf.modules() if type(module).__name__ in kinds]
    policy = (
        MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        if dtype
        else MixedPrecisionPolicy()
    )
    # Under checkpointing even a single shard gives its copy in `dtype` back until backward: 2 bytes a parameter.
    frees = checkpointing or mesh.fsdp.size(-1) > 1
    for layer in layers:
        if (
            checkpointing
        ):  # around forward, so FSDP's hooks stay outside and parameter names stay the same
            layer.forward = partial(
                checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
            )
        fully_shard(layer, mesh=mesh.fsdp, mp_policy=policy, reshard_after_forward=frees)
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
        value = (
            torch.empty(parameter.shape, dtype=parameter.dtype) if full is None else full.pop(name)
        )
        value = value.to(mesh.device)
        if mesh.tp is not None:
            cut = parameter.placements[mesh.fsdp.ndim :] or [Replicate()]
            value = distribute_tensor(value, mesh.tp, cut).to_local()
        sharded = [*[Replicate()] * (mesh.fsdp.ndim - 1), Shard(0)]
        parameter.data.to_local().copy_(distribute_tensor(value, mesh.fsdp, sharded).to_local())


def step_in_parts(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """A step whose state lives in host memory and visits the device a few parameters at a time, which are all that have a
    gradient then. Exact: no parameter's step looks at another."""
    gradients = {p: p.grad for group in optimizer.param_groups for p in group["params"]}
    for parameter in gradients:
        parameter.grad = None
    for part in _parts(list(gradients)):
        states = [optimizer.state[parameter] for parameter in part]
        _move(states, device)
        for parameter in part:
            parameter.grad = gradients[parameter]
        optimizer.step()
        for parameter in part:
            parameter.grad = None
        _move(states, torch.device("cpu"))


def _parts(parameters):
    part, size = [], 0
    for parameter in parameters:
        part.append(parameter)
        size += 2 * parameter.to_local().nbytes
        if size >= PART:
            yield part
            part, size = [], 0
    if part:
        yield part


def _move(states, device):
    for state in states:
        state.update({key: value.to(device) for key, value in state.items() if key != "step"})
