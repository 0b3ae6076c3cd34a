"""The optimizer of a worker: AdamW, its learning rate, the gradient's norm, and the step whose
state is in host memory.
"""

import math
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from rl2.parallel.mesh import all_reduce_sum_, is_single_process

# A parameter of a model that FSDP2 shards: an nn.Parameter that is a DTensor, as its gradient is.
ShardedParameter = Any
# Optimizer state that is on the device at a time while all of it lives in host memory, in bytes.
DEVICE_STATE_BYTES = 2**31
# Entries are named after parameters, so that another layout may group the parameters differently.
BY_PARAMETER_NAME = StateDictOptions(flatten_optimizer_state_dict=True)

# (model, optimizer, state) restores what `optimizer_state` returned.
load_optimizer_state = partial(set_optimizer_state_dict, options=BY_PARAMETER_NAME)


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's sharded state, for a checkpoint. The next update is the same without it."""
    read_state = partial(get_optimizer_state_dict, model, optimizer, options=BY_PARAMETER_NAME)
    if not optimizer.state:
        # Before the first update torch fills the state by a step whose gradients are 0. This step
        # must not count: Adam's first steps are scaled by their number.
        read_state()
        for moments in optimizer.state.values():
            moments["step"].zero_()
    return read_state()


def make_adamw(
    parameters: Iterable[ShardedParameter], lr: float, weight_decay: float
) -> torch.optim.Optimizer:
    """AdamW over sharded parameters, grouped by the number of axes of their mesh."""
    groups: dict[int, list[ShardedParameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh.ndim, []).append(parameter)
    # Fused even on the CPU: one pass over the memory instead of ten. It takes parameters of one
    # mesh at a time.
    return torch.optim.AdamW(
        [{"params": groups[ndim]} for ndim in sorted(groups)],
        lr=lr,
        weight_decay=weight_decay,
        fused=True,
    )


def schedule(done: int, total: int, warmup_ratio: float, kind: str) -> float:
    """The factor of the learning rate after `done` of `total` updates.

    It rises linearly to 1 in the first `warmup_ratio` of the updates. Then it is constant, or falls
    to 0 linearly or as a cosine (`kind`: constant | linear | cosine). After `total` it stays.
    """
    warmup = math.ceil(warmup_ratio * total)
    if done < warmup:
        return (done + 1) / warmup
    progress = min(1.0, (done - warmup) / max(1, total - warmup))
    factors = {
        "constant": 1.0,
        "linear": 1 - progress,
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
    }
    return factors[kind]


def gradient_norm(parameters: Iterable[ShardedParameter], device: torch.device) -> float:
    """The norm of the gradient over all parameters and all processes. All processes must call.

    A shard that several processes hold counts once: each of them adds its square times shards /
    processes.
    """
    square = torch.zeros((), dtype=torch.float64, device=device)
    for parameter in parameters:
        local = parameter.grad.to_local()
        square += local.norm().double().square() * _num_shards(parameter) / dist.get_world_size()
    return all_reduce_sum_(square).sqrt().item()


def _num_shards(parameter: ShardedParameter) -> int:
    """How many different parts the parameter is cut into."""
    mesh = parameter.device_mesh
    sharded_axes = [i for i, place in enumerate(parameter.placements) if not place.is_replicate()]
    return math.prod(mesh.size(axis) for axis in sharded_axes)


def clip_gradient_(parameters: Iterable[ShardedParameter], norm: float, max_norm: float) -> None:
    """Scales the gradient, whose norm is `norm`, down to `max_norm`, in place."""
    gradients = [parameter.grad.to_local() for parameter in parameters]
    torch._foreach_mul_(gradients, min(1.0, max_norm / (norm + 1e-6)))


def step_from_host_memory(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """A step of an optimizer whose state lives in host memory.

    The state visits the device a few parameters at a time, and only these have a gradient then. The
    result is exact, since the step of one parameter reads no other.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = {parameter: parameter.grad for parameter in parameters}
    for parameter in parameters:
        parameter.grad = None
    for part in _parts(parameters):
        states = [optimizer.state[parameter] for parameter in part]
        _move_states(states, device)
        for parameter in part:
            parameter.grad = gradients[parameter]
        optimizer.step()
        for parameter in part:
            parameter.grad = None
        _move_states(states, torch.device("cpu"))


def _parts(parameters) -> Iterator[list[ShardedParameter]]:
    """The parameters in parts, each closed when its state reaches DEVICE_STATE_BYTES."""
    part = []
    state_bytes = 0
    for parameter in parameters:
        part.append(parameter)
        state_bytes += 2 * parameter.to_local().nbytes  # AdamW has two moments
        if state_bytes >= DEVICE_STATE_BYTES:
            yield part
            part = []
            state_bytes = 0
    if part:
        yield part


def _move_states(states, device):
    for state in states:
        for key, value in state.items():
            if key != "step":  # a counter, which stays in host memory
                state[key] = value.to(device)


def export_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Writes the optimizer's state to `folder`/optimizer. All processes must call."""
    state = {"optimizer": optimizer_state(model, optimizer)}
    dcp.save(state, checkpoint_id=f"{folder}/optimizer", no_dist=is_single_process())


def import_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Reads what `export_optimizer` wrote to `folder`; `folder` may also be that sub-folder itself.
    All processes must call.
    """
    if Path(folder, "optimizer").is_dir():
        folder = f"{folder}/optimizer"
    state = {"optimizer": optimizer_state(model, optimizer)}
    dcp.load(state, checkpoint_id=folder, no_dist=is_single_process())
    load_optimizer_state(model, optimizer, state["optimizer"])
