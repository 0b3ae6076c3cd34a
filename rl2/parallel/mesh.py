"""The process group, the device mesh and the few collectives that rl2 uses."""

import atexit
import ipaddress
import os
import socket
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rl2 import cleanup

try:
    from torch.distributed import set_timeout  # type: ignore[attr-defined]
except ImportError:  # torch before 2.14
    from torch.distributed.distributed_c10d import _set_pg_timeout as set_timeout

# A single process writes its checkpoints without collectives, about which torch warns every time.
warnings.filterwarnings("ignore", "torch.distributed is disabled")
# The fake groups of a memory plan have no time-outs, as torch says for each of them.
warnings.filterwarnings("ignore", "Set timeout is now only supported")

# A rank waits this long for another one with a slow environment, in every group. If the other
# rank dies, it fails at once.
COLLECTIVE_TIMEOUT = timedelta(hours=2)
# Seconds before the interpreter ends. A gloo thread that still has to free the tensors of a
# collective takes Python's lock for that, which aborts a process when its interpreter is ending
# (pytorch issue 190489).
EXIT_PAUSE_SECONDS = 0.1
GPU_FILE = "/dev/nvidia0"  # where the driver has found one
# How torch's CPU libraries use memory. They read these at the first large tensor and product. With
# huge pages a layer has fewer page faults, of thousands. oneDNN caches what it prepares for each
# shape of a product, about 0.6 MB; a step needs few shapes, and the next step's packs have others.
CPU_MEMORY = {
    "THP_MEM_ALLOC_ENABLE": "1",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
    "LRU_CACHE_CAPACITY": "128",
}

Item = TypeVar("Item")


@dataclass
class Mesh:
    """How one worker is spread over the processes: world = dp x sp x tp, with tp innermost.

    FSDP shards what tp leaves over dp and sp together, in one copy (`fsdp` is [shard]) or in
    several copies ([replicate, shard]).
    """

    device: torch.device
    fsdp: DeviceMesh  # [shard] or [replicate, shard]
    dp_rank: int  # which part of the data this process works on
    dp_size: int
    sp: dist.ProcessGroup | None  # the processes that share our sequences; None = none do
    tp: DeviceMesh | None  # [tp], the processes that share our matrices; None = none do
    reports_metrics: bool  # true on one process of each sp x tp group: they compute the same sums


def init_distributed() -> torch.device:
    """Joins torchrun's process group and returns this process's device.

    Under plain `python` it makes a group of one process. RuntimeError if the ranks cannot meet, and
    where there is a GPU that torch cannot use.
    """
    check_gpu()
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        for name, value in CPU_MEMORY.items():
            os.environ.setdefault(name, value)
    _run_gloo_in_one_thread()
    store: dist.Store = dist.HashStore()
    rank, world_size = 0, 1
    try:
        if "RANK" in os.environ:
            store, rank, world_size = next(dist.rendezvous("env://", timeout=COLLECTIVE_TIMEOUT))
            # torchrun's store outlives its processes. Those that it has started again must not read
            # the addresses of the ones before.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            store = dist.PrefixStore(f"rl2/attempt_{attempt}", store)
            _check_own_address(store, rank, world_size)
        dist.init_process_group(
            choose_backend(),
            timeout=COLLECTIVE_TIMEOUT,
            store=store,
            rank=rank,
            world_size=world_size,
        )
    except dist.DistNetworkError as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise RuntimeError(
            f"the ranks cannot meet at MASTER_ADDR:MASTER_PORT={address}: {error}. If the port is "
            "in use by another run, choose another one; with torchrun on one machine add "
            "--standalone."
        ) from error
    cleanup.register(_end_group, at_exit=False)
    atexit.unregister(_pause)  # of an earlier run of this process
    atexit.register(_pause)
    return device


