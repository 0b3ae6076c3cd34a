"""Runs the phases of small jobs on the CPU for real and on a device without memory, and writes the
bytes of both: `launch.py WORLD measured_memory.py MODEL MODEL_IN_4_BITS OUTPUT.json`.
"""

import json
import sys
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from configs import resolved
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from rl2.config.schema import DPOConfig, PPOConfig, RMConfig, SFTConfig
from rl2.parallel.mesh import init_distributed
from rl2.parallel.planned_device import INDEXING, MemoryTracker, PlannedDevice, positions
from rl2.tools import planned_process
from rl2.tools.memory import Plan, predict, run_phases

LENGTH = 512  # tokens of a micro-batch
NF4 = {"dtype": "bfloat16", "lora_rank": 4, "quantize_base": "nf4"}  # as on a GPU
# World size -> job -> (config, keys of the actor).
JOBS = {
    1: {
        "ppo with critic and reference": (PPOConfig, {}),
        "sft without checkpointing": (SFTConfig, {"gradient_checkpointing": False}),
        "dpo with adapters": (DPOConfig, {"lora_rank": 4}),
        "pairs of two rows": (RMConfig, {}),
        "dpo of 4 bits": (DPOConfig, NF4),
    },
    2: {
        "fsdp": (SFTConfig, {}),
        "two copies": (SFTConfig, {"fsdp_size": 1}),
        "ring": (SFTConfig, {"sp_size": 2}),
        "tensor parallel": (SFTConfig, {"tp_size": 2}),
        "ppo with muon": (PPOConfig, {"optimizer": "muon"}),
        "sft of 4 bits": (SFTConfig, {**NF4, "gradient_checkpointing": False}),
    },
}


class PlannedCPU(PlannedDevice):
    """A device without memory, with the choices of a CPU: it may use host memory directly."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in INDEXING:
            indexed, indices, *values = args
            args = (indexed, positions(indices), *values)
        if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(args)):
            args = tree_map_only(Tensor, self.from_host, args)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def from_host(self, tensor):
        return tensor if isinstance(tensor, FakeTensor | DTensor) else self.empty_like(tensor)


def make_config(kind: type, model: str, keys: dict):
    config = kind()
    sections = [config.critic if kind is RMConfig else config.actor]
    config.data.max_length = LENGTH // (2 if kind is RMConfig else 4)
    if kind is PPOConfig:
        config.adv.estimator = "gae"
        config.kl.coef = 0.1
        config.kl.type = "loss"
        config.rollout.train_sampling_params.max_new_tokens = LENGTH // 4
        sections.append(config.critic)
    for section in sections:
        section.model_name = model
        section.max_length_per_device = LENGTH
        section.gradient_checkpointing = True
        for key, value in keys.items():
            setattr(section, key, value)
    return resolved(config)


def bytes_of(plan: Plan) -> dict[str, int]:
    """Bytes by phase. On a CPU `load` has the weights that rank 0 reads too, so it is left out."""
    peaks = {phase: size for phase, size in plan.peaks.items() if phase != "load"}
    return {**peaks, "steady": plan.steady}


def main(model: str, model_in_4_bits: str, output: str) -> None:
    device = init_distributed()
    rank = dist.get_rank()
    world = dist.get_world_size()
    measured = {}
    configs = {}
    for job, (kind, keys) in JOBS[world].items():
        name = model_in_4_bits if "quantize_base" in keys else model
        configs[job] = make_config(kind, name, keys)
        with MemoryTracker(device) as memory:
            measured[job] = bytes_of(run_phases(configs[job], memory, device))
    dist.destroy_process_group()
    if rank > 0:
        return
    results = {}
    for job, config in configs.items():
        with (
            mock.patch.object(planned_process, "PlannedDevice", PlannedCPU),
            mock.patch("rl2.parallel.device.PLANNED_DEVICE", None),
        ):
            predicted = bytes_of(predict(config, world))
        results[job] = {"predicted": predicted, "measured": measured[job]}
    Path(output).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
