"""test_nf4.py runs this in several ranks: `nf4_layouts.py MODEL OUT` makes two SGD updates of a
model with adapters on a base in 4 bits, in every layout of this world size, and saves the results.
"""

import sys

import torch
import torch.distributed as dist
from parity import SMALL_BUDGET, make_batch, two_steps

from rl2.parallel.mesh import init_distributed

# World size -> (critic, fsdp_size, sp_size)
LAYOUTS = {
    1: [(False, 0, 1), (True, 0, 1)],
    2: [(False, 0, 1), (True, 1, 1), (False, 0, 2)],
    3: [(True, 0, 1)],
}


def run_layouts(name, device):
    """The results by (critic, fsdp_size, sp_size)."""
    results = {}
    for critic, fsdp, sp in LAYOUTS[dist.get_world_size()]:
        results[critic, fsdp, sp] = two_steps(
            name,
            critic,
            device,
            make_batch(),
            max_length_per_device=SMALL_BUDGET,
            fsdp_size=fsdp,
            sp_size=sp,
            gradient_checkpointing=1,  # of two layers
            lora_rank=3,
            quantize_base="nf4",
        )
    return results


def main(name, out):
    results = run_layouts(name, init_distributed())
    if dist.get_rank() == 0:
        torch.save(results, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
