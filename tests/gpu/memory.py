"""Compares the memory of training on one GPU with what the memory plan and auto say."""

import gc
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from unittest import mock

import torch
import torch.distributed as dist
from figures import Skip, record
from tools import DRY, make_model, reset_peak

from rl2.config.parse import parse
from rl2.config.schema import PPOConfig
from rl2.gpu_memory import choose, measure
from rl2.parallel.mesh import init_distributed
from rl2.tools.memory import Plan, predict, run_phases

OFFLOADS = ("actor.offload_model=true", "actor.offload_optimizer=true")
PLANNED = {  # keys of GRPO with a reference model
    "plain": (),
    "offloaded": OFFLOADS,
    "no_checkpointing": ("actor.gradient_checkpointing=false", *OFFLOADS),
    "lora": ("actor.lora_rank=16",),
}


class AllocatorMemory:
    """The memory of the GPU's allocator, with the names that the plan uses."""

    @property
    def bytes(self):
        return torch.cuda.memory_allocated()

    @property
    def peak(self):
        return torch.cuda.max_memory_allocated()

    def reset_peak(self):
        torch.cuda.reset_peak_memory_stats()


def plan():
    """Compares planned and measured peaks of every phase. The same code makes and runs the plan."""
    if DRY:
        raise Skip("tests/test_memory_plan.py does that on a CPU")
    name = make_model("qwen2.5-1.5b")
    configs = {layout: make_config(name, keys) for layout, keys in PLANNED.items()}
    plans = plan_without_gpu([*configs.values()])
    for (layout, config), planned in zip(configs.items(), plans, strict=True):
        trained, frozen = measure(config, 1)
        actor = trained["actor"]
        num_again = len(actor.layers) * bool(config.actor.gradient_checkpointing)
        estimate = frozen + actor.updating(8192, num_again)
        measured = measure_phases(config)
        share = estimate / measured.peaks["update"]
        record(**{f"{layout}_auto": f"estimated {share:.0%} of the update"})
        assert 0.95 < share, f"auto's estimate is {share:.0%} of the update"
        for phase, peak in measured.peaks.items():
            share = planned.peaks[phase] / peak
            record(**{f"{layout}_{phase}": f"{peak / 2**30:.3g} GiB, planned {share:.0%}"})
            assert 0.9 < share < 1.1, f"{phase}: the plan is {share:.0%} of it"


def make_config(name, keys) -> PPOConfig:
    config = parse(
        PPOConfig,
        [
            "data.path=unused",
            "rollout.env_path=arithmetic",
            f"actor.model_name={name}",
            "actor.max_length_per_device=8192",
            "data.max_length=1024",
            "rollout.train_sampling_params.max_new_tokens=1024",
            "kl.coef=0.01",
            "kl.type=loss",
            *keys,
        ],
    )
    choose(config, 1, None)
    return config


def plan_without_gpu(configs) -> list[Plan]:
    """Predicts in a process that sees no GPU and has no process group."""
    with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return list(pool.map(predict, configs, repeat(1)))


def measure_phases(config):
    """Runs the phases of the plan on this device, and measures them."""
    gc.collect()  # the workers of the layout before are in cycles
    reset_peak()
    device = init_distributed()
    try:
        return run_phases(config, AllocatorMemory(), device)
    finally:
        dist.destroy_process_group()
