"""Weights on their way to servers: files of safetensors in a folder, and hashes that tell them."""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rl2.engine.base import NamedTensors
from rl2.parallel.worlds import buckets
from rl2.progress import mark

SHARD_BYTES = 2**30  # of a file, which is also what the writer keeps in host memory


class Hashes(dict[str, str]):
    """The hash of each weight by its name."""

    def __init__(self, dtype: torch.dtype):
        """`dtype` is that of the engine, in which weights are compared."""
        super().__init__()
        self.dtype = dtype

    def add_each(self, named_tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors, copied to host memory, and adds their hashes."""
        for name, tensor in named_tensors:
            tensor = tensor.detach().to("cpu", copy=True).contiguous()
            same = tensor.to(self.dtype) if tensor.is_floating_point() else tensor
            sha256 = hashlib.sha256(f"{same.dtype} {list(same.shape)}".encode())
            sha256.update(same.reshape(-1).view(torch.uint8).numpy().data)
            self[name] = sha256.hexdigest()
            mark()
            yield name, tensor

    def of_all(self) -> str:
        """One hash, whatever the order of the weights."""
        return hashlib.sha256(str(sorted(self.items())).encode()).hexdigest()


def write_shards(named_tensors: NamedTensors, folder: Path) -> None:
    """Writes tensors in host memory into a new folder, a file after the other."""
    folder.mkdir()
    for number, bucket in enumerate(buckets(named_tensors, SHARD_BYTES)):
        save_file(dict(bucket), folder / f"{number:05}.safetensors")


def read_shards(files: Iterable[Path]) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of the files, one in memory at a time."""
    for file in files:
        with safe_open(file, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118
                yield name, shard.get_tensor(name)
