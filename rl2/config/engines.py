"""Which engine generates, and why. A new engine is one file in engine/ and a line of `ENGINES`."""

import importlib.metadata

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
    if not is_installed("sglang"):
        return "local", "sglang is not installed; it generates much faster on GPUs"
    return "sglang", "there are GPUs and sglang"
