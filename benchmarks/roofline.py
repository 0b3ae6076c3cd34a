"""The least time of an update on H100s, by a roofline over the operators of the real code.

    bash tests/cuda/run.sh --collect-only         # makes the environment .venv-cuda, once
    .venv-cuda/bin/python benchmarks/roofline.py [CASE ...] [--rl2 CHECKOUT] [--operators N]

No GPU is needed: `Worker` runs on the fake CUDA tensors of tests/cuda, as rank 0 of a case's
processes. Every operator takes the time that its FLOPs or its bytes need at the rates below. It
starts when the host has reached it and its stream is free; streams, events and waits of the host
are followed, so that a gather, a copy or a wait counts only where nothing hides it. Kernels are as
fast as a good one of their kind, so the figures are bounds: a real update is slower.

A region that torch.compile makes costs its inputs and outputs, which holds where all of it becomes
one kernel. `--rl2` takes the code of another checkout, for a table before and after.
"""

import argparse
import contextlib
import json
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent

# What an H100 SXM reaches: assumptions, not measurements of ours.
PEAK_FLOPS = 989e12  # bf16, as the data sheet says; what utilisation is a share of
MATMUL_FLOPS = 650e12  # of large matrix products
FLASH_FLOPS = 350e12  # of flash attention 2
MEMORY_BYTES = 2.7e12  # bytes read and written a second
NETWORK_BYTES = 300e9  # a second and GPU, between the GPUs of a node
PINNED_BYTES = 45e9  # a second, copies between pinned host memory and the device
PAGEABLE_BYTES = 4e9  # a second, the same for ordinary host memory
KERNEL_SECONDS = 2e-6  # of the smallest kernel
COLLECTIVE_SECONDS = 20e-6
DISPATCH_SECONDS = 5e-6  # of the host, for each operator
GPUS_PER_NODE = 8
PHASES = ("infer", "update", "sync")

SHAPE = {"tokens": 8192, "packs": 2, "answers": 4}  # two micro-batches, each of a group of four
OFFLOADED = {"offload_model": True, "offload_optimizer": True}
# Name -> (model, number of processes, keys of the worker, differences from SHAPE).
CASES = {
    "0.6b": ("qwen3-0.6b", 1, {}, {}),
    "1.5b": ("qwen2.5-1.5b", 1, {}, {}),
    "1.5b-long": ("qwen2.5-1.5b", 1, {}, {"answers": 1}),
    "7b-8": ("qwen2.5-7b", 8, {}, {}),
    "7b-16": ("qwen2.5-7b", 16, {}, {}),
    "7b-16-node": ("qwen2.5-7b", 16, {"fsdp_size": 8}, {}),
    "7b-1": ("qwen2.5-7b", 1, OFFLOADED, {}),
}


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; default: all")
    parser.add_argument("--rl2", default=str(ROOT), help="the checkout whose rl2 runs")
    parser.add_argument(
        "--keys",
        type=json.loads,
        action="append",
        help="keys of the worker, as JSON; given several times, each case runs with each of them",
    )
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES)
    parser.add_argument("--node-rate", type=float, default=360, help="GB/s of a node's network")
    parser.add_argument("--operators", type=int, default=0, help="show so many of the longest ones")
    return parser.parse_args()


ARGUMENTS = read_arguments()
sys.path[:0] = [ARGUMENTS.rl2, f"{ROOT}/tests", f"{ROOT}/tests/cuda"]

import machine  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from fake_cuda import fake_cuda, policy_loss  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten  # noqa: E402
from torch.utils.flop_counter import flop_registry  # noqa: E402

