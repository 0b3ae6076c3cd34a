"""Every layout and every kind of worker lives through all that a run asks of it, on fake GPUs: a
pass without a gradient, updates, weights for an engine, a checkpoint written and read.
"""

import gc
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from fake_cuda import (
    SLACK_BYTES,
    WAITS_OF_AN_UPDATE,
    fake_cuda,
    optimizer_devices,
    policy_loss,
    value_loss,
    weight_bytes,
)
from shapes import make_config
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

# (processes, keys): every pure layout, hybrid ones, and mixes. All kinds of workers live in the
# first ones, two of them in the others.
LAYOUTS: list[tuple[int, dict[str, int]]] = [
    (1, {}),
    (8, {}),
    (8, {"fsdp_size": 2, "sp_size": 2}),
    (64, {"fsdp_size": 4, "sp_size": 4, "tp_size": 2}),
]
FURTHER_LAYOUTS: list[tuple[int, dict[str, int]]] = [
    (8, {"fsdp_size": 2}),
    (8, {"sp_size": 8}),
    (8, {"tp_size": 8}),
    (8, {"sp_size": 2, "tp_size": 2}),
    (64, {}),
    (64, {"fsdp_size": 8}),
    (64, {"sp_size": 8}),
    (64, {"tp_size": 8}),
]


@dataclass
class Role:
    """A kind of worker."""

    keys: dict[str, Any] = field(default_factory=dict)
    critic: bool = False
    model: str = "small"


ROLES = {
    "actor": Role(),
    "critic": Role(critic=True),
    "windows": Role(model="small-windows"),
    "lora": Role({"lora_rank": 4}),
    "compiled": Role({"compile": True}),
}
OFFLOADED = {
    "offload_model": Role({"offload_model": True}),
    "offload_optimizer": Role({"offload_optimizer": True}),
    "offload_both": Role({"offload_model": True, "offload_optimizer": True}),
    "offload_lora": Role({"offload_model": True, "offload_optimizer": True, "lora_rank": 4}),
    "offload_critic": Role({"offload_model": True, "offload_optimizer": True}, critic=True),
}
TOKENS = 512


