"""Workers on the device of a memory plan, which has no memory, and what happens on it.

    with fake_gpu(world=8) as gpu:
        worker = gpu.worker(num_updates=10, max_length_per_device=8192)
        with Watch() as seen:
            worker.update(gpu.batch(worker, tokens=8192), policy_loss)
    assert not seen.waits, seen.waits

It is the code of rl2 as it is, with torch's FSDP, DTensor and optimizer, any number of ranks in one
process. Kernels do not run, so nothing is said about values.
"""

import contextlib
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from shapes import make_config
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rl2
from rl2.batch import Batch, Sample, collate
from rl2.config.schema import WorkerConfig
from rl2.parallel.device import PLANNED_DEVICE
from rl2.parallel.planned_device import MemoryTracker, PlannedDevice
from rl2.tools.planned_process import ModelsWithoutValues, planned_process
from rl2.worker import Worker

aten = torch.ops.aten
HOST = torch.device("cpu")
PACKAGE = f"{Path(rl2.__file__).parent}/"
# What copies from page-locked memory, see test_copies_to_a_gpu_come_from_page_locked_memory.
COPY_HELPERS = ("parallel/device.py", "parallel/offload.py")
COPIES = {aten._to_copy.default, aten.copy_.default, aten._foreach_copy_.default}
# The host reads the sums of the metrics, the norm of the gradient and the visible update.
WAITS_OF_AN_UPDATE = 3
SLACK_BYTES = 2**14  # what the allocator rounds up


class Watch(TorchDispatchMode):
    """Counts the copies between host and device, and where the host waits for the device.

    An operator whose result has a size that only the device knows is an error of torch's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copied: Counter[str] = Counter()  # bytes by direction: "to device" | "to host"
        self.beside: Counter[str] = Counter()  # of them, those that run beside the computation
        self.waits: Counter[str] = Counter()  # number by what the host waits for, and where
        self.work: list[str] = []  # operators with a result on the device, in order
        self.is_beside = False

    def __enter__(self) -> "Watch":
        self.contexts = contextlib.ExitStack()
        tolist = FakeTensor.tolist

        def tolist_and_wait(tensor):
            if tensor.device != PLANNED_DEVICE:
                return tolist(tensor)
            self._wait("tolist")
            return torch.ones(tensor.shape, dtype=tensor.dtype).tolist()

        @contextlib.contextmanager
        def on_stream(stream):
            self.is_beside = True
            yield
            self.is_beside = False

        self.contexts.enter_context(mock.patch.object(FakeTensor, "tolist", tolist_and_wait))
        self.contexts.enter_context(mock.patch.object(torch.cpu, "stream", on_stream))
        synchronize = partial(self._wait, "synchronize")
        self.contexts.enter_context(mock.patch.object(torch.cpu, "synchronize", synchronize))
        return super().__enter__()

    def __exit__(self, *exception):
        super().__exit__(*exception)
        self.contexts.close()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its operators on local tensors come here
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        devices = {tensor.device for tensor in inputs + outputs}
        if PLANNED_DEVICE not in devices:
            return result
        self.work.append(func._opname)
        if func in COPIES and HOST in devices:
            self._see_copy(func, inputs, outputs, args, kwargs)
        elif func is aten._local_scalar_dense.default:
            self._wait("item")
        elif func._opname.startswith(("_fused_", "_foreach_")):
            # Their fake kernels take tensors on several devices, and those of a GPU do not.
            assert devices == {PLANNED_DEVICE}, f"{func._opname} got tensors on {devices}"
        return result

    def _see_copy(self, func, inputs, outputs, args, kwargs):
        target, source = outputs[0], inputs[0]
        is_async = kwargs.get("non_blocking", False)
        if func is not aten._to_copy.default:
            target, source = inputs[0], inputs[-1]
            is_async = args[2] if len(args) > 2 else is_async
        direction = "to device" if target.device == PLANNED_DEVICE else "to host"
        on_host = target if direction == "to host" else source
        size = sum(x.nbytes for x in inputs if x.device == HOST) or on_host.nbytes
        if size == 0:
            return
        self.copied[direction] += size
        if self.is_beside:
            self.beside[direction] += size
        # torch page-locks what it makes for an asynchronous copy to the host.
        makes_target = direction == "to host" and func is aten._to_copy.default
        is_locked = makes_target or _place_in_package().startswith(COPY_HELPERS)
        if not (is_async and is_locked):
            self._wait(f"copy {direction}")

    def _wait(self, what: str) -> None:
        self.waits[f"{what} at {_place_in_package()}"] += 1


def _place_in_package() -> str:
    """The innermost line of rl2 that runs, "file.py:line"; "" if none does."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE) and not file.endswith("planned_device.py"):
            return f"{file.removeprefix(PACKAGE)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


