"""Two worlds in one torchrun job: the processes that train, and those that sample rollouts.

With rollout.num_processes=K the last K processes of the job are the samplers. Each world has a
default process group of its own, so its collectives and meshes are those of a smaller job. One link
joins them, of two gloo groups that torch's default groups do not know: over one the first trainer
sends requests and weights to all samplers, over the other one the first sampler answers.
"""

import os
import pickle
from collections import deque
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
Bucket = list[tuple[str, Tensor]]


def is_sampler(num_samplers: int) -> bool:
    """Whether this process samples, by torchrun's variables: before there is a process group."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return rank >= world_size - num_samplers


class Channel:
    """Messages from the first process of a gloo group to the others. Sending does not wait."""

    def __init__(self, store: dist.Store, rank: int, size: int):
        """`rank` is that in the group. All its processes call."""
        self.group: Any = dist.ProcessGroupGloo(store, rank, size, timeout=COLLECTIVE_TIMEOUT)
        self.pending: deque[dist.Work] = deque()  # broadcasts that have perhaps not arrived

    def send(self, value: object) -> None:
        """Sends a picklable value."""
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        self.send_tensor(torch.tensor([len(data)]))
        self.send_tensor(data)

    def send_tensor(self, tensor: Tensor) -> None:
        """Sends a tensor of a size that the others know."""
        while self.pending and self.pending[0].is_completed():
            self.pending.popleft().wait()  # raises if it failed
        self.pending.append(self._broadcast(tensor))

    def flush(self) -> None:
        """Waits until all that was sent has arrived."""
        while self.pending:
            self.pending.popleft().wait()

    def receive(self) -> bytes:
        """Waits for what `send` sends, and returns it pickled."""
        size = self.receive_tensor(torch.empty(1, dtype=torch.int64))
        return self.receive_tensor(torch.empty(int(size), dtype=torch.uint8)).numpy().tobytes()

    def receive_tensor(self, tensor: Tensor) -> Tensor:
        """Waits for what `send_tensor` sends, and returns it in this tensor."""
        self._broadcast(tensor).wait()
        return tensor

    def _broadcast(self, tensor: Tensor) -> dist.Work:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        return self.group.broadcast([tensor], options)


class Link:
    """Joins the two worlds. All processes of a world make the same calls, in the same order."""

    def __init__(self, store: dist.Store, num_trainers: int, num_samplers: int, rank: int):
        """`rank` is that of this process in the job. All processes of the job call."""
        self.is_sampler = rank >= num_trainers
        self.requests: Channel | None = None  # on the first trainer and all samplers
        self.answers: Channel | None = None  # on the first sampler and the first trainer
        if self.is_sampler or rank == 0:
            rank_there = rank - num_trainers + 1 if self.is_sampler else 0
            self.requests = Channel(
                dist.PrefixStore("requests", store), rank_there, num_samplers + 1
            )
        if rank in (0, num_trainers):
            self.answers = Channel(dist.PrefixStore("answers", store), int(rank == 0), 2)

    # From the trainers to the samplers.

    def send(self, value: object) -> None:
        """Sends a picklable value to all samplers, without waiting for them. All trainers call."""
        if self.requests is not None:
            self.requests.send(value)

    def receive(self) -> Any:
        """Waits for what `send` sends. All samplers call."""
        assert self.requests is not None
        return pickle.loads(self.requests.receive())

    def send_weights(self, named_tensors: Iterable[tuple[str, Tensor]], waits: bool) -> None:
        """Sends full tensors to all samplers. All trainers call, since making them communicates.

        If it `waits`, the samplers receive now, and the first trainer keeps one bucket in host
        memory. Else it keeps all of them until the samplers take them.
        """
        requests = self.requests
        for bucket in buckets(named_tensors, BUCKET_BYTES):
            if requests is not None:
                if waits:
                    requests.flush()
                requests.send([(name, tensor.dtype, tensor.shape) for name, tensor in bucket])
                requests.send_tensor(_flatten(bucket))
            progress.mark()
        self.send([])
        if waits:
            self.flush()

    def receive_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields what `send_weights` sends. All samplers iterate to the end."""
        assert self.requests is not None
        while entries := self.receive():
            sizes = [shape.numel() * dtype.itemsize for _, dtype, shape in entries]
            flat = self.requests.receive_tensor(torch.empty(sum(sizes), dtype=torch.uint8))
            for (name, dtype, shape), part in zip(entries, flat.split(sizes), strict=True):
                yield name, part.view(dtype).view(shape)
            progress.mark()

    # From the samplers to the trainers.

    def answer(self, value: object) -> None:
        """Sends the first sampler's picklable value to the trainers, without waiting for them.

        All samplers call.
        """
        if self.answers is not None:
            self.answers.send(value)

    def receive_answer(self) -> bytes:
        """Waits for what `answer` sends, and returns it pickled, on all trainers, which call."""
        return broadcast_object(self.answers.receive() if self.answers is not None else b"")

    def flush(self) -> None:
        """Waits until the other world has all that this one has sent."""
        for channel in (self.requests, self.answers):
            if channel is not None:
                channel.flush()


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


def buckets(named_tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[Bucket]:
    """Consecutive tensors of one dtype, at most `limit` bytes together; a larger one alone.

    After tensors of a smaller dtype, one could begin at an offset at which its own dtype cannot be
    read.
    """
    bucket: Bucket = []
    num_bytes = 0
    for name, tensor in named_tensors:
        is_full = num_bytes + tensor.nbytes > limit
        if bucket and (is_full or tensor.dtype != bucket[0][1].dtype):
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append((name, tensor.contiguous()))
        num_bytes += tensor.nbytes
    if bucket:
        yield bucket


def _flatten(bucket: Bucket) -> Tensor:
    """The bytes of the tensors one after the other, in host memory."""
    # A view of no dimension, such as a buffer's number, has no bytes to look at.
    parts = [tensor.detach().reshape(-1).view(torch.uint8).cpu() for _, tensor in bucket]
    return torch.cat(parts)
