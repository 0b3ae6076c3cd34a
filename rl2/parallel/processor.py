"""What the processor of this machine is. Imports no torch."""

import os
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")  # of Linux
FIRST_ENTRY_BYTES = 1000  # about one processor; the file has an entry for each, perhaps hundreds


def is_intel() -> bool:
    """Whether it is one of Intel's; False where that is not known."""
    if not CPUINFO.exists():
        return False
    with CPUINFO.open() as file:
        return "GenuineIntel" in file.read(FIRST_ENTRY_BYTES)


def ask_for_equal_rows() -> None:
    """Lets float32 products on Intel's processors give a row the same bits in every call.

    Otherwise MKL may divide the sums of a row among threads, depending on the number of rows. It
    reads the variable at its first product, so `import rl2` calls this. Other processors would fall
    back to slow kernels.
    """
    if is_intel():
        os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