aten = torch.ops.aten
# They launch nothing.
NO_KERNEL = {
    aten.detach.default,
    aten.lift_fresh.default,
    aten._unsafe_view.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
# Their first argument is written and not read.
OVERWRITING = {"copy_", "zero_", "fill_", "split_with_sizes_copy", "_foreach_copy_"}
# They touch as much of their largest argument as the rest of them has.
INDEXED = {
    "embedding",
    "index",
    "gather",
    "index_select",
    "scatter_add_",
    "index_put_",
    "index_add_",
}
PRODUCTS = ("matrix products", "flash attention")
COPIES = {aten._to_copy.default, aten.copy_.default}


@dataclass
class Region:
    """What one kind of operator did."""

    calls: int = 0
    seconds: float = 0.0
    bytes: float = 0.0


@dataclass
class Timeline(TorchDispatchMode):
    """The mode above the Tracker of tests/cuda: it lays every operator on its stream's time."""

    tracker: object
    world: int
    host: float = 0.0  # when the host issues the next operator, in seconds
    network: float = 0.0  # when NCCL's stream is free
    busy: float = 0.0  # of the main stream
    flash_forward_flops: float = 0.0
    kinds: dict[str, Region] = field(default_factory=lambda: defaultdict(Region))

    def __post_init__(self):
        super().__init__()
        self.ready: dict[object, float] = defaultdict(float)  # by stream, when its work is done
        self.is_compiled = False  # inside a compiled region

    __hash__ = object.__hash__

    @contextlib.contextmanager
    def compiled_region(self, tensors: list):
        """What runs in this context is one kernel, which reads and writes these tensors.

        Those that it makes are appended to the list in it.
        """
        before, self.is_compiled = self.is_compiled, True
        try:
            yield
        finally:
            self.is_compiled = before
        if not before:
            size = sum(_bytes(tensor) for tensor in tensors)
            self.add("compiled regions", size / MEMORY_BYTES + KERNEL_SECONDS, size)

    @property
    def now(self) -> float:
        """When everything that was issued is done."""
        return max([self.host, self.network, *self.ready.values()])

    current: ClassVar["Timeline | None"] = None

    def __enter__(self):
        Timeline.current = self
        stream, event = machine.Stream, torch.cuda.Event

        def record(event, on=None):
            event.seconds = self.ready[on or stream.current]
            return event

        def wait(on, event):
            self.ready[on] = max(self.ready[on], getattr(event, "seconds", 0.0))

        def synchronize(event):
            self.host = max(self.host, getattr(event, "seconds", 0.0))

        patches = [
            (stream, "wait_event", wait),
            (stream, "wait_stream", lambda on, other: self._wait_until(on, self.ready[other])),
            (stream, "record_event", lambda on, e=None: record(e or torch.cuda.Event(), on)),
            (event, "record", record),
            (event, "wait", lambda event, on=None: wait(on or stream.current, event)),
            (event, "synchronize", synchronize),
        ]
        self.patches = contextlib.ExitStack()
        for owner, name, value in patches:
            self.patches.enter_context(mock.patch.object(owner, name, value, create=True))
        return super().__enter__()

    def __exit__(self, *error):
        Timeline.current = None
        self.patches.close()
        return super().__exit__(*error)

    def _wait_until(self, stream, seconds: float) -> None:
        self.ready[stream] = max(self.ready[stream], seconds)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its operators on local tensors come here
        kwargs = kwargs or {}
        with self.tracker.phase() as phase:
            out = func(*args, **kwargs)
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        devices = {tensor.device.type for tensor in inputs + outputs}
        launches = "cuda" in devices and func not in NO_KERNEL and not func.is_view
        if launches and func.namespace != "prim" and not self.is_compiled:
            self._lay(func, args, kwargs, inputs, outputs, devices)
        if phase.num_waits:
            self.host = max(self.host, self.ready[machine.Stream.current])
        return out

    def _lay(self, func, args, kwargs, inputs, outputs, devices) -> None:
        if func is aten._local_scalar_dense.default:
            return
        size = moved_bytes(func, inputs, outputs)
        if devices == {"cpu", "cuda"} and func in COPIES:
            host = next(tensor for tensor in inputs + outputs if tensor.device.type == "cpu")
            rate = PINNED_BYTES if self.tracker.is_pinned(host) else PAGEABLE_BYTES
            self.add("copy between host and device", host.nbytes / rate + KERNEL_SECONDS, size)
        elif func.namespace in ("c10d", "_c10d_functional"):
            self._add_collective(func, args, inputs + outputs)
        elif "flash_attention" in func._opname:
            flops = self._flash_flops(func, args)
            self.add("flash attention", max(flops / FLASH_FLOPS, size / MEMORY_BYTES), size)
        elif func._overloadpacket in flop_registry:
            flops = flop_registry[func._overloadpacket](*args, **kwargs, out_val=outputs[0])
            self.add("matrix products", max(flops / MATMUL_FLOPS, size / MEMORY_BYTES), size)
        else:
            self.add(func._opname, size / MEMORY_BYTES + KERNEL_SECONDS, size)

    def add(self, kind: str, seconds: float, size: float, stream=None, start: float = 0.0) -> None:
        """Puts an operator on the stream, the current one by default."""
        stream = stream or machine.Stream.current
        self.host += DISPATCH_SECONDS
        self.ready[stream] = max(self.ready[stream], self.host, start) + seconds
        if stream is machine.MAIN_STREAM:
            self.busy += seconds
        region = self.kinds[kind]
        region.calls += 1
        region.seconds += seconds
        region.bytes += size

    def _add_collective(self, func, args, tensors) -> None:
        """NCCL runs its kernels one after the other, and the stream that asked waits for them."""
        largest = max((tensor.nbytes for tensor in tensors), default=0)
        ranks = range(self.world)
        for argument in args:
            if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type()):
                ranks = dist.get_process_group_ranks(dist.ProcessGroup.unbox(argument))
        rounds = 2 if "allreduce" in func._opname else 1
        sent = rounds * largest * (len(ranks) - 1) / len(ranks)
        nodes = {rank // GPUS_PER_NODE for rank in ranks}
        # The ring of an adapter carries its share of the data.
        rate = min(NETWORK_BYTES, ARGUMENTS.node_rate * 1e9) if len(nodes) > 1 else NETWORK_BYTES
        seconds = COLLECTIVE_SECONDS + sent / rate
        self.add(f"collective {func._opname}", seconds, sent, start=self.network)
        self.network = self.ready[machine.Stream.current]

    def _flash_flops(self, func, args) -> float:
        """Of documents that are all as long as the longest one."""
        is_forward = "backward" not in func._opname
        query = args[0] if is_forward else args[1]
        longest_keys, is_causal = (args[6], args[8]) if is_forward else (args[9], args[11])
        tokens, heads, width = query.shape
        forward = 4 * tokens * longest_keys * heads * width * (0.5 if is_causal else 1.0)
        if not is_forward:  # it runs once, the forward pass perhaps twice
            self.flash_forward_flops += forward
        return forward if is_forward else 2.5 * forward


def as_one_kernel(function):
    """Stands for torch.compile: one kernel for the forward pass and one for the backward pass.

    What `function` computes is not kept: the backward kernel computes it again from its inputs.
    """

    def call(*arguments, **keywords):
        tensors = [leaf for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, Tensor)]
        for argument in arguments:
            if isinstance(argument, nn.Module):
                tensors += argument.parameters()
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return OneKernel.apply(function, arguments, keywords, *tensors)
        return run_as_one_kernel(lambda: function(*arguments, **keywords), tensors)

    return call


