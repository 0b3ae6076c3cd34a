"""The process group, the device mesh and the few collectives we use."""

import atexit
import os
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

warnings.filterwarnings(
    "ignore", "torch.distributed is disabled"
)  # checkpoints of one process ask for it


@dataclass
class Mesh:
    """How one worker is spread over the processes: world = dp x sp x tp, tp innermost. FSDP shards what tp leaves over dp
    and sp together, in one copy (`fsdp` is [shard]) or several ([replicate, shard])."""

    device: torch.device
    fsdp: DeviceMesh
    dp_rank: int  # which part of the data this process works on, of dp_size
    dp_size: int
    sp: dist.ProcessGroup | None  # the processes that share our sequences; None = we alone
    tp: DeviceMesh | None  # those that share our matrices
    reports_metrics: bool  # 1 on the one process, of those that share our part of the data, whose sums are counted; 0 on others


def init_distributed() -> torch.device:
    """Joins torchrun's process group, or makes one of a single process under plain `python`. Returns our device."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"  # objects and host tensors travel over gloo
    else:
        device, backend = torch.device("cpu"), "gloo"
    where = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    # Two hours: a rank may wait that long for one whose environment is slow, and dies at once if the other one dies.
    dist.init_process_group(backend, timeout=timedelta(hours=2), **where)
    # A thread of gloo that is still about to free the tensors of a collective takes Python's lock for it, which aborts a
    # process whose interpreter is ending (pytorch issue 190489): it gets the time before that.
    atexit.register(time.sleep, 0.1)
    return device


def make_mesh(device: torch.device, fsdp_size: int = 0, sp_size: int = 1, tp_size: int = 1) -> Mesh:
    """`fsdp_size` processes share one copy of the model's parts (0 = all there are), `sp_size` share each sequence and
    `tp_size` each matrix. ValueError unless sp x tp, and fsdp x tp, divide the world."""
    world, rank = dist.get_world_size(), dist.get_rank()
    fsdp_size = fsdp_size or world // tp_size
    for size in (sp_size, fsdp_size):
        if world % (size * tp_size):
            raise ValueError(f"{world} processes cannot be {size} x {tp_size} at a time")
    sizes = {"replicate": world // (fsdp_size * tp_size), "shard": fsdp_size, "tp": tp_size}
    sizes = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    fsdp = mesh[tuple(name for name in sizes if name != "tp")]
    sp, dp_size = None, world // (sp_size * tp_size)
    if sp_size > 1:
        names = ("dp", "sp", "tp")
        sp = init_device_mesh(
            device.type, (dp_size, sp_size, tp_size), mesh_dim_names=names
        ).get_group("sp")
    first = rank % (sp_size * tp_size) == 0
    return Mesh(
        device,
        fsdp,
        rank // (sp_size * tp_size),
        dp_size,
        sp,
        mesh["tp"] if tp_size > 1 else None,
        first,
    )


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, group):
        tensor = tensor.clone()
        dist.all_reduce(tensor, group=group)
        return tensor

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def differentiable_all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """The sum over the group of tensors that are 0 where another process computes them. Each process goes on with the
    whole and gets the same gradient, of which its own part is meant."""
    return tensor if group is None else _Sum.apply(tensor, group)


def all_reduce_sum_(tensor: torch.Tensor) -> torch.Tensor:
    """The sum over all processes, in place."""
    dist.all_reduce(tensor)
    return tensor


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set on any process."""
    return bool(all_reduce_sum_(torch.tensor(float(flag), device=device)).item())


def is_single_process() -> bool:
    """Whether there is one process, which should send itself nothing: gloo would copy it with a second team of OpenMP
    threads, and once a process has more threads than cores all of them sleep between any two operations (a rollout took
    twice as long)."""
    return dist.get_world_size() == 1


def gather_objects(value: Any) -> list:
    """The picklable value of every process in order of rank, on rank 0; an empty list elsewhere."""
    if is_single_process():
        return [value]
    values = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values)
    return values or []


def all_gather_objects(value: Any) -> list:
    """The picklable value of every process in order of rank, on all processes."""
    if is_single_process():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
