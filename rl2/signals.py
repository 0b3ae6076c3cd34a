"""Checkpoints that are whole or absent, exact resume, and a stop that saves."""

import os
import signal

import torch
import torch.distributed as dist

from rl2.parallel.mesh import any_rank


class StopSignal:
    """Turns Ctrl-C and SIGTERM into a wish that the loop grants at the end of its step, on all processes together."""

    def __init__(self, device: torch.device):
        self.device, self.wanted = device, False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number, frame):
        # torchrun passes on a signal that the terminal has already sent to all, so only a lone process may be told twice.
        if self.wanted and "TORCHELASTIC_RUN_ID" not in os.environ:
            raise KeyboardInterrupt
        if not self.wanted and dist.get_rank() == 0:
            print(
                "\nstopping: this step will be finished and saved. If torchrun's patience (30 s) ends first,"
                " the last checkpoint stands.",
                flush=True,
            )
        self.wanted = True

    def __bool__(self) -> bool:
        """Whether any process was told to stop. All processes must ask."""
        return any_rank(self.wanted, self.device)
