"""Measures the memory of training on one GPU, beside what the memory plan says."""

import gc
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from unittest import mock

import torch
import torch.distributed as dist
from figures import Steps, record
from tools import (
    DRY,
    allocated_gib,
    make_batch,
    make_model,
    peak_gib,
    policy_loss,
    reset_peak,
    synchronize,
    worker_config,
)

from rl2.config.parse import parse
from rl2.config.schema import PPOConfig
from rl2.parallel.mesh import init_distributed
from rl2.tools.plan import Plan, predict, run_phases
from rl2.tools.planned_device import MemoryTracker
from rl2.worker import Worker

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
    name = make_model("qwen2.5-1.5b")
    steps = Steps()
    for layout, keys in list(PLANNED.items())[: 1 if DRY else None]:
        config = parse(
            PPOConfig,
            [
                "data.path=unused",
                "rollout.env_path=arithmetic",
                f"actor.model_name={name}",
                f"actor.max_length_per_device={64 if DRY else 8192}",
                f"data.max_length={16 if DRY else 1024}",
                f"rollout.train_sampling_params.max_new_tokens={16 if DRY else 1024}",
                "kl.coef=0.01",
                "kl.type=loss",
                *keys,
            ],
        )
        planned = plan_without_gpu(config)
        measured = measure_phases(config)
        with steps.step(layout):
            for phase, peak in measured.peaks.items():
                share = planned.peaks[phase] / peak
                record(**{f"{layout}_{phase}": f"{peak / 2**30:.3g} GiB, planned {share:.0%}"})
                # The plan is for a GPU, which chooses other kernels and dtypes than a CPU.
                assert DRY or 0.9 < share < 1.1, f"{phase}: the plan is {share:.0%} of it"
    steps.finish()


def plan_without_gpu(config) -> Plan:
    """Predicts in a process that sees no GPU and has no process group."""
    with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(predict, config, 1).result()


def measure_phases(config):
    """Runs the phases of the plan on this device, and measures them."""
    gc.collect()  # the workers of the layout before are in cycles
    reset_peak()
    device = init_distributed()
    try:
        if not DRY:
            return run_phases(config, AllocatorMemory(), device)
        with MemoryTracker(device) as memory:
            return run_phases(config, memory, device)
    finally:
        dist.destroy_process_group()


def memory_7b():
    """Measures the memory and time of an update of a 7B model with model and optimizer offloaded.

    The weights are then read as for a sync. docs/gpus.md has these figures.
    """
    length = 64 if DRY else 8192
    name = make_model("qwen2.5-7b")
    device = init_distributed()
    config = worker_config(
        name,
        gradient_checkpointing=True,
        max_length_per_device=length,
        share_prompts=False,
        offload_model=True,
        offload_optimizer=True,
    )
    actor = Worker(config, device, num_updates=10)
    # Two sequences, each of which fills a micro-batch.
    prompt = length // 8
    vocabulary = actor.model.hf.config.vocab_size
    batch = make_batch(vocabulary, 2, 1, prompt, length - prompt, seed=1)
    num_parameters = sum(parameter.numel() for parameter in actor.model.parameters())
    record(parameters=f"{num_parameters / 1e9:.2f}e9")

    def read_weights():
        for _ in actor.iter_full_weights(actor.dtype):
            pass

    phases = {
        "infer": lambda: actor.infer(batch),
        "first_update": lambda: actor.update(batch, policy_loss),
        "update": lambda: actor.update(batch, policy_loss),
        "sync": read_weights,
    }
    peaks = {}
    for phase, run in phases.items():
        record(**{f"idle_before_{phase}_gib": allocated_gib()})
        reset_peak()
        start = time.perf_counter()
        run()
        synchronize()
        peaks[phase] = peak_gib()
        record(**{f"{phase}_seconds": time.perf_counter() - start, f"{phase}_gib": peaks[phase]})
    assert DRY or max(peaks.values()) < 74, "it would not fit into 80 GB beside a sleeping engine"
    assert DRY or peaks["sync"] < 8, "a sync needs more than an engine that is awake leaves"
