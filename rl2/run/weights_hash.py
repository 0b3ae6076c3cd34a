"""A hash of a worker's weights, or of all that a checkpoint holds, made where they are.

Each weight's bits are a whole number. It is multiplied by odd numbers of its position in the whole
parameter, one a dimension, and by one of the parameter's name. The hash is the sum, modulo 2^64:
however the processes cut the weights, they add the same terms. Since the numbers are odd, a single
changed bit always changes the sum.
"""

import hashlib
import math
from collections.abc import Callable, Iterable
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
        totals.append(_sum_shards(parameters, worker.mesh, worker.memory.read_shard))
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
        shards = {}
        for key, value in flatten_state_dict(states[name])[0].items():
            if isinstance(value, DTensor):
                shards[key] = value
            elif dist.get_rank() == 0:
                content = value.tolist() if isinstance(value, Tensor) else value
                total += _number_of(f"{key} {content}")
        if shards:
            total += _sum_shards(shards, item.mesh, local_shard).cpu()
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


def _sum_shards(
    parameters: dict[str, DTensor], mesh: Mesh, read: Callable[[Tensor], Tensor]
) -> Tensor:
    """The scalar sum of our shards' words, each times the numbers of its position and its name.

    `read` gives our shard of a parameter. Parameters of one shape and layout are summed together: a
    small model has hundreds of them, and on a GPU each operator costs more than its work.
    """
    groups: dict[Any, list[str]] = {}
    for name, parameter in parameters.items():
        layout = (parameter.shape, parameter.placements, parameter.device_mesh)
        groups.setdefault((layout, parameter.dtype, parameter.device), []).append(name)
    total = torch.zeros((), dtype=torch.int64, device=mesh.device)
    for (_, dtype, device), names in groups.items():
        first = parameters[names[0]]
        if _is_copy(first, mesh):
            continue
        shape, offsets = compute_local_shape_and_global_offset(
            first.shape, first.device_mesh, first.placements
        )
        numbers = []
        for dim, offset in enumerate(offsets):
            of_dim = _numbers_of(dim, first.shape[dim], device)
            numbers.append(of_dim[offset : offset + shape[dim]])
        most = WORDS_AT_A_TIME.get(device.type, 2**22)
        num_names = max(1, most // max(1, math.prod(shape)))
        for start in range(0, len(names), num_names):
            part = tuple(names[start : start + num_names])
            shards = [read(parameters[name]) for name in part]
            words = torch.stack(shards) if len(shards) > 1 else shards[0][None]
            sums = _sum_words(words.view(WORDS[dtype.itemsize]), numbers, most)
            total += (sums * _numbers_of_names(part, device)).sum()
    return total


def _sum_words(words: Tensor, numbers: list[Tensor], most: int) -> Tensor:
    """[P, ...] -> [P]: the sums of the words, each times the numbers of its position.

    `most` words are worked on at a time, but at least a row.
    """
    num_rows = max(1, most // max(1, words.shape[-1]))
    rows = words.flatten(0, -2).split(num_rows)
    sums = torch.cat([(part * numbers[-1]).sum(-1) for part in rows]).view(words.shape[:-1])
    for of_dim in reversed(numbers[:-1]):
        sums = (sums * of_dim).sum(-1)
    return sums


def _number_of(name: str) -> int:
    """An odd number of 64 bits."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True) | 1


@cache
def _numbers_of_names(names: tuple[str, ...], device: torch.device) -> Tensor:
    return torch.tensor([_number_of(name) for name in names], device=device)


@cache
def _numbers_of(dim: int, size: int, device: torch.device) -> Tensor:
    """[size] odd numbers of the positions in a dimension, the same on every machine."""
    numbers = np.random.PCG64(dim).random_raw(size).view(np.int64) | 1
    return torch.from_numpy(numbers).to(device)
