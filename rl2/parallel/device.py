"""Which kind of device the code chooses for: kernels, dtypes, chunk sizes, offloading.

It is the kind of the device itself. Only a memory plan asks otherwise: it runs the code on fake CPU
tensors with the choices of a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_planned_kinds: list[str] = []  # the innermost plan is the last one


def device_kind(device: torch.device) -> str:
    """The kind of device, "cpu" or "cuda", whose choices hold for what is on `device`."""
    return _planned_kinds[-1] if _planned_kinds else device.type


@contextmanager
def choices_of(kind: str) -> Iterator[None]:
    """A context in which all devices are taken for devices of this kind."""
    _planned_kinds.append(kind)
    try:
        yield
    finally:
        _planned_kinds.pop()
