"""test_fused.py runs this under torchrun: `fused_layouts.py MODEL` makes two updates with compiled
parts and two without, in layouts of two processes, and compares them.
"""

import sys
from functools import partial

import torch
import torch.distributed as dist
from parity import SMALL_BUDGET, make_batch, two_steps

from rl2.parallel.mesh import init_distributed

LAYOUTS = [{"tp_size": 2}, {"lora_rank": 3, "sp_size": 2}, {"lora_rank": 3, "tp_size": 2}]


def main(name):
    # Machine code takes a minute, and this is about what torch.compile gets.
    torch.compile = partial(torch.compile, backend="aot_eager")
    device = init_distributed()
    batch = make_batch()
    for layout in LAYOUTS:
        plain, compiled = (
            two_steps(
                name,
                False,
                device,
                batch,
                max_length_per_device=SMALL_BUDGET,
                gradient_checkpointing=True,
                compile=is_compiled,
                **layout,
            )
            for is_compiled in (False, True)
        )
        for column, expected in plain["scores"].items():
            if expected is not None:
                torch.testing.assert_close(compiled["scores"][column], expected, rtol=0, atol=1e-5)
        for update, expected in zip(compiled["updates"], plain["updates"], strict=True):
            norms = update["grad_norm"], expected["grad_norm"]
            assert abs(norms[0] / norms[1] - 1) < 1e-5, (layout, norms)
        for key, expected in plain["weights"].items():
            torch.testing.assert_close(compiled["weights"][key], expected, rtol=0, atol=1e-6)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
