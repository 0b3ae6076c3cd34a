"""A machine with GPUs, as torch sees it, on a machine without: what `torch.cuda` answers, streams
and events that do nothing, and a process group that sends nothing.

Some of it cannot be undone (the device guard, the hook of `no_context.cpp`), so it needs a process
of its own: tests/cuda is never collected together with the other tests.
"""

import contextlib
import ctypes
import functools
import subprocess
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch
import torch._subclasses.fake_tensor as fake_tensor
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

# Called with what the host waits for, such as "Event.synchronize".
OnWait = Callable[[str], None]


class Stream:
    """A stream without work. `Stream.current` is the one that operations are put on."""

    current: "Stream"
    stream_id = 0
    device_index = 0
    device_type = 1  # CUDA

    def __init__(self, device=None, priority=0, **_):
        self.device = torch.device("cuda", 0)
        self.priority = priority

    def wait_event(self, event):
        pass

    def wait_stream(self, stream):
        pass

    def record_event(self, event=None):
        return event or torch.cuda.Event()

    def query(self):
        return True


MAIN_STREAM = Stream()
Stream.current = MAIN_STREAM


class Event:
    """An event that has always happened."""

    def __init__(self, *_, **__):
        pass

    def record(self, stream=None):
        return self

    def wait(self, stream=None):
        pass

    def query(self):
        return True

    def elapsed_time(self, end):
        return 1.0  # ms


@contextlib.contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    """`torch.cuda.stream`."""
    before = Stream.current
    Stream.current = stream or before
    try:
        yield
    finally:
        Stream.current = before


@functools.cache
def _prepare_process() -> None:
    """What has to be changed once a process: the device guard and the question for a context."""
    torch._C._ensureCUDADeviceGuardSet()
    source = Path(__file__).with_name("no_context.cpp")
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/no_context.so"
        root = Path(torch.__file__).parent
        command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", f"-I{root}/include"]
        command += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"]
        command += [str(source), "-o", library, f"-L{root}/lib", "-ltorch_cpu", "-lc10"]
        subprocess.run([*command, f"-Wl,-rpath,{root}/lib"], check=True)
        ctypes.CDLL(library).no_context()
    # Else the backward pass has a thread of its own, without the fake tensors.
    torch.autograd.set_multithreading_enabled(False)


def _torch_cuda(num_gpus: int, memory_bytes: int, on_wait: OnWait) -> dict[str, object]:
    """What `torch.cuda` answers, by name."""

    def waits(name: str) -> Callable[..., None]:
        return lambda *_, **__: on_wait(name)

    stream = type("Stream", (Stream,), {"synchronize": waits("Stream.synchronize")})
    event = type("Event", (Event,), {"synchronize": waits("Event.synchronize")})
    properties = types.SimpleNamespace(
        name="Fake GPU", total_memory=memory_bytes, major=9, minor=0, multi_processor_count=132
    )
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: num_gpus,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": waits("torch.cuda.synchronize"),
        "Stream": stream,
        "Event": event,
        "stream": on_stream,
        "current_stream": lambda device=None: Stream.current,
        "default_stream": lambda device=None: MAIN_STREAM,
        "is_current_stream_capturing": lambda: False,
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "mem_get_info": lambda device=None: (memory_bytes, memory_bytes),
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: properties.name,
    }


def _fill_with_own(values: list, value: object, *_, **__) -> None:
    """Gathering objects where all ranks have the same."""
    values[:] = [value] * len(values)


def _gather_own(value: object, values: list | None = None, *_, **__) -> None:
    if values is not None:
        _fill_with_own(values, value)


@contextlib.contextmanager
def machine(
    world: int, rank: int, memory_bytes: int, on_wait: OnWait, gpus_per_node: int = 8
) -> Iterator[None]:
    """A context in which this process is `rank` of `world` processes with a GPU each."""
    _prepare_process()
    with contextlib.ExitStack() as stack:

        def replace(owner: object, **values: object) -> None:
            for name, value in values.items():
                stack.enter_context(mock.patch.object(owner, name, value))

        answers = _torch_cuda(gpus_per_node, memory_bytes, on_wait)
        replace(torch.cuda, **answers)
        replace(torch.Tensor, record_stream=lambda tensor, stream: None)
        replace(FakeTensorMode, avoid_device_init=property(lambda mode: True))
        replace(fake_tensor, init_gpu_context=lambda device: None)
        # Recomputing a layer would set it back and then reach the driver.
        before = torch._C._only_lift_cpu_tensors()
        set_only_lift_cpu_tensors = torch._C._set_only_lift_cpu_tensors
        set_only_lift_cpu_tensors(True)
        stack.callback(set_only_lift_cpu_tensors, before)
        replace(torch._C, _set_only_lift_cpu_tensors=lambda value: None)
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        stack.callback(dist.destroy_process_group)
        # This cache keeps meshes with the names of their groups, and torch 2.15 takes those of an
        # earlier world for an equal mesh.
        _clear_sharding_prop_cache()
        stack.callback(_clear_sharding_prop_cache)
        replace(dist, all_gather_object=_fill_with_own, gather_object=_gather_own)
        replace(dist, broadcast_object_list=lambda values, *_, **__: None)
        environment = {"RANK": rank, "LOCAL_RANK": rank % gpus_per_node, "WORLD_SIZE": world}
        text = {name: str(value) for name, value in environment.items()}
        stack.enter_context(mock.patch.dict("os.environ", text))
        yield
