"""Which engine generates, and why."""

import importlib.metadata

import torch
import torch.distributed as dist

from rl2.engine.local import LocalEngine
from rl2.engine.sglang import SGLangEngine


def installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def choose_engine(wanted: str) -> tuple[str, str]:
    """(sglang | local, why) for rollout.engine."""
    if wanted != "auto":
        return wanted, "as rollout.engine says"
    if not torch.cuda.is_available():
        return "local", "there is no GPU"
    if not installed("sglang"):
        return "local", "sglang is not installed; it generates much faster on GPUs"
    return "sglang", "there are GPUs and sglang"


def make_engine(
    section,
    model_name: str,
    dtype: torch.dtype,
    device: torch.device,
    deterministic: bool,
    seed: int,
):
    """The engine of the config's rollout `section`; all processes call."""
    kind, why = choose_engine(section.engine)
    rank = dist.get_rank()
    if rank == 0:
        print(f"rollout engine: {kind}, {why}", flush=True)
    given = (model_name, dtype, device)
    if kind == "local":
        where = {"index": rank, "count": dist.get_world_size()}
        return LocalEngine(*given, section.max_running, deterministic, **where)
    memory, arguments = section.gpu_memory_utilization, section.engine_args
    return SGLangEngine(
        *given, section.tp_size, section.max_running, deterministic, memory, arguments, seed + rank
    )
