"""test_compile.py runs this under torchrun: `compile_layouts.py MODEL` makes two updates with
compiled layers and two without, in layouts of two processes, and compares them.
"""

import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
from parity import SMALL_BUDGET, assert_equal_steps, make_batch, two_steps
from torch._dynamo.testing import CompileCounterWithBackend

from rl2.parallel.mesh import init_distributed

LAYOUTS = [{}, {"lora_rank": 3, "sp_size": 2}]
# Of one layout: frames of a layer around its attention, with and without a gradient, for one token
# and for more. A pack of another length has none of its own.
MOST_FRAMES = 24


def main(name):
    # Machine code takes a minute, and this is about what torch.compile gets.
    counter = CompileCounterWithBackend("aot_eager")
    torch.compile = partial(torch.compile, backend=counter)
    device = init_distributed()
    batch = make_batch()
    steps = partial(
        two_steps,
        name,
        False,
        device,
        batch,
        max_length_per_device=SMALL_BUDGET,
        gradient_checkpointing=True,
    )
    for layout in LAYOUTS:
        plain = steps(**layout)
        counter.clear()
        compiled = steps(compile=True, **layout)
        assert 0 < counter.frame_count <= MOST_FRAMES, (layout, counter.frame_count)
        print(layout, counter.frame_count, flush=True)
        assert_equal_steps(compiled, plain, layout, 1e-5, 1e-5)
    with pytest.raises(ValueError, match="compile=true does not work with tp_size=2"):
        steps(compile=True, tp_size=2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
