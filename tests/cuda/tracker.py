"""What happens on fake devices: bytes that are alive, copies between host and device, and where the
host waits.

Not covered: fragmentation, memory of CUDA contexts, of NCCL and of libraries, and memory that waits
for another stream.
"""

import contextlib
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch
from machine import MAIN_STREAM, Stream
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rl2

aten = torch.ops.aten
PACKAGE = str(Path(rl2.__file__).parent)
COPY_HELPERS = f"{PACKAGE}/parallel/device.py"  # a wait is told by the line that calls them
ALLOCATION_BYTES = 512  # CUDA's allocator gives multiples of it
# In host memory integers, and up to so many floats, are real, since the host computes with them.
# The others have no data.
REAL_FLOATS = 4096
# Operators whose result has a size that only the device knows.
SIZE_FROM_DEVICE = {
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.repeat_interleave.Tensor,
    aten.equal.default,
}
# With a mask these ask for the positions in it, unless they only fill in one number of the host.
INDEXING = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
COPIES = {aten._to_copy.default, aten.copy_.default, aten._foreach_copy_.default}
# These refuse tensors on several devices; their fake kernels do not.
SAME_DEVICE = ("_fused_", "_foreach_")


@dataclass(eq=False)  # two nested phases are different ones, even with equal numbers
class Phase:
    """What a part of the run did on this rank. `host_...` are bytes of tensors in host memory."""

    start_bytes: int  # alive when it began
    peak_bytes: int = 0
    host_peak_bytes: int = 0
    end_bytes: int = 0
    copies: Counter = field(default_factory=Counter)  # number by direction: "to device" | "to host"
    copied_bytes: Counter = field(default_factory=Counter)  # by direction
    side_stream_bytes: Counter = field(default_factory=Counter)  # of them, not on the main stream
    waits: Counter = field(
        default_factory=Counter
    )  # number by (what the host waits for, "file.py:line of rl2")
    collectives: Counter = field(default_factory=Counter)  # number by operator

    @property
    def num_waits(self) -> int:
        """How often the host waits for the device."""
        return sum(self.waits.values())

    def describe_waits(self) -> str:
        lines = [
            f"{count:5} {what} at {place}" for (what, place), count in self.waits.most_common()
        ]
        return "\n".join(lines)


