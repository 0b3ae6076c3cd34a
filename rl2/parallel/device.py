"""The kind of device, by which kernels, dtypes and chunk sizes are chosen, and copies to a device.

It is the kind of the device itself, except for the device of a memory plan: that one has no memory
and gets the choices of a GPU.
"""

import os
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rl2.parallel.processor import is_intel

GIB = 2**30

# The device of a memory plan. Real tensors are never on it: torch puts those on plain `cpu`.
PLANNED_DEVICE = torch.device("cpu", 0)


def device_kind(device: torch.device) -> str:
    """The kind of device, "cpu" or "cuda", that the code chooses for where data is on `device`."""
    return "cuda" if device == PLANNED_DEVICE else device.type


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`. The host does not wait for a GPU to copy it.

    Only a copy from pinned memory does not wait. torch uses that memory again when the GPU has read
    it.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def columns_to_device(data: Any, device: torch.device) -> Any:
    """A dataclass, such as a Batch or a Pack, with its tensors on `device`."""
    tensors = {}
    for name, value in vars(data).items():
        if isinstance(value, Tensor):
            tensors[name] = copy_to_device(value, device)
    return replace(data, **tensors)


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype called `name`; `auto` is bf16 where the machine is fast at it, fp32 elsewhere."""
    if name == "float32" and device_kind(device) == "cuda":
        raise ValueError(
            "dtype=float32: attention on GPUs computes in bfloat16 only; leave dtype=auto"
        )
    if name != "auto":
        return getattr(torch, name)
    is_fast = device_kind(device) == "cuda" or _is_cpu_fast_at_bf16()
    return torch.bfloat16 if is_fast else torch.float32


def _is_cpu_fast_at_bf16() -> bool:
    """Whether this processor multiplies matrices faster in bf16 than in fp32.

    AVX512-BF16 is twice as fast as fp32 on AMD's processors and half as fast on Intel's, which have
    AMX for it (docs/proofs.md). Some virtual machines hide AMX.
    """
    return _has_amx() or (torch.cpu._is_avx512_bf16_supported() and not is_intel())


def rounds_by_shape(name: str) -> bool:
    """Whether the product of a row in the dtype called `name` depends on how many rows there are.

    On a CPU with AMX oneDNN adds up a row in another order if there are more or fewer. `auto` is
    bf16 there.
    """
    return name != "float32" and _has_amx()


def _has_amx() -> bool:
    """Whether oneDNN uses AMX, Intel's unit for bf16. ONEDNN_MAX_CPU_ISA may keep it from it."""
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    is_allowed = limit in ("", "ALL", "DEFAULT") or "AMX" in limit
    return is_allowed and torch.cpu._is_amx_tile_supported()
