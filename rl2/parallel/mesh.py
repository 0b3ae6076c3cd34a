"""The process group, the device mesh and the few collectives we use."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass
class Mesh:
    """How one worker's model is spread over the processes: world = replicate x shard; data is split over all of them."""

    device: torch.device
    rank: int
    size: int
    fsdp: DeviceMesh  # [shard], or [replicate, shard] for hybrid sharding


def init() -> torch.device:
    """Joins torchrun's process group, or makes one of a single process under plain `python`. Returns our device."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"  # objects and host tensors travel over gloo
    else:
        device, backend = torch.device("cpu"), "gloo"
    store = None if "RANK" in os.environ else dist.HashStore()
    where = {} if store is None else {"store": store, "rank": 0, "world_size": 1}
    # Two hours: a rank may wait that long for one whose environment is slow, and dies at once if the other one dies.
    dist.init_process_group(backend, timeout=timedelta(hours=2), **where)
    return device


def make_mesh(device: torch.device, fsdp_size: int = 0) -> Mesh:
    """`fsdp_size` processes share one copy of the model; 0 = all of them."""
    world = dist.get_world_size()
    if fsdp_size in (0, world):
        fsdp = init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    else:
        fsdp = init_device_mesh(device.type, (world // fsdp_size, fsdp_size), mesh_dim_names=("replicate", "shard"))
    return Mesh(device, dist.get_rank(), world, fsdp)


def sum_(tensor: torch.Tensor) -> torch.Tensor:
    """The sum over all processes, in place."""
    dist.all_reduce(tensor)
    return tensor


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set on any process."""
    return bool(sum_(torch.tensor(float(flag), device=device)).item())


def gather_objects(value) -> list:
    """The picklable value of every process, on every process, in order of rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