class Memory:
    """Bytes of the storages of one kind of device."""

    def __init__(self):
        self.sizes: dict[int, int] = {}
        self.now = 0
        self.peak = 0

    def see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.sizes:
            weakref.finalize(storage, self._free, key)
            self.sizes[key] = 0
        self.resize(key, storage.nbytes())

    def resize(self, key: int, size: int) -> None:
        size = -(-size // ALLOCATION_BYTES) * ALLOCATION_BYTES
        self.now += size - self.sizes[key]
        self.sizes[key] = size
        self.peak = max(self.peak, self.now)

    def _free(self, key: int) -> None:
        self.now -= self.sizes.pop(key, 0)


class Tracker(TorchDispatchMode):
    """The mode above FakeTensorMode. What needs only real tensors of the host runs as it is, and
    everything else is counted.
    """

    def __init__(self):
        super().__init__()
        self.memory: dict[str, Memory] = defaultdict(Memory)
        self.phases: list[Phase] = []  # those that run now
        self.pinned: set[int] = set()  # storages
        self.is_paused = False

    @contextlib.contextmanager
    def phase(self) -> Iterator[Phase]:
        """Phases may be nested: what happens in the inner one counts in both."""
        device, host = self.memory["cuda"], self.memory["cpu"]
        outer_peaks = device.peak, host.peak
        device.peak, host.peak = device.now, host.now
        phase = Phase(device.now)
        self.phases.append(phase)
        try:
            yield phase
        finally:
            self.phases.remove(phase)
            phase.peak_bytes, phase.host_peak_bytes = device.peak, host.peak
            phase.end_bytes = device.now
            device.peak = max(device.peak, outer_peaks[0])
            host.peak = max(host.peak, outer_peaks[1])

    def wait(self, what: str) -> None:
        """Counts that the host waits for the device."""
        place = _place_in_package()
        for phase in self.phases:
            phase.waits[what, place] += 1

    def pin(self, tensor: Tensor) -> None:
        storage = _local(tensor).untyped_storage()
        if storage._cdata not in self.pinned:
            self.pinned.add(storage._cdata)
            weakref.finalize(storage, self.pinned.discard, storage._cdata)

    def is_pinned(self, tensor: Tensor) -> bool:
        return _local(tensor).untyped_storage()._cdata in self.pinned

    def __enter__(self):
        self.patches = contextlib.ExitStack()
        resize_ = torch.UntypedStorage.resize_
        fake_tolist = FakeTensor.tolist
        propagator = torch.distributed.tensor._sharding_prop.ShardingPropagator
        propagate = propagator._propagate_tensor_meta_non_cached

        def resize_and_see(storage, size):
            resize_(storage, size)
            for memory in self.memory.values():
                if storage._cdata in memory.sizes:
                    memory.resize(storage._cdata, size)
            return storage

        def pin_memory(tensor, device=None):
            if self.is_pinned(tensor):
                return tensor
            copy = tensor.clone()
            self.pin(copy)
            return copy

        def tolist(tensor):
            if tensor.device.type == "cuda":
                self._count_copy("to host", tensor.nbytes, may_return_early=False)
            with self.paused():
                return fake_tolist(tensor)

        def propagate_uncounted(*arguments, **keywords):  # it makes tensors of the whole shape
            with self.paused():
                return propagate(*arguments, **keywords)

        patches = [
            (torch.UntypedStorage, "resize_", resize_and_see),
            (torch.Tensor, "pin_memory", pin_memory),
            (torch.Tensor, "is_pinned", lambda tensor, device=None: self.is_pinned(tensor)),
            (FakeTensor, "tolist", tolist),
            (propagator, "_propagate_tensor_meta_non_cached", propagate_uncounted),
        ]
        for owner, name, value in patches:
            self.patches.enter_context(mock.patch.object(owner, name, value))
        return super().__enter__()

    def __exit__(self, *error):
        self.patches.close()
        return super().__exit__(*error)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is counted in this context."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return (
                NotImplemented  # DTensor runs first, and its operators on local tensors come here
            )
        kwargs = dict(kwargs or {})
        is_pinned = bool(kwargs.pop("pin_memory", False))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if _is_for_host(inputs, kwargs, args, func):
            with unset_fake_temporarily():
                out = func(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if is_pinned:
            self.pin(out)
        if not self.is_paused:
            for tensor in outputs:
                if isinstance(tensor, FakeTensor):
                    self.memory[tensor.device.type].see(tensor.untyped_storage())
            self._count(func, args, kwargs, inputs, outputs)
        return out

    def _count(self, func, args, kwargs, inputs, outputs) -> None:
        devices = {tensor.device.type for tensor in inputs + outputs}
        is_empty = all(tensor.nbytes == 0 for tensor in outputs or inputs)
        if func in COPIES and devices == {"cpu", "cuda"} and not is_empty:
            self._see_copy(func, args, kwargs, inputs, outputs)
        if "cuda" not in devices:
            return
        for phase in self.phases:
            if func.namespace in ("c10d", "_c10d_functional"):
                phase.collectives[func._opname] += 1
        name = func._opname
        if func is aten._local_scalar_dense.default:
            self.wait("item")
        elif func in SIZE_FROM_DEVICE:
            self.wait(name)
        elif func in INDEXING and any(_is_mask(tensor) for tensor in inputs):
            if not (name.startswith("index_put") and _is_number(args[2])):
                self.wait(f"{name} with a mask")
        if name.startswith(SAME_DEVICE) and func not in COPIES:
            places = {str(tensor.device) for tensor in inputs}
            if len(places) > 1:
                raise RuntimeError(f"{name} got tensors on {' and '.join(sorted(places))}")

    def _see_copy(self, func, args, kwargs, inputs, outputs) -> None:
        target, source = outputs[0], inputs[0]
        non_blocking = kwargs.get("non_blocking", False)
        if func is not aten._to_copy.default:
            target, source = inputs[0], inputs[-1]
            non_blocking = args[2] if len(args) > 2 else non_blocking
        direction = "to device" if target.device.type == "cuda" else "to host"
        if func is aten._to_copy.default and direction == "to host" and non_blocking:
            self.pin(target)  # as torch does
        on_host = target if direction == "to host" else source
        size = sum(t.nbytes for t in inputs if t.device == on_host.device) or on_host.nbytes
        self._count_copy(direction, size, non_blocking and self.is_pinned(on_host))

    def _count_copy(self, direction: str, size: int, may_return_early: bool) -> None:
        for phase in self.phases:
            phase.copies[direction] += 1
            phase.copied_bytes[direction] += size
            if Stream.current is not MAIN_STREAM:
                phase.side_stream_bytes[direction] += size
        if not may_return_early:
            self.wait(f"copy {direction}")


def _local(tensor: Tensor) -> Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def _is_mask(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.bool, torch.uint8) and tensor.ndim > 0


def _is_number(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.numel() == 1


def _is_for_host(inputs, kwargs, args, func) -> bool:
    """Whether an operator has only real tensors of the host and gives such tensors."""
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "cuda":
        return False
    if any(isinstance(tensor, FakeTensor) for tensor in inputs):
        return False
    is_meta = any(tensor.device.type == "meta" for tensor in inputs)
    if device is not None and torch.device(device).type == "meta" or is_meta and device is None:
        return True
    if inputs and not is_meta:
        return True
    # A new tensor in host memory.
    dtype = kwargs.get("dtype") or (inputs[0].dtype if inputs else None)
    if dtype is None and func._opname in ("arange", "randint", "randperm", "scalar_tensor"):
        return True
    if dtype is not None and not dtype.is_floating_point:
        return True
    shape = args[0] if args and isinstance(args[0], list | tuple) else ()
    size = inputs[0].numel() if is_meta else torch.Size(shape).numel()
    return size <= REAL_FLOATS


def _place_in_package() -> str:
    """The innermost line of rl2 that runs, "file.py:line"; "" if none does."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE) and file != COPY_HELPERS:
            return f"{file.removeprefix(PACKAGE + '/')}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