def choose_backend() -> str:
    """torch's name of the backend. Objects and host tensors travel over gloo."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def _end_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _pause() -> None:
    time.sleep(EXIT_PAUSE_SECONDS)


def check_gpu() -> None:
    """RuntimeError if CUDA does not start on a machine that has a GPU, with CUDA's reason.

    torch only warns of it, and the run would take a thousand times as long. A build of torch
    without CUDA, and an empty CUDA_VISIBLE_DEVICES, ask for the CPU.
    """
    hides_gpus = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    has_gpu = os.path.exists(GPU_FILE)
    if torch.version.cuda is None or hides_gpus or not has_gpu or torch.cuda.is_available():
        return
    try:
        torch.cuda.init()
        reason = "torch finds no GPU"
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
    raise RuntimeError(
        f"there is a GPU ({GPU_FILE}), but torch {torch.__version__} cannot use it: {reason} CUDA "
        f"{torch.version.cuda} needs a driver that is new enough (13: 580; nvidia-smi shows it): "
        "update the driver, or install a torch for an older CUDA. To run on the CPU, set "
        "CUDA_VISIBLE_DEVICES= (nothing after it)."
    )


@cache
def _run_gloo_in_one_thread() -> None:
    """Gives each gloo group that this process makes from now on one thread for its collectives.

    torch gives it two. Both assign the name of what they completed to one string of the group,
    without a lock. If it is longer than 15 letters (ALLGATHER_COALESCED, as tensors that FSDP
    shards use it), both may free its memory, and the process crashes (torch 2.11 to 2.15). torch
    ignores the options of a gloo group, so the constructor is where the number can be set.
    """
    make_group = dist.ProcessGroupGloo.__init__

    def make_group_of_one_thread(
        group, store, rank, size, timeout=COLLECTIVE_TIMEOUT, **settings
    ) -> None:
        options = group._Options()
        options._threads = 1
        options._timeout = timeout
        for name, value in settings.items():  # since torch 2.14: enable_reconfigure
            setattr(options, name, value)
        names = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
        devices = [group.create_device(interface=name) for name in names if name]
        options._devices = devices or [group.create_default_device()]
        make_group(group, store, rank, size, options)

    dist.ProcessGroupGloo.__init__ = make_group_of_one_thread  # type: ignore[assignment, method-assign]


def _check_own_address(store: dist.Store, rank: int, world_size: int) -> None:
    """RuntimeError if gloo would give other hosts an address that leads back to themselves."""
    host = socket.gethostname()
    store.set(f"host/{rank}", host)
    ends = (0, world_size - 1)  # with several hosts, they are on different ones
    has_other_hosts = any(store.get(f"host/{end}").decode() != host for end in ends)
    if not has_other_hosts or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        address = "127.0.0.1"  # gloo's choice for a name without an address
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        raise RuntimeError(
            f"the name of this host, {host}, has the address {address}, at which other hosts "
            "cannot reach it. Set GLOO_SOCKET_IFNAME on every host to the network interface that "
            "connects the hosts, for instance eth0 (`ip addr` lists them)."
        )


def make_mesh(device: torch.device, fsdp_size: int = 0, sp_size: int = 1, tp_size: int = 1) -> Mesh:
    """The mesh of one worker. All processes must call.

    `fsdp_size` processes share one copy of the model (0 = as many as there are), `sp_size`
    processes share each sequence and `tp_size` processes share each matrix. sp x tp and fsdp x tp
    divide the number of processes, which the rules of the config check.
    """
    world = dist.get_world_size()
    fsdp_size = fsdp_size or world // tp_size
    axes = {"replicate": world // (fsdp_size * tp_size), "shard": fsdp_size, "tp": tp_size}
    axes = {name: size for name, size in axes.items() if size > 1 or name == "shard"}
    mesh = _init_device_mesh(device, axes)
    group_size = sp_size * tp_size  # processes that share one part of the data
    dp_size = world // group_size
    sp = None
    if sp_size > 1:
        data_mesh = _init_device_mesh(device, {"dp": dp_size, "sp": sp_size, "tp": tp_size})
        sp = data_mesh.get_group("sp")
    return Mesh(
        device=device,
        fsdp=mesh[tuple(name for name in axes if name != "tp")],
        dp_rank=dist.get_rank() // group_size,
        dp_size=dp_size,
        sp=sp,
        tp=mesh["tp"] if tp_size > 1 else None,
        reports_metrics=dist.get_rank() % group_size == 0,
    )


def _init_device_mesh(device: torch.device, axes: dict[str, int]) -> DeviceMesh:
    """A device mesh of these axes. torch gives its groups other time-outs than the default one."""
    mesh = init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
    for group in mesh.get_all_groups():
        set_timeout(COLLECTIVE_TIMEOUT, group)
    return mesh


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, group):
        tensor = tensor.clone()
        dist.all_reduce(tensor, group=group)
        return tensor

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def differentiable_all_reduce(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The sum over `group` of tensors that are 0 where another process computes them.

    Without a group it is the tensor itself.

    Every process continues with the whole sum, so every process gets the same gradient. The
    backward pass hands it on unchanged: each process keeps the part of the cells that it computed.
    """
    return tensor if group is None else _AllReduce.apply(tensor, group)


def all_reduce_sum_(tensor: Tensor) -> Tensor:
    """The sum over all processes, in place."""
    dist.all_reduce(tensor)
    return tensor


def any_rank(flag: bool, device: torch.device) -> bool:
    """Whether the flag is set on any process. All processes must call."""
    return bool(all_reduce_sum_(torch.tensor(float(flag), device=device)))


def is_single_process() -> bool:
    """Whether there is one process only. Such a process should not send itself anything.

    gloo would copy the message with a second team of OpenMP threads. Once a process has more
    threads than cores, all of them sleep between any two operations: a rollout took twice as long.
    """
    return dist.get_world_size() == 1


def all_gather_objects(value: Item) -> list[Item]:
    """The picklable values of all processes in order of rank, on all processes, which must call."""
    if is_single_process():
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def broadcast_object(value: Item) -> Item:
    """The picklable value of rank 0, on all processes, which must call."""
    if is_single_process():
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def gather_objects(value: Item) -> list[Item]:
    """The picklable values of all processes in order of rank on rank 0; an empty list elsewhere.

    All processes must call.
    """
    if is_single_process():
        return [value]
    values = [value] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, values)
    return values or []