def run_as_one_kernel(function, inputs):
    if Timeline.current is None:
        return function()
    tensors = list(inputs)
    with Timeline.current.compiled_region(tensors):
        out = function()
        tensors += [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
    return out


class OneKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, arguments, keywords, *tensors):
        ctx.function, ctx.keywords = function, keywords
        leaves, ctx.spec = tree_flatten(arguments)
        ctx.others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        ctx.is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
        ctx.save_for_backward(*tensors)
        return run_as_one_kernel(lambda: function(*arguments, **keywords), tensors)

    @staticmethod
    def backward(ctx, *gradients):
        tensors = ctx.saved_tensors
        num_arguments = sum(ctx.is_tensor)
        inputs = [t.detach().requires_grad_(t.requires_grad) for t in tensors[:num_arguments]]
        remaining = iter(inputs)
        leaves = [
            next(remaining) if is_tensor else other
            for is_tensor, other in zip(ctx.is_tensor, ctx.others, strict=True)
        ]
        for other in ctx.others:
            if isinstance(other, nn.Module):
                inputs += other.parameters()

        def differentiate():
            with torch.enable_grad():
                out = ctx.function(*tree_unflatten(leaves, ctx.spec), **ctx.keywords)
            outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
            trained = [tensor for tensor in inputs if tensor.requires_grad]
            found = iter(torch.autograd.grad(outputs, trained, gradients, allow_unused=True))
            return [next(found) if tensor.requires_grad else None for tensor in inputs]

        input_gradients = run_as_one_kernel(differentiate, [*inputs, *gradients])
        return None, None, None, *input_gradients


def moved_bytes(func, inputs: list[Tensor], outputs: list[Tensor]) -> float:
    """Bytes on the device that the operator reads and writes."""
    name = func._opname
    on_device = [tensor for tensor in inputs if tensor.device.type == "cuda"]
    sizes = [_bytes(tensor) for tensor in on_device]
    if name == "_fused_adamw_":
        return sum(sizes) * 7 / 4  # parameter, gradient and two moments; all but the gradient back
    if name == "all_gather_copy_in":  # into this rank's part of the largest argument
        return 2 * (sum(sizes) - max(sizes))
    written = sum(_bytes(tensor) for tensor in outputs if tensor.device.type == "cuda")
    if name in INDEXED and sizes:
        rest = sum(sizes) - max(sizes)
        return 2 * written + rest if name in ("embedding", "index") else 3 * rest
    if name in OVERWRITING:
        half = sum(sizes) / 2 if name.startswith("_foreach") else _bytes(inputs[-1])
        return 2 * half if len(inputs) > 1 else sizes[0]
    if not outputs:  # it writes to some of its arguments
        written = sum(sizes) / 2
    return sum(sizes) + written


