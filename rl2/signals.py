"""How a run ends early: a stop that saves, and errors that are one message."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from rl2.parallel.mesh import any_rank

PACKAGE = Path(__file__).parent
SECONDS_BEFORE_OTHER_RANKS_PRINT = 5.0


class StopSignal:
    """Turns Ctrl-C and SIGTERM into a request that the loop reads at the end of its step."""

    def __init__(self, device: torch.device):
        self.device = device
        self.is_requested_here = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Under torchrun one Ctrl-C arrives twice: from the terminal, which signals all processes,
        # and from torchrun. Only a lone process can know that the user pressed it again.
        if self.is_requested_here and "TORCHELASTIC_RUN_ID" not in os.environ:
            raise KeyboardInterrupt
        if not self.is_requested_here and dist.get_rank() == 0:
            print(
                "\nstopping: this step will be finished and saved. torchrun waits 30 s for that; "
                "after them the last checkpoint stands.",
                flush=True,
            )
        self.is_requested_here = True

    def is_requested_anywhere(self) -> bool:
        """Whether any process was asked to stop. All processes must call."""
        return any_rank(self.is_requested_here, self.device)


@contextmanager
def user_errors() -> Iterator[None]:
    """Shows an error that a user can mend as one message, and ends the process with status 1.

    These are errors that rl2 itself raises, and files and hubs that are out of reach. Any other
    error keeps its traceback.
    """
    try:
        yield
    except (ValueError, RuntimeError, OSError, SafetensorError) as error:
        message = _user_message(error)
        if message is None:
            raise
        rank = os.environ.get("RANK", "0")
        place = "" if rank == "0" else f" on rank {rank}"
        if rank != "0":
            # Most errors meet all ranks. The first one prints, and torchrun ends the others.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(SECONDS_BEFORE_OTHER_RANKS_PRINT)
        print(f"error{place}: {message}", file=sys.stderr, flush=True)
        sys.exit(1)


def _user_message(error: Exception) -> str | None:
    """What to print of the error; None if it is a fault of the program."""
    if "by peer" in str(error):  # gloo's connection to a process that is gone
        return (
            "another process ended; if it printed nothing above, it was killed, perhaps for its "
            "memory"
        )
    last_frame = traceback.extract_tb(error.__traceback__)[-1]
    is_ours = PACKAGE in Path(last_frame.filename).parents
    if is_ours or isinstance(error, OSError | SafetensorError):
        return str(error)
    return None
