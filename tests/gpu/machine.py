"""What the machine is: its hardware, and whether torch and SGLang can use it."""

import importlib
import os
import shutil
import subprocess

import psutil
import torch
from figures import record
from tools import DEVICE, DRY, need

from rl2.config.engines import cuda_home, installation_problems
from rl2.engine.sglang import cudart_folder

LEAST_SHM_GIB = 1.0  # NCCL and the handles of weights live there; Docker's default is 64 MiB


def facts():
    """Records what later failures may come from. Fails if the driver is too old, if /dev/shm is
    too small, or if a module of rl2 or of the tests does not import.
    """
    shm_free = shutil.disk_usage("/dev/shm").free / 2**30
    record(
        cpus=len(os.sched_getaffinity(0)),
        ram_gib=psutil.virtual_memory().total / 2**30,
        disk_free_gib=shutil.disk_usage(os.environ["RL2_GPU_MODELS"]).free / 2**30,
        shm_free_gib=shm_free,
        cuda_of_torch=str(torch.version.cuda),
        compilers=" ".join(filter(shutil.which, ("nvcc", "ninja", "c++"))) or "none",
    )
    for name in ("operators", "training", "memory", "engines", "runs", "rl2.trainer.ppo"):
        importlib.import_module(name)
    assert DRY or torch.cuda.is_available(), "the driver is too old for torch"
    assert shm_free >= LEAST_SHM_GIB, f"/dev/shm has {shm_free:.2f} GiB: --shm-size=16g, --ipc=host"


def sglang_facts():
    """Tries what SGLang needs of the machine: its release, compilers, and libcudart for the
    preload of its memory saver.
    """
    need("sglang")
    folder = cudart_folder()
    record(cuda_home=str(cuda_home()), cudart_folder=str(folder))
    problems = [*installation_problems("sglang")]
    if not DRY:
        problems += _preload_problems(folder)
    assert not problems, "; ".join(problems)


def _preload_problems(folder: str | None) -> list[str]:
    """Starts a program with the memory saver's library, as SGLang starts its processes."""
    from torch_memory_saver import configure_subprocess

    folders = [*filter(None, [os.environ.get("LD_LIBRARY_PATH"), folder])]
    with configure_subprocess():  # sets LD_PRELOAD
        env = os.environ | {"LD_LIBRARY_PATH": os.pathsep.join(folders)}
        done = subprocess.run(["/bin/true"], env=env, capture_output=True, text=True)
    # The linker only warns where it cannot open the library itself.
    return [] if done.returncode == 0 and not done.stderr else [f"preload: {done.stderr.strip()}"]


def device():
    """Records the GPU. Calls the flash operator with its documented shapes, because its signature
    is what a new torch version is most likely to change.
    """
    from rl2.attention.kernels import Block, forward_block

    if not DRY:
        properties = torch.cuda.get_device_properties(0)
        record(
            name=properties.name,
            memory_gib=properties.total_memory / 2**30,
            capability=f"{properties.major}.{properties.minor}",
        )
    q = torch.randn(8, 4, 64, device=DEVICE, dtype=torch.bfloat16)
    out, lse = forward_block(q, q[:, :2], q[:, :2], Block([0, 3, 8], [0, 3, 8], True), 0.125)
    assert out.shape == (8, 4, 64) and lse.shape == (8, 4) and lse.dtype == torch.float32
