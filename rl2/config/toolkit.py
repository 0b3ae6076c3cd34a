"""What SGLang needs of the machine besides its Python packages.

It compiles kernels while it runs, with nvcc, c++ and ninja. Its memory saver is preloaded into its
processes and needs the CUDA runtime, libcudart, where the dynamic linker finds it.
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from rl2.parallel.rank import is_first_of_node

OLDEST_SGLANG = (0, 5, 15)  # earlier releases have other arguments and other messages
FIRST_WITH_FAST_HEAD = (0, 5, 18)  # its float32 head takes the product of bfloat16 factors
SECONDS_TO_COMPILE = 120.0
# What SGLang's kernels include: headers of the toolkit that must fit nvcc, and CUDA's C++ library.
TRIAL_KERNEL = """
#include <cuda_runtime.h>
#include <cuda/std/type_traits>
__global__ void kernel(float* x) { x[0] = 1; }
extern "C" int run(float* x) { kernel<<<1, 1>>>(x); return (int)cudaGetLastError(); }
"""
MAPPED_FILES = Path("/proc/self/maps")  # of this process
ADVICE = (
    "Set CUDA_HOME to the folder of a whole CUDA toolkit of torch's version (bin/nvcc, "
    "lib64/libcudart.so) and install ninja and a C++ compiler, or take an image that has them "
    "(docs/gpus.md), or set rollout.engine=local"
)


def sglang_version() -> tuple[int, ...]:
    """The three numbers of the installed release."""
    return tuple(int(number) for number in re.findall(r"\d+", version("sglang"))[:3])


def version_problems(has_float32_head: bool) -> Iterator[str]:
    """Why the installed release cannot be used.

    `has_float32_head`: it would run on a GPU with a float32 head that the user did not ask for.
    """
    installed = sglang_version()
    name = f"sglang {version('sglang')}"
    if installed < OLDEST_SGLANG:
        yield (
            f"{name} is too old: rl2 needs 0.5.15 or later. pip falls back to such a release where "
            "no newer one has wheels, as on Python 3.14: take Python 3.11 to 3.13"
        )
    elif installed < FIRST_WITH_FAST_HEAD and has_float32_head:
        yield (
            f"{name} converts the whole head to float32 in every decoding step, which may take as "
            "long as the rest of the step: pip install 'sglang>=0.5.18', or say what you want with "
            "rollout.engine_args.enable_fp32_lm_head=false (logits in bfloat16) or =true (slow)"
        )


def cuda_home() -> Path:
    """The folder of the CUDA toolkit, found as SGLang finds it."""
    configured = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if configured:
        return Path(configured)
    nvcc = shutil.which("nvcc")
    return Path(nvcc).parent.parent if nvcc else Path("/usr/local/cuda")


def toolkit_problems() -> Iterator[str]:
    """Why SGLang could not compile its kernels for this machine's GPU.

    A tiny kernel is compiled and linked as SGLang does it, which takes a few seconds: headers of
    another version, a compiler that nvcc refuses and a missing libcudart.so show in no other way.
    """
    home = cuda_home()
    nvcc = home / "bin" / "nvcc"
    compiler = os.environ.get("CXX", "c++")
    programs = {str(nvcc): nvcc.is_file(), "ninja": shutil.which("ninja")}
    programs[compiler] = shutil.which(compiler)
    missing = [program for program, found in programs.items() if not found]
    if missing:
        names = ", no ".join(missing)
        yield f"SGLang compiles kernels while it runs, but there is no {names}. {ADVICE}"
        return
    if not is_first_of_node():
        return  # one process of a node makes the trial
    error = ""
    try:
        yield from _version_problems(nvcc)
        with tempfile.TemporaryDirectory() as folder:
            error = _compile_trial(home, compiler, Path(folder))
    except (OSError, subprocess.SubprocessError) as exception:
        error = str(exception)
    if error:
        yield (
            f"SGLang compiles kernels while it runs, and a trial with {nvcc} and {compiler} "
            f"failed: {error}. {ADVICE}"
        )


def _version_problems(nvcc: Path) -> Iterator[str]:
    """Whether nvcc is of torch's major version of CUDA."""
    output = _run([str(nvcc), "--version"]).stdout
    release = re.search(r"release (\d+)\.(\d+)", output)
    major = (torch.version.cuda or "").partition(".")[0]
    if release and major and release[1] != major:
        yield (
            f"{nvcc} is of CUDA {release[1]}.{release[2]}, and torch is built for CUDA "
            f"{torch.version.cuda}: SGLang's kernels would not fit. {ADVICE}"
        )


def _compile_trial(home: Path, compiler: str, folder: Path) -> str:
    """Compiles and links a kernel. Returns the first error of the compilers, if there is one."""
    source = folder / "trial.cu"
    source.write_text(TRIAL_KERNEL)
    compiled, linked = str(folder / "trial.o"), str(folder / "trial.so")
    major, minor = torch.cuda.get_device_capability()
    flags = ["-std=c++20", "-Xcompiler", "-fPIC", f"-arch=sm_{major}{minor}"]
    steps = [
        [str(home / "bin" / "nvcc"), *flags, "-c", str(source), "-o", compiled],
        [compiler, compiled, "-shared", f"-L{home}/lib64", "-lcudart", "-o", linked],
    ]
    for step in steps:
        done = _run(step)
        if done.returncode:
            lines = [line.strip() for line in (done.stderr + done.stdout).splitlines()]
            errors = [line for line in lines if "error" in line or "cannot find" in line]
            return (errors or lines or [f"exit status {done.returncode}"])[0]
    return ""


def _run(command: list[str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=SECONDS_TO_COMPILE
    )


def cudart_folder() -> str | None:
    """The folder of the CUDA runtime that torch uses; None if there is none.

    pip installs it below site-packages, where only libraries with a path to it find it. The memory
    saver has none.
    """
    major = (torch.version.cuda or "").partition(".")[0]
    if not major:
        return None
    name = f"libcudart.so.{major}"
    if MAPPED_FILES.exists():
        for line in MAPPED_FILES.read_text().splitlines():
            mapped = Path(line.split(maxsplit=5)[-1])
            if mapped.name.startswith(name):
                return str(mapped.parent)
    packages = find_spec("nvidia")
    for folder in (packages and packages.submodule_search_locations) or []:
        for found in Path(folder).glob(f"*/lib/{name}"):
            return str(found.parent)
    return None
