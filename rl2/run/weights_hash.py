"""A hash of a worker's weights, or of all that a checkpoint holds, made where they are.

Each weight's bits are a whole number. It is multiplied by odd numbers of its position in the whole
parameter, one a dimension, and by one of the parameter's name. The hash is the sum, modulo 2^64:
however the processes cut the weights, they add the same terms. Since the numbers are odd, a single
changed bit always changes the sum.
"""

import hashlib
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rl2.parallel.mesh import Mesh, all_reduce_sum_
from rl2.parallel.offload import local_shard

# By the bytes of a weight.
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Weights that are worked on at a time: as int64 they fit into the cache of a core.
WORDS_AT_A_TIME = {"cpu": 2**16, "cuda": 2**22}


@torch.no_grad()
def hash_weights(workers: dict[str, Any]) -> dict[str, str]:
    """16 hexadecimal digits for each worker: of its trained weights, or of all if it is frozen.

    With LoRA the trained weights are the adapters, and a critic's head. The layout does not change
    the hash. All processes must call.
    """
    totals = []
    for worker in workers.values():
        parameters = worker.trained_parameters or dict(worker.model.named_parameters())
        total = torch.zeros((), dtype=torch.int64, device=worker.mesh.device)
        for name, parameter in parameters.items():
            if not _is_copy(parameter, worker.mesh):
                total += _number_of(name) * _sum_shard(worker.memory.read(parameter))
        totals.append(total)
    return _sum_over_processes(workers, totals)


@torch.no_grad()
def hash_states(objects: dict[str, Any], states: dict[str, Any]) -> dict[str, str]:
    """16 hexadecimal digits for each object in a checkpoint: of all that its state holds.

    Of a worker these are weights, moments of the optimizer and counters. The layout does not change
    the hash. What is not a sharded tensor must be the same on all processes, which all must call.
    """
    totals = []
    for name, item in objects.items():
        total = torch.zeros((), dtype=torch.int64)
        for key, value in flatten_state_dict(states[name])[0].items():
            if not isinstance(value, DTensor):
                content = value.tolist() if isinstance(value, Tensor) else value
                is_first = dist.get_rank() == 0
                total += is_first * _number_of(f"{key} {content}")
            elif not _is_copy(value, item.mesh):
                total += _number_of(key) * _sum_shard(value).cpu()
        totals.append(total)
    return _sum_over_processes(objects, totals)


def _sum_over_processes(names: Iterable[str], totals: list[Tensor]) -> dict[str, str]:
    sums = all_reduce_sum_(torch.stack(totals)).tolist() if totals else []
    return {name: f"{total % 2**64:016x}" for name, total in zip(names, sums, strict=True)}


def _is_copy(parameter: DTensor, mesh: Mesh) -> bool:
    """Whether an earlier process holds the same shard, and counts it."""
    axes = parameter.device_mesh
    for dim, placement in enumerate(parameter.placements):
        if placement.is_replicate() and axes.get_local_rank(dim) > 0:
            return True
    is_cut_by_tp = axes.ndim > mesh.fsdp.ndim
    return mesh.tp is not None and not is_cut_by_tp and mesh.tp.get_local_rank() > 0


def _number_of(name: str) -> int:
    """An odd number of 64 bits."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True) | 1


def _sum_shard(parameter: DTensor) -> Tensor:
    """The scalar sum of our shard's words, each times the numbers of its position."""
    words = local_shard(parameter)
    words = words.view(WORDS[words.itemsize])
    _, offsets = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    numbers = []
    for dim, offset in enumerate(offsets):
        of_dim = _numbers_of(dim, parameter.shape[dim], words.device)
        numbers.append(of_dim[offset : offset + words.shape[dim]])
    rows = words.reshape(-1, words.shape[-1])
    sums = _sum_rows(rows, numbers.pop()).reshape(words.shape[:-1])
    while numbers:
        sums = (sums * numbers.pop()).sum(-1)
    return sums


def _sum_rows(rows: Tensor, numbers: Tensor) -> Tensor:
    """[R, C] and [C] -> [R]: the sums over the columns of word times number."""
    num_rows = max(1, WORDS_AT_A_TIME.get(rows.device.type, 2**22) // max(1, rows.shape[1]))
    return torch.cat([(part.long() * numbers).sum(-1) for part in rows.split(num_rows)])


@cache
def _numbers_of(dim: int, size: int, device: torch.device) -> Tensor:
    """[size] odd numbers of the positions in a dimension, the same on every machine."""
    numbers = np.random.PCG64(dim).random_raw(size).view(np.int64) | 1
    return torch.from_numpy(numbers).to(device)
