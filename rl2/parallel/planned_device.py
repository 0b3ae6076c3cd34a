"""A device without memory, on which the code of a GPU runs on any machine, and the count of its
bytes.

The device is `cpu:0`. torch's fake tensors have shapes and types and no values, and they keep the
devices `cpu` (host memory, where tensors are real) and `cpu:0` apart. An operator that mixes the
two fails as it would on a GPU.

A function of torch is replaced meanwhile: storages are resized without an operator.
"""

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl2.parallel.device import PLANNED_DEVICE
from rl2.rounding import round_up

aten = torch.ops.aten
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
BLOCK_BYTES = 512  # torch's allocator rounds up to a multiple


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Gives an attribute of a class or module of torch this value, in a context."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of all tensors on `device` that operators inside the context return."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self.bytes = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}  # of live storages

    def reset_peak(self) -> None:
        """Begins to look for a new peak."""
        self.peak = self.bytes

    def __enter__(self) -> Self:
        resize = torch.UntypedStorage.resize_

        def resize_and_count(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            resized = resize(storage, size)
            if storage._cdata in self._sizes:
                self._set_size(storage._cdata, size)
            return resized

        # FSDP frees and takes the memory of gathered weights in this way.
        self._contexts = ExitStack()
        self._contexts.enter_context(replaced(torch.UntypedStorage, "resize_", resize_and_count))
        super().__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self._contexts.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            tensor = leaf.to_local() if isinstance(leaf, DTensor) else leaf
            if isinstance(tensor, Tensor) and tensor.device == self.device:
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            weakref.finalize(storage, self._forget, key)
        self._set_size(key, storage.nbytes())

    def _forget(self, key: int) -> None:
        self.bytes -= self._sizes.pop(key)

    def _set_size(self, key: int, size: int) -> None:
        size = round_up(size, BLOCK_BYTES)
        self.bytes += size - self._sizes.get(key, 0)
        self.peak = max(self.peak, self.bytes)
        self._sizes[key] = size


def positions(indices: list[Tensor | None]) -> list[Tensor | None]:
    """Returns the indices; a mask in host memory becomes positions.

    How many elements a mask on the planned device selects is not known.
    """
    without_masks: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype != torch.bool or isinstance(index, FakeTensor):
            without_masks.append(index)
        else:
            without_masks += index.nonzero().unbind(1)
    return without_masks


class PlannedDevice(MemoryTracker):
    """Makes PLANNED_DEVICE a device without memory in a context, and counts its bytes.

    Any number that is read from it is 1.
    """

    def __init__(self) -> None:
        super().__init__(PLANNED_DEVICE)
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 1.0 if args[0].is_floating_point() else 1
        if func in INDEXING:
            indexed, indices, *values = args
            args = (indexed, positions(indices), *values)
        if kwargs.get("device") != self.device:
            return super().__torch_dispatch__(func, types, args, kwargs)
        with self.fake:  # a tensor is made here, or copied here from host memory
            result = super().__torch_dispatch__(func, types, args, kwargs)
        # torch computes a single number for real, on `cpu`.
        return result if result.device == self.device else self.empty_like(result)

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Returns a tensor on this device with the shape and dtype of `tensor`."""
        with self.fake:
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