def _bytes(tensor: Tensor) -> int:
    """Bytes of memory behind a tensor: an expanded one has fewer than elements."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def run(name: str, changed_keys: dict) -> None:
    """Prints a row for each phase of a step: infer, update, and the weights on their way out."""
    model, world, keys, changes = CASES[name]
    title = " ".join([name, *(f"{key}={json.dumps(x)}" for key, x in changed_keys.items())])
    shape = SHAPE | changes
    with fake_cuda(world=world) as gpu, mock.patch("torch.compile", as_one_kernel):
        keys = {"max_length_per_device": shape["tokens"], **keys, **changed_keys}
        worker = gpu.worker(model, **keys)
        batch = gpu.batch(worker, **shape)
        # Makes FSDP's buffers, and the optimizer's state in older code.
        worker.update(gpu.batch(worker, tokens=64), policy_loss)
        num_tokens: list[int] = []  # of the packs of a phase
        calls = {
            "infer": lambda: worker.infer(batch),
            "update": lambda: worker.update(batch, policy_loss),
            "sync": lambda: [None for _ in worker.iter_full_weights(torch.bfloat16)],
        }
        for phase_name in ARGUMENTS.phases:
            num_tokens.clear()
            hook = worker.model.register_forward_pre_hook(
                lambda _, arguments: num_tokens.append(arguments[0].tokens.numel())
            )
            with Timeline(gpu.tracker, world) as timeline, gpu.phase() as phase:
                calls[phase_name]()
            hook.remove()
            utilisation = None
            if phase_name == "update":
                flops = useful_flops(worker, batch, sum(num_tokens), timeline.flash_forward_flops)
                utilisation = flops / timeline.now / PEAK_FLOPS
            print_row(title, phase_name, timeline, phase, utilisation)
            print_operators(timeline, ARGUMENTS.operators)


def useful_flops(worker, batch, num_tokens: int, flash_forward_flops: float) -> float:
    """FLOPs of the model for a forward and a backward pass: what is computed again does not count.

    `num_tokens` go through the layers, and the scored ones through the head.
    """
    config = worker.model.hf.config
    head = config.vocab_size * config.hidden_size
    embeddings = head if config.tie_word_embeddings else 2 * head
    layers = sum(parameter.numel() for parameter in worker.model.parameters()) - embeddings
    scored = int(batch.mask.sum()) / worker.mesh.dp_size
    return 6 * (layers * num_tokens + head * scored) + 3 * flash_forward_flops


def print_header() -> None:
    columns = ("case", "phase", "seconds", "idle s", "MFU", "GEMM and flash", "kernels")
    columns += ("GB moved", "copies", "GB copied", "waits", "collectives s", "peak GB")
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns), flush=True)


def print_row(case: str, phase_name: str, timeline: Timeline, phase, utilisation=None) -> None:
    kinds = timeline.kinds
    products = sum(kinds[kind].seconds for kind in PRODUCTS)
    collectives = sum(r.seconds for kind, r in kinds.items() if kind.startswith("collective"))
    cells = (
        case,
        phase_name,
        f"{timeline.now:.3f}",
        f"{timeline.now - timeline.busy:.3f}",
        "" if utilisation is None else f"{utilisation:.1%}",
        f"{products / timeline.now:.0%}",
        f"{sum(region.calls for region in kinds.values()):,}",
        f"{sum(region.bytes for region in kinds.values()) / 1e9:,.0f}",
        f"{sum(phase.copies.values()):,}",
        f"{sum(phase.copied_bytes.values()) / 1e9:.1f}",
        f"{phase.num_waits:,}",
        f"{collectives:.3f}",
        f"{phase.peak_bytes / 1e9:.1f}",
    )
    print("| " + " | ".join(cells) + " |", flush=True)


def print_operators(timeline: Timeline, num: int) -> None:
    """The kinds of operators that take longest."""
    ordered = sorted(timeline.kinds.items(), key=lambda item: -item[1].seconds)
    for kind, region in ordered[:num]:
        print(
            f"    {kind:40} {region.seconds * 1000:8.1f} ms {region.calls:6} calls "
            f"{region.bytes / 1e9:8.1f} GB"
        )


def main() -> None:
    print_header()
    for name in ARGUMENTS.cases or CASES:
        for keys in ARGUMENTS.keys or [{}]:
            run(name, keys)


if __name__ == "__main__":
    main()
