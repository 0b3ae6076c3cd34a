"""What the processor of this machine is. Imports no torch."""

import os
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")  # of Linux


def is_intel() -> bool:
    """Whether it is one of Intel's; False where that is not known."""
    return CPUINFO.exists() and "GenuineIntel" in CPUINFO.read_text()


def ask_for_equal_rows() -> None:
    """Lets float32 products on Intel's processors give a row the same bits in every call.

    Otherwise MKL may divide the sums of a row among threads, depending on the number of rows. It
    reads the variable at its first product, so `import rl2` calls this. Other processors would fall
    back to slow kernels.
    """
    if is_intel():
        os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