def whole_weights(role: Role) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the parameters of the model as Hugging Face has it."""
    auto = AutoModelForSequenceClassification if role.critic else AutoModelForCausalLM
    config = make_config(role.model)
    config.num_labels = 1
    with unset_fake_temporarily(), torch.device("meta"):
        hf = auto.from_config(config)
    return {name: tuple(parameter.shape) for name, parameter in hf.named_parameters()}


def check_devices(worker) -> None:
    """Where weights and moments are between two calls of the worker."""
    device = "cpu" if worker.config.offload_optimizer else "cuda"
    assert optimizer_devices(worker) == {"exp_avg": {device}, "exp_avg_sq": {device}}
    assert (weight_bytes(worker.model) == 0) == worker.config.offload_model


def check_weights(gpu, worker, role) -> None:
    with gpu.phase() as phase:
        shapes = {}
        for name, weight in worker.iter_full_weights(torch.bfloat16):
            assert weight.dtype == torch.bfloat16 and weight.device.type == "cuda", name
            shapes[name] = tuple(weight.shape)
            del weight
    assert shapes == whole_weights(role)
    assert abs(phase.end_bytes - phase.start_bytes) <= SLACK_BYTES


def check_inference(gpu, worker, batch, is_critic) -> None:
    with gpu.phase() as phase:
        scores = worker.infer(batch, 0.7, with_entropy=True)
    columns = [scores.values] if is_critic else [scores.logps, scores.entropy]
    for column in columns:
        assert column.shape == batch.mask.shape and column.device.type == "cpu"
    assert abs(phase.end_bytes - phase.start_bytes) <= SLACK_BYTES
    assert phase.num_waits <= len(columns), phase.describe_waits()


def check_update(gpu, worker, batch, is_critic) -> int:
    """Bytes on the GPU after an update."""
    with gpu.phase() as phase:
        result = worker.update(batch, value_loss if is_critic else policy_loss, 0.7, not is_critic)
    assert not result.skipped and result.lr > 0
    assert phase.num_waits <= WAITS_OF_AN_UPDATE, phase.describe_waits()
    return phase.end_bytes


@pytest.mark.parametrize(
    "world, keys",
    LAYOUTS + FURTHER_LAYOUTS,
    ids=lambda value: str(value).replace("'", "").replace(" ", ""),
)
@pytest.mark.parametrize(
    "roles, role_of_all",
    [(ROLES, "actor"), (OFFLOADED, "offload_both")],
    ids=["on the GPU", "in host memory"],
)
def test_a_worker_lives(world, keys, roles, role_of_all):
    names = [*roles] if (world, keys) in LAYOUTS else [role_of_all]
    if "tp_size" in keys and "compiled" in names:  # which is refused
        names.remove("compiled")
    with fake_cuda(world, rank=world - 1) as gpu:
        for name in names:
            live(gpu, roles[name], keys)
            gc.collect()
            assert gpu.bytes <= SLACK_BYTES, f"{name} leaves {gpu.bytes} bytes behind"


def live(gpu, role, keys) -> None:
    settings = {"max_length_per_device": TOKENS, **keys, **role.keys}
    worker = gpu.worker(role.model, role.critic, **settings)
    check_devices(worker)
    batch = gpu.batch(worker, TOKENS, packs=2, answers=4)
    check_inference(gpu, worker, batch, role.critic)
    steady = check_update(gpu, worker, batch, role.critic)
    check_devices(worker)
    check_weights(gpu, worker, role)
    state = worker.state_dict()
    worker.load_state_dict(state)
    del state
    check_devices(worker)
    assert check_update(gpu, worker, batch, role.critic) == steady
    check_devices(worker)


def test_a_resumed_run_has_its_state_where_the_first_run_had_it():
    """Resuming restores into a new worker, before its first update."""
    for role in ROLES["actor"], OFFLOADED["offload_both"], OFFLOADED["offload_optimizer"]:
        with fake_cuda(world=8) as gpu:
            first = gpu.worker(max_length_per_device=TOKENS, **role.keys)
            batch = gpu.batch(first, TOKENS)
            steady = check_update(gpu, first, batch, False)
            devices = optimizer_devices(first)
            del first
            gc.collect()  # models are cyclic
            resumed = gpu.worker(max_length_per_device=TOKENS, **role.keys)
            resumed.load_state_dict(resumed.state_dict())
            check_devices(resumed)
            assert optimizer_devices(resumed) == devices
            assert check_update(gpu, resumed, batch, False) == steady
            del resumed


def test_the_optimizer_of_optimizer_dir_is_where_the_step_expects_it(tmp_path):
    for role in ROLES["actor"], OFFLOADED["offload_both"], OFFLOADED["offload_optimizer"]:
        with fake_cuda(world=8) as gpu:
            worker = gpu.worker(
                optimizer_dir=str(tmp_path), max_length_per_device=TOKENS, **role.keys
            )
            check_devices(worker)
            batch = gpu.batch(worker, TOKENS)
            check_update(gpu, worker, batch, False)
            check_devices(worker)


def test_the_reference_model_is_frozen_and_in_bf16():
    for keys in {}, {"offload_model": True}, {"lora_rank": 4}:
        with fake_cuda(world=8) as gpu:
            worker = gpu.worker(max_length_per_device=TOKENS, **keys)
            batch = gpu.batch(worker, TOKENS)
            before = gpu.bytes + gpu.host_bytes
            reference = worker.reference()
            weights = sum(p.numel() for p in worker.model.parameters() if not p.requires_grad)
            grown = gpu.bytes + gpu.host_bytes - before
            if "lora_rank" in keys:
                assert weights > 0 and grown == 0  # the same weights, with the adapters off
            else:
                ours = sum(p.to_local().nbytes for p in worker.model.parameters())
                assert ours / 2 <= grown <= ours / 2 + SLACK_BYTES
            with gpu.phase() as phase:
                scores = reference.infer(batch)
            assert scores.logps.shape == batch.mask.shape
            assert abs(phase.end_bytes - phase.start_bytes) <= SLACK_BYTES
