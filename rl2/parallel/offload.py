"""Weights and optimizer state that live in host memory and visit the device.

Host memory is page-locked once, so that copies run beside the computation and at the bus's full
speed.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from rl2.rounding import round_up

# Most bytes of host tensors that have copies on the device at a time: half of them are computed on
# while the other half is copied.
VISITING_BYTES = 2**31
ALIGNMENT = 64  # bytes; the tensors of a block begin at multiples of it


def empty_on_host(likes: Sequence[Tensor]) -> list[Tensor]:
    """Uninitialised tensors in host memory with the shapes and dtypes of `likes`, in one block.

    The block is page-locked if `likes` are on a GPU, and fake if they are.
    """
    sizes = [round_up(like.nbytes, ALIGNMENT) for like in likes]
    block = likes[0].new_empty(sum(sizes) // 4, dtype=torch.float32, device="cpu")
    if likes[0].device.type == "cuda":
        _pin(block)
    tensors = []
    for like, part in zip(likes, block.split([size // 4 for size in sizes]), strict=True):
        tensors.append(part.view(like.dtype)[: like.numel()].view(like.shape))
    return tensors


def _pin(block: Tensor) -> None:
    """Page-locks the memory of `block` until it is freed.

    Not by `pin_memory`: its allocator rounds the bytes up to a power of two.
    """
    runtime = torch.cuda.cudart()
    address = block.data_ptr()
    torch.cuda.check_error(runtime.cudaHostRegister(address, block.nbytes, 0))
    unpin = weakref.finalize(block.untyped_storage(), runtime.cudaHostUnregister, address)
    unpin.atexit = False  # CUDA may have ended before


def _sharded(parameter: Tensor | None) -> DTensor:
    """The parameter or gradient: every one of a model is sharded."""
    assert isinstance(parameter, DTensor)
    return parameter


def local_shard(parameter: Tensor | None) -> Tensor:
    """This process's part of a sharded parameter or gradient.

    It is the tensor itself, not a view as to_local gives: a view would give an empty storage its
    size back in a memory plan.
    """
    return _sharded(parameter)._local_tensor


def as_sharded(shard: Tensor, parameter: Tensor, width: int | None = None) -> DTensor:
    """The DTensor with `shard` as its part on this process, cut as `parameter` is.

    Its last dimension is `width`, by default that of `parameter`. `shard` may be in host memory:
    DTensor.from_local would move it to the device.
    """
    spec = _sharded(parameter)._spec
    if width is not None:
        like = shard.new_empty((*parameter.shape[:-1], width), device="meta")
        meta = TensorMeta(like.shape, like.stride(), like.dtype)
        spec = DTensorSpec(spec.mesh, spec.placements, meta)
    return DTensor(shard, spec, requires_grad=False)


class WeightMemory:
    """Keeps the weights of a sharded model on the device, or in host memory between passes.

    A weight in host memory has its place there for good. Between passes its parameter stays a
    tensor of the device, but its storage is empty.
    """

    def __init__(self, model: nn.Module, in_host_memory: bool):
        self.host_shards: dict[Tensor, Tensor] = {}  # by parameter; empty if all stay on the device
        self.storage_bytes: list[int] = []
        if in_host_memory:
            parameters = list(model.parameters())
            shards = [local_shard(parameter) for parameter in parameters]
            self.host_shards = dict(zip(parameters, empty_on_host(shards), strict=True))
            # FSDP pads a shard, so its storage may be larger.
            self.storage_bytes = [shard.untyped_storage().nbytes() for shard in shards]
            self._leave_device(changed=parameters)

    @contextmanager
    def on_device(self, changes: bool = False) -> Iterator[None]:
        """A context with all weights on the device.

        Only the trained weights of a context that `changes` them are copied back.
        """
        for parameter, num_bytes in zip(self.host_shards, self.storage_bytes, strict=True):
            local_shard(parameter).untyped_storage().resize_(num_bytes)
            local_shard(parameter).copy_(self.host_shards[parameter], non_blocking=True)
        yield
        self._leave_device([p for p in self.host_shards if changes and p.requires_grad])

    def _leave_device(self, changed: Sequence[Tensor]) -> None:
        for parameter in changed:
            self.host_shards[parameter].copy_(local_shard(parameter), non_blocking=True)
        for parameter in self.host_shards:
            local_shard(parameter).untyped_storage().resize_(0)

    def read(self, parameter: Tensor) -> DTensor:
        """The parameter, detached and on the device, see `read_shard`."""
        return as_sharded(self.read_shard(parameter), parameter)

    def read_shard(self, parameter: Tensor) -> Tensor:
        """This process's part of the parameter, on the device.

        If it is in host memory, this is a copy: the caller drops it to free its memory.
        """
        shard = local_shard(parameter)
        if parameter not in self.host_shards:
            return shard
        return torch.empty_like(shard).copy_(self.host_shards[parameter], non_blocking=True)

    def state(self, parameter: Tensor) -> DTensor:
        """The parameter, detached, where its values are between passes: what a checkpoint holds."""
        if parameter not in self.host_shards:
            return _sharded(parameter.detach())
        wait_for_copies(parameter.device)
        return as_sharded(self.host_shards[parameter], parameter)


def zeros_like_all(likes: Sequence[Tensor], in_host_memory: bool) -> list[Tensor]:
    """Zeros in the shapes of `likes`, in host memory or where `likes` are."""
    if in_host_memory and likes:
        return [tensor.zero_() for tensor in empty_on_host(likes)]
    return [torch.zeros_like(like, memory_format=torch.contiguous_format) for like in likes]


def wait_for_copies(device: torch.device) -> None:
    """Returns when the host may read what `device` copies to its memory."""
    torch.get_device_module(device).synchronize()


def visit_device(
    function: Callable[..., None],
    on_device: Sequence[list[Tensor]],
    on_host: Sequence[list[Tensor]],
) -> None:
    """Calls `function(*on_device, *on_host)` piece by piece, with all pieces on the device.

    Each argument is a list of contiguous tensors; tensors at the same place of the lists have the
    same number of elements. `function` gets one piece of each argument, as a list of one tensor.
    What it writes to pieces of `on_host` is copied back. Meanwhile the next piece is copied to the
    device.
    """
    limit = VISITING_BYTES // (2 * len(on_host) * on_host[0][0].itemsize)
    device = on_device[0][0].device
    module = torch.get_device_module(device)
    compute_stream, copy_stream = module.current_stream(), module.Stream()

    def fetch(pieces: tuple[Tensor, ...]) -> list[Tensor]:
        copies = [torch.empty_like(piece, device=device) for piece in pieces]
        copy_stream.wait_stream(compute_stream)  # which may still read what was in this memory
        with module.stream(copy_stream):
            _copy(copies, pieces)
        return copies

    device_pieces, host_pieces = _pieces(on_device, limit), _pieces(on_host, limit)
    next_copies = fetch(host_pieces[0])
    for number, pieces in enumerate(device_pieces):
        compute_stream.wait_stream(copy_stream)
        copies = next_copies
        is_last = number + 1 == len(host_pieces)
        next_copies = [] if is_last else fetch(host_pieces[number + 1])
        function(*[[piece] for piece in (*pieces, *copies)])
        _copy(host_pieces[number], copies)


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)


def _pieces(columns: Sequence[list[Tensor]], limit: int) -> list[tuple[Tensor, ...]]:
    """Pieces of at most `limit` elements, flat: each has one tensor of every column.

    The tensors at the same place of the columns are cut alike.
    """
    pieces: list[tuple[Tensor, ...]] = []
    for tensors in zip(*columns, strict=True):
        cut = [_cut(tensor.view(-1), limit) for tensor in tensors]
        pieces += zip(*cut, strict=True)
    return pieces


def _cut(flat: Tensor, limit: int) -> tuple[Tensor, ...]:
    # The fake tensors of torch 2.11 cannot split an empty tensor.
    return flat.split(limit) if len(flat) else (flat,)
