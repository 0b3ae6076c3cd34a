"""The kernels of bitsandbytes, a package that may not be installed."""

import logging
from typing import Any

# Without its warnings that other packages are missing, which rl2 does not need. peft imports it.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def load_kernels() -> Any:
    """The module bitsandbytes.functional."""
    import bitsandbytes.functional

    return bitsandbytes.functional
