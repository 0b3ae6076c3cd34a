"""Which engine generates, and why. A new engine is one file in engine/ and a line of `ENGINES`."""

import importlib.metadata

import torch

ENGINES = {
    "local": "rl2.engine.local:LocalEngine",
    "sglang": "rl2.engine.sglang:SGLangEngine",
}


def is_installed(package: str) -> bool:
    """Whether the Python package `package` is installed; it is not imported."""
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


# Sequences that an engine decodes at a time. A step of SGLang on a GPU hardly takes longer with
# four times as many, and those that have no room for their keys and values wait. The embedded
# engine has that room for all of them from the start.
MAX_RUNNING = 64
MAX_RUNNING_SGLANG_ON_GPU = 256


def default_max_running(name: str, device: torch.device) -> int:
    """`rollout.max_running` where it is not set; `name` is the config's `rollout.engine`."""
    if choose_engine(name)[0] == "sglang" and device.type != "cpu":
        return MAX_RUNNING_SGLANG_ON_GPU
    return MAX_RUNNING


def choose_engine(name: str) -> tuple[str, str]:
    """(key of ENGINES, reason) for the config's `rollout.engine`, which is a key or auto."""
    if name != "auto":
        return name, "as rollout.engine says"
    if not torch.cuda.is_available():
        return "local", "there is no GPU"
    if not is_installed("sglang"):
        return "local", "sglang is not installed; it generates much faster on GPUs"
    return "sglang", "there are GPUs and sglang"
