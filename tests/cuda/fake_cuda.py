"""rl2 on fake CUDA tensors: any number of ranks and any size of model in one process of a CPU.

    with fake_cuda(world=8) as gpu:
        worker = gpu.worker("qwen2.5-7b", num_updates=10, max_length_per_device=8192)
        batch = gpu.batch(worker, tokens=8192)
        with gpu.phase() as update:
            worker.update(batch, policy_loss)
    assert update.peak_bytes < 30e9 and update.num_waits < 20, update.describe_waits()
    assert optimizer_devices(worker) == {"cuda"}

It is the code of rl2 as it is, with torch's FSDP, DTensor and optimizer, on tensors that have a
device, a shape and a dtype but no data. What the host reads from the device is 1. Kernels do not
run, so nothing is said about values.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import peft
import torch
import torch.distributed.checkpoint as dcp
from accelerate import init_empty_weights
from machine import machine
from shapes import make_config
from torch import Tensor, nn
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from tracker import Phase, Tracker
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import rl2.model.load
import rl2.parallel.offload
from rl2.batch import Batch, Sample, collate
from rl2.config.schema import WorkerConfig
from rl2.worker import Worker

aten = torch.ops.aten
SLACK_BYTES = 2**14  # what the allocator rounds up
# The host reads the sums of the metrics, the norm of the gradient and the visible update.
WAITS_OF_AN_UPDATE = 3


class FakeGpu:
    """The rank's GPU, with models of `SHAPES` by name."""

    def __init__(self, world: int, tracker: Tracker, folder: Path):
        self.world = world
        self.device = torch.device("cuda", 0)
        self.tracker = tracker
        self.folder = folder

    def model_folder(self, name: str) -> str:
        """A folder with the config of the model `name`, and no weights."""
        folder = self.folder / name
        if not folder.exists():
            make_config(name).save_pretrained(folder)
        return str(folder)

    def config(self, name: str = "small", **keys: Any) -> WorkerConfig:
        """A worker's section of the config: the defaults but for `keys`."""
        return WorkerConfig(model_name=self.model_folder(name), **keys)

    def worker(
        self, name: str = "small", critic: bool = False, num_updates: int = 10, **keys: Any
    ) -> Worker:
        return Worker(self.config(name, **keys), self.device, critic, num_updates)

    def batch(
        self, worker: Worker, tokens: int, packs: int = 1, answers: int = 1, prompt: float = 0.125
    ) -> Batch:
        """Rows that fill `packs` micro-batches of `tokens` tokens on every process.

        Each prompt has `answers` rows, and the share `prompt` of a row is its prompt.
        """
        length = tokens * worker.config.sp_size // answers
        num_prompt = int(length * prompt)
        with unset_fake_temporarily(), self.tracker.paused():
            generator = torch.Generator().manual_seed(0)
            vocabulary = worker.model.hf.config.vocab_size
            samples = []
            for group in range(packs * worker.mesh.dp_size):
                ids = torch.randint(3, vocabulary, (length + 1,), generator=generator).tolist()
                mask = [0] * num_prompt + [1] * (length + 1 - num_prompt)
                zeros = [0.0] * len(mask)
                for _ in range(answers):
                    samples.append(Sample(ids, mask, zeros, zeros, group, len(samples)))
            batch = collate(samples)
            weights = batch.mask / batch.mask.sum()
            zeros_like = torch.zeros(batch.mask.shape)
            return replace(
                batch,
                advantages=torch.ones(batch.mask.shape),
                returns=zeros_like,
                token_weights=weights,
            )

    def phase(self) -> contextlib.AbstractContextManager[Phase]:
        """A context whose Phase tells what happened in it, once it has ended."""
        return self.tracker.phase()

    @property
    def bytes(self) -> int:
        """Bytes that are alive on the GPU."""
        return self.tracker.memory["cuda"].now

    @property
    def host_bytes(self) -> int:
        """Bytes of tensors in host memory, but for small ones."""
        return self.tracker.memory["cpu"].now


@contextlib.contextmanager
def fake_cuda(world: int = 1, rank: int = 0, memory_gib: float = 80) -> Iterator[FakeGpu]:
    """A context in which this process is `rank` of `world` processes, each with a fake GPU."""
    tracker = Tracker()
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        folder = Path(enter(TemporaryDirectory()))
        enter(machine(world, rank, int(memory_gib * 2**30), tracker.wait))
        enter(mock.patch.object(rl2.parallel.offload, "_pin", tracker.pin))
        for owner, name, value in _replacements():
            enter(mock.patch.object(owner, name, value))
        enter(mock.patch.dict(fake_impls.op_implementations_dict, ANSWERS))
        # There is no kernel to compile for, so the function itself runs.
        enter(mock.patch.object(torch, "compile", lambda function, **_: function))
        enter(FakeTensorMode(allow_non_fake_inputs=True))
        enter(tracker)
        yield FakeGpu(world, tracker, folder)


def _answer_number(mode, func, tensor):
    return True if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1


def _answer_positions(mode, func, tensor):
    return tensor.new_empty((tensor.numel(), tensor.dim()), dtype=torch.int64)


# What the host reads from the device: 1 for a number, all positions of a mask.
ANSWERS = {
    aten._local_scalar_dense.default: _answer_number,
    aten.nonzero.default: _answer_positions,
}


def _replacements() -> list[tuple[Any, str, Any]]:
    """(owner, name, value) of what works on values, or reads files that do not exist."""
    replacements: list[tuple[Any, str, Any]] = [
        (rl2.model.load, "admit", lambda *_: None),  # it compares values
        # Loading fills the tensors of a state in place.
        (dcp, "load", lambda *_, **__: None),
        (peft, "inject_adapter_in_model", _on_host(peft.inject_adapter_in_model)),
    ]
    for auto in (AutoModelForCausalLM, AutoModelForSequenceClassification):
        from_config = _on_host(auto.from_config)
        replacements.append((auto, "from_config", from_config))
        replacements.append((auto, "from_pretrained", _without_files(from_config)))
    return replacements


def _on_host(function):
    """The function with tensors that have data, or are on the meta device."""

    def real(*arguments, **keywords):
        with unset_fake_temporarily():
            return function(*arguments, **keywords)

    return real


def _without_files(from_config):
    """`from_pretrained` of a model whose weights are fake, in host memory."""

    def from_pretrained(name, config, dtype, **_):
        with init_empty_weights(include_buffers=False):
            hf = from_config(config, dtype=dtype)
        hf.to_empty(device="cpu")
        hf.tie_weights()
        missing = {"score.weight"} if hasattr(hf, "score") else set()
        report = {"missing_keys": missing, "unexpected_keys": set(), "mismatched_keys": set()}
        return hf, report

    return from_pretrained


def policy_loss(batch: Batch, scores) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss of the actor, with a metric."""
    loss = -(scores.logps * batch.advantages * batch.token_weights).sum()
    return loss, {"logps": (scores.logps.detach() * batch.token_weights).sum()}


def value_loss(batch: Batch, scores) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss of the critic."""
    return ((scores.values - batch.returns).square() * batch.token_weights).sum(), {}


def optimizer_devices(worker: Worker) -> dict[str, set[str]]:
    """The devices of the optimizer's moments by their names."""
    devices: dict[str, set[str]] = {}
    for name, shards in worker.optimizer.moments.items():
        devices[name] = {shard.device.type for shard in shards.values()}
    return devices


def weight_bytes(model: nn.Module) -> int:
    """Bytes of this rank's parameters on the GPU. Those of an offloaded model have no memory."""
    return sum(p._local_tensor.untyped_storage().nbytes() for p in model.parameters())
