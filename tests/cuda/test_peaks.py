"""The peak of memory on a GPU in each phase, and how often the host waits for the GPU, for shapes
of real models.

The figures are what the code needed when they were written down, and the bound is tight on both
sides: a change that needs less memory writes its new figures here, one that needs more must say
why.
"""

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from fake_cuda import WAITS_OF_AN_UPDATE, fake_cuda, policy_loss
from tracker import Phase

from rl2.worker import Worker

TOLERANCE = 0.02


@dataclass
class Case:
    """A model on `world` GPUs, micro-batches of `tokens`. The peaks are in GB, 1e9 bytes."""

    model: str
    world: int
    peaks: dict[str, float]
    keys: dict[str, Any] = field(default_factory=dict)
    tokens: int = 8192


def peaks(load, infer, update, step, sync, steady, host=0.0) -> dict[str, float]:
    return vars()


CASES = {
    "0.6b-1": Case("qwen3-0.6b", 1, peaks(7.15, 8.57, 12.59, 9.54, 7.46, 7.15)),
    "1.5b-1": Case("qwen2.5-1.5b", 1, peaks(18.52, 20.09, 28.18, 24.71, 18.99, 18.52)),
    "7b-8": Case("qwen2.5-7b", 8, peaks(11.42, 16.77, 25.55, 15.24, 13.74, 11.42)),
    "7b-64": Case("qwen2.5-7b", 64, peaks(2.69, 6.78, 12.22, 1.90, 3.63, 1.43)),
    # `host` is all of the weights and both moments, 12 bytes a parameter.
    "7b-1-offloaded": Case(
        "qwen2.5-7b",
        1,
        peaks(34.82, 34.15, 70.78, 63.09, 3.27, 0.0, host=91.39),
        {"offload_model": True, "offload_optimizer": True},
    ),
}


@contextmanager
def step_apart(gpu, steps):
    """A context in which the optimizer's step is a phase of its own, appended to `steps`."""
    step = Worker._step

    def counted(worker, skip):
        with gpu.phase() as phase:
            result = step(worker, skip)
        steps.append(phase)
        return result

    with mock.patch.object(Worker, "_step", counted):
        yield


def run(case: Case) -> tuple[dict[str, float], Phase]:
    """The peaks, and the update of two micro-batches whose rows share prompts."""
    with fake_cuda(case.world) as gpu:
        with gpu.phase() as load:
            worker = gpu.worker(case.model, max_length_per_device=case.tokens, **case.keys)
        batch = gpu.batch(worker, case.tokens, packs=2, answers=8)
        with gpu.phase() as infer:
            worker.infer(batch)
        steps = []
        with step_apart(gpu, steps):
            worker.update(batch, policy_loss)
        # The optimizer's state is there from now on.
        with gpu.phase() as update:
            worker.update(batch, policy_loss)
        with gpu.phase() as sync:
            for _, weight in worker.iter_full_weights(torch.bfloat16):
                del weight
    counts = {
        "load": load.peak_bytes,
        "infer": infer.peak_bytes,
        "update": update.peak_bytes,
        "step": steps[0].peak_bytes,
        "sync": sync.peak_bytes,
        "steady": sync.end_bytes,
        "host": sync.host_end_bytes,
    }
    return {name: round(count / 1e9, 2) for name, count in counts.items()}, update


@pytest.mark.parametrize("name", CASES)
def test_peaks_by_phase(name):
    measured, update = run(CASES[name])
    print(name, measured, update.num_waits, dict(update.copies))
    assert update.num_waits <= WAITS_OF_AN_UPDATE, update.describe_waits()
    assert measured == pytest.approx(CASES[name].peaks, rel=TOLERANCE, abs=0.05)
