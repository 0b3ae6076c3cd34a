"""Compares models whose layers are compiled with the same models as they are."""

import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
from common import launch, make_model
from parity import SMALL_BUDGET, assert_equal_steps, make_batch, two_steps
from torch._dynamo.testing import CompileCounterWithBackend

from rl2.parallel.mesh import init_distributed

LAYOUTS = [{}, {"lora_rank": 3, "sp_size": 2}]
# Of one layout: a layer is one frame, with and without a gradient, for one token and for more. A
# pack of another length has none of its own.
MOST_FRAMES = 4


def test_layouts_train_the_same_with_compiled_layers(tmp_path):
    """FSDP, a ring with adapters, gradient checkpointing, packs of many lengths."""
    launch(2, __file__, make_model(tmp_path, "qwen3", tied=False))


if __name__ == "__main__":  # a process of the test
    # Machine code takes a minute, and this is about what torch.compile gets.
    counter = CompileCounterWithBackend("aot_eager")
    torch.compile = partial(torch.compile, backend=counter)
    settings = {"max_length_per_device": SMALL_BUDGET, "gradient_checkpointing": 1}
    arguments = (sys.argv[1], False, init_distributed(), make_batch())
    for layout in LAYOUTS:
        plain = two_steps(*arguments, **settings, **layout)
        counter.clear()
        compiled = two_steps(*arguments, compile=True, **settings, **layout)
        assert 0 < counter.frame_count <= MOST_FRAMES, (layout, counter.frame_count)
        assert_equal_steps(compiled, plain, layout, 1e-5, 1e-5)
    with pytest.raises(ValueError, match="compile=true does not work with tp_size=2"):
        two_steps(*arguments, compile=True, tp_size=2)
    dist.destroy_process_group()
