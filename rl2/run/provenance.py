"""What the numbers of a launch depend on: its packages, its code and its machine."""

import hashlib
import platform
import re
import subprocess
from pathlib import Path

import torch

from rl2.config.engines import VLLM_PACKAGES, installed_version

PACKAGE = Path(__file__).parent.parent


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that the numbers depend on."""
    installed = {"python": platform.python_version()}
    for name in ("rl2", "torch", "transformers", "sglang") + VLLM_PACKAGES:
        release = installed_version(name)
        if release is not None:  # an engine may be absent, and rl2 in a plain checkout
            installed[name] = release
    return installed


def describe_commit() -> str | None:
    """Returns the commit of the checkout that rl2 runs from, with "+ changes" if files differ.

    None if rl2 is installed without a checkout, or git is missing.
    """
    checkout = PACKAGE.parent
    if not (checkout / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty= + changes"]
    try:
        run = subprocess.run(
            command, cwd=checkout, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip()


def describe_cpu() -> str:
    """Returns the processor's name, and the instructions that torch uses on it."""
    file = Path("/proc/cpuinfo")  # of Linux
    names = re.findall(r"model name\s*: (.*)", file.read_text() if file.exists() else "")
    return f"{next(iter(names), platform.machine())}, {torch.backends.cpu.get_cpu_capability()}"


def hash_package() -> str:
    """Returns a hash of the code of rl2."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
