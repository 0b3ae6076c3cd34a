"""Two worlds in one torchrun job: the processes that train, and those that sample rollouts.

With rollout.num_processes=K the last K processes of the job are the samplers. Each world has a
default process group of its own, so its collectives and meshes are those of a smaller job. One link
joins them: a gloo group of the first trainer and all samplers, which torch's default groups do not
know. The first trainer sends requests and weights, and the first sampler answers.
"""

import os
import pickle
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from rl2 import progress
from rl2.parallel.mesh import COLLECTIVE_TIMEOUT, broadcast_object, choose_backend

# Bytes of weights that travel together. The trainers gather the next ones meanwhile.
BUCKET_BYTES = 2**26
ALIGNMENT = 16  # bytes, at which a weight begins in its bucket
FIRST_TRAINER, FIRST_SAMPLER = 0, 1  # their ranks in the link


def is_sampler(num_samplers: int) -> bool:
    """Whether this process samples, by torchrun's variables: before there is a process group."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return rank >= world_size - num_samplers


class Link:
    """Joins the two worlds. All processes of a world make the same calls, in the same order."""

    def __init__(self, store: dist.Store, num_trainers: int, num_samplers: int, rank: int):
        """`rank` is that of this process in the job. All processes of the job call."""
        self.num_samplers = num_samplers
        self.is_sampler = rank >= num_trainers
        self.group: Any = None  # None on the trainers that have no link
        if self.is_sampler or rank == 0:
            link_rank = rank - num_trainers + FIRST_SAMPLER if self.is_sampler else FIRST_TRAINER
            self.group = dist.ProcessGroupGloo(
                store, link_rank, num_samplers + 1, timeout=COLLECTIVE_TIMEOUT
            )

    # From the trainers to the samplers.

    def send(self, value: Any) -> None:
        """Sends a picklable value to all samplers. All trainers call."""
        if self.group is not None:
            for tensor in _to_tensors(value):
                self._broadcast(tensor).wait()

    def receive(self) -> Any:
        """Waits for what `send` sends. All samplers call."""
        size = torch.empty(1, dtype=torch.int64)
        self._broadcast(size).wait()
        data = torch.empty(int(size), dtype=torch.uint8)
        self._broadcast(data).wait()
        return _from_tensor(data)

    def send_weights(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Sends full tensors to all samplers. All trainers call, since making them communicates."""
        sending, flat = None, None  # the bucket before, whose memory is kept until it is sent
        for bucket in _buckets(named_tensors):
            if sending is not None:
                sending.wait()
            if self.group is not None:
                self.send([(name, tensor.dtype, tensor.shape) for name, tensor in bucket])
                flat = _flatten(bucket)
                sending = self._broadcast(flat)
            progress.mark()
        if sending is not None:
            sending.wait()
        self.send([])

    def receive_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields what `send_weights` sends. All samplers iterate to the end."""
        while entries := self.receive():
            sizes = [_padded(shape.numel() * dtype.itemsize) for _, dtype, shape in entries]
            flat = torch.empty(sum(sizes), dtype=torch.uint8)
            self._broadcast(flat).wait()
            for (name, dtype, shape), part in zip(entries, flat.split(sizes), strict=True):
                yield name, part[: shape.numel() * dtype.itemsize].view(dtype).view(shape)
            progress.mark()

    def _broadcast(self, tensor: Tensor) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = FIRST_TRAINER
        return self.group.broadcast([tensor], options)

    # From the samplers to the trainers.

    def answer(self, value: Any) -> None:
        """Sends a picklable value to the trainers. All samplers call; that of the first counts."""
        if dist.get_rank() == 0:
            for tensor in _to_tensors(value):
                self.group.send([tensor], FIRST_TRAINER, 0).wait()

    def receive_answer(self) -> bytes:
        """Waits for what `answer` sends, and returns it pickled, on all trainers, which call."""
        received = b""
        if self.group is not None:
            size = torch.empty(1, dtype=torch.int64)
            self.group.recv([size], FIRST_SAMPLER, 0).wait()
            data = torch.empty(int(size), dtype=torch.uint8)
            self.group.recv([data], FIRST_SAMPLER, 0).wait()
            received = data.numpy().tobytes()
        return broadcast_object(received)


def split_world(num_samplers: int) -> Link:
    """Makes two worlds of the job, the last `num_samplers` processes being the second one.

    All processes call, before any group but the default one has been made. Afterwards rank and
    world size are those in the world of this process.
    """
    rank, num_trainers = dist.get_rank(), dist.get_world_size() - num_samplers
    store = _get_default_store()
    dist.barrier()  # or a process might leave while another one still needs it
    dist.destroy_process_group()
    is_trainer = rank < num_trainers
    dist.init_process_group(
        choose_backend(),
        timeout=COLLECTIVE_TIMEOUT,
        store=dist.PrefixStore("trainers" if is_trainer else "samplers", store),
        rank=rank if is_trainer else rank - num_trainers,
        world_size=num_trainers if is_trainer else num_samplers,
    )
    return Link(dist.PrefixStore("link", store), num_trainers, num_samplers, rank)


def _to_tensors(value: Any) -> tuple[Tensor, Tensor]:
    """(the number of bytes, the bytes) of the pickled value."""
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    return torch.tensor([len(data)]), data


def _from_tensor(data: Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())


def _buckets(named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Groups the tensors into lists of about BUCKET_BYTES."""
    bucket: list[tuple[str, Tensor]] = []
    num_bytes = 0
    for name, tensor in named_tensors:
        bucket.append((name, tensor))
        num_bytes += tensor.nbytes
        if num_bytes >= BUCKET_BYTES:
            yield bucket
            bucket, num_bytes = [], 0
    if bucket:
        yield bucket


def _flatten(bucket: list[tuple[str, Tensor]]) -> Tensor:
    """The bytes of the tensors one after the other, in host memory."""
    sizes = [_padded(tensor.nbytes) for _, tensor in bucket]
    flat = torch.zeros(sum(sizes), dtype=torch.uint8)
    for (_, tensor), part in zip(bucket, flat.split(sizes), strict=True):
        # A view of no dimension, such as a buffer's number, has no bytes to look at.
        source = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        part[: tensor.nbytes].copy_(source)
    return flat


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