class FakeGpu:
    """The rank's GPU, with the models of `shapes.SHAPES` by name."""

    def __init__(self, memory: PlannedDevice, host: MemoryTracker, folder: Path):
        self.memory = memory
        self.host = host
        self.folder = folder

    @property
    def bytes(self) -> int:
        """Bytes that are alive on the GPU."""
        return self.memory.bytes

    def worker(self, name="small", critic=False, num_updates=10, **keys) -> Worker:
        folder = self.folder / name
        make_config(name).save_pretrained(folder)
        config = WorkerConfig(**{"model_name": str(folder), "gradient_checkpointing": True} | keys)
        source = ModelsWithoutValues(self.memory)
        return Worker(config, PLANNED_DEVICE, critic, num_updates, source=source)

    def batch(self, worker: Worker, tokens: int, packs: int = 1, answers: int = 1) -> Batch:
        """Rows that fill `packs` micro-batches of `tokens` tokens on every process.

        Each prompt has `answers` rows, and an eighth of a row is its prompt.
        """
        length = tokens * worker.config.sp_size // answers
        num_prompt = length // 8
        generator = torch.Generator().manual_seed(0)
        samples = []
        for group in range(packs * worker.mesh.dp_size):
            ids = torch.randint(3, 1000, (length + 1,), generator=generator).tolist()
            mask = [0] * num_prompt + [1] * (length + 1 - num_prompt)
            zeros = [0.0] * len(mask)
            for _ in range(answers):
                samples.append(Sample(ids, mask, zeros, zeros, group, len(samples)))
        batch = collate(samples)
        return replace(
            batch,
            advantages=torch.ones(batch.mask.shape),
            token_weights=batch.mask / batch.mask.sum(),
        )


@contextlib.contextmanager
def fake_gpu(world=1, rank=0):
    """A context in which this process is `rank` of `world` processes, each with a GPU."""
    init_process_group = partial(dist.init_process_group, rank=rank)
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def init(*arguments, **options):
        init_process_group(*arguments, **{**options, "rank": rank})

    def propagate_unseen(*arguments):  # it makes tensors of the whole shape
        with torch.utils._python_dispatch._disable_current_modes():
            return propagate(*arguments)

    make_tensor = torch.tensor
    _device_constructors()  # torch keeps these functions at the first call: the true ones

    def make_and_copy(*arguments, device=None, **options):
        """torch makes a tensor of values in host memory, and does not show the copy."""
        if device is None:
            return make_tensor(*arguments, **options)
        return make_tensor(*arguments, device=HOST, **options).to(device)

    patches = [
        (torch, "tensor", make_and_copy),
        (dist, "init_process_group", init),
        (dist, "broadcast_object_list", lambda values, *_, **__: None),
        (ShardingPropagator, "_propagate_tensor_meta_non_cached", propagate_unseen),
        # There is no kernel to compile for, so the function itself runs.
        (torch, "compile", lambda function, **_: function),
        (dcp, "load", lambda *_, **__: None),  # it fills the tensors of a state in place
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in patches:
            stack.enter_context(mock.patch.object(owner, name, value))
        folder = Path(stack.enter_context(TemporaryDirectory()))
        memory = stack.enter_context(planned_process(world))
        host = stack.enter_context(MemoryTracker(HOST))
        yield FakeGpu(memory, host, folder)
