"""The paths of GPUs without one: every layout and every kind of worker lives through all that a run
asks of it, on a device without memory. What is counted: bytes, copies, and waits of the host.
"""

import gc
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from parity import policy_loss, value_loss
from planned_worker import SLACK_BYTES, WAITS_OF_AN_UPDATE, Watch, fake_gpu
from shapes import make_config
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rl2.batch import Candidates
from rl2.engine.cache import DenseKVCache, KVCache
from rl2.parallel import offload
from rl2.parallel.device import PLANNED_DEVICE, copy_to_device
from rl2.tools.planned_process import planned_process

# (processes, keys) in which all kinds of workers live.
LAYOUTS: list[tuple[int, dict[str, int]]] = [
    (8, {"fsdp_size": 2, "sp_size": 2}),
    (1, {}),
    (8, {}),
    (64, {"fsdp_size": 4, "sp_size": 4, "tp_size": 2}),
]
OFFLOAD = {"offload_model": True, "offload_optimizer": True}
# What differs from the defaults of FakeGpu.worker.
ROLES: dict[str, dict[str, Any]] = {
    "actor": {},
    "critic": {"critic": True},
    "windows": {"name": "small-windows"},
    "lora": {"lora_rank": 4},
    "compiled": {"compile": True},
    "offload_model": {"offload_model": True},
    "offload_optimizer": {"offload_optimizer": True},
    "offload_both": OFFLOAD,
    "offload_lora": {**OFFLOAD, "lora_rank": 4},
    "offload_critic": {**OFFLOAD, "critic": True},
    "exported": {"optimizer_dir": "."},
    "offload_exported": {**OFFLOAD, "optimizer_dir": "."},
}
BY_DAY = ("critic", "offload_lora", "offload_exported")  # in the first layout
TOKENS = 512


def list_lives():
    """(role, processes, layout) of every worker that lives."""
    for world, keys in LAYOUTS:
        layout = "-".join(f"{key}={value}" for key, value in keys.items())
        for name in ROLES:
            if name == "compiled" and "tp_size" in keys:
                continue  # which is refused
            by_day = name in BY_DAY and (world, keys) == LAYOUTS[0]
            marks = [] if by_day else [pytest.mark.nightly]
            yield pytest.param(name, world, keys, marks=marks, id=f"{name}-{world}-{layout}")


@pytest.mark.parametrize("name, world, keys", [*list_lives()])
def test_a_worker_lives(name, world, keys):
    with fake_gpu(world, rank=world - 1) as gpu:
        live(gpu, ROLES[name], keys)
        gc.collect()  # models are cyclic
        assert gpu.bytes <= SLACK_BYTES, f"{gpu.bytes} bytes are left behind"


def live(gpu, role, keys):
    is_critic = role.get("critic", False)
    worker = gpu.worker(max_length_per_device=TOKENS, **keys, **role)
    check_devices(worker)
    batch = gpu.batch(worker, TOKENS, packs=2, answers=4)
    check_inference(gpu, worker, batch, is_critic)
    check_checkpoint(gpu, worker)
    steady = check_update(gpu, worker, batch, is_critic)
    check_devices(worker)
    check_weights(gpu, worker, role.get("name", "small"), is_critic)
    check_checkpoint(gpu, worker)
    assert check_update(gpu, worker, batch, is_critic) == steady
    check_devices(worker)


def check_devices(worker):
    """Where weights and moments are between two calls of the worker."""
    device = torch.device("cpu") if worker.config.offload_optimizer else PLANNED_DEVICE
    moments = worker.optimizer.moments.values()
    assert {shard.device for shard_of in moments for shard in shard_of.values()} == {device}
    storages = [p._local_tensor.untyped_storage() for p in worker.model.parameters()]
    on_device = sum(storage.nbytes() for storage in storages)  # none of a model in host memory
    assert (on_device == 0) == worker.config.offload_model


def check_inference(gpu, worker, batch, is_critic):
    before = gpu.bytes
    with Watch() as seen:
        scores = worker.score(batch, 0.7, with_entropy=True)
    columns = [scores.values] if is_critic else [scores.logps, scores.entropy]
    for column in columns:
        assert column.shape == batch.mask.shape and column.device == torch.device("cpu")
    assert gpu.bytes == before
    assert seen.waits.total() <= len(columns), seen.waits


def check_update(gpu, worker, batch, is_critic):
    """Bytes on the GPU after an update."""
    with Watch() as seen:
        result = worker.update(batch, value_loss if is_critic else policy_loss, 0.7, not is_critic)
    assert not result.skipped and result.lr > 0
    assert seen.waits.total() <= WAITS_OF_AN_UPDATE, seen.waits
    return gpu.bytes


def check_checkpoint(gpu, worker):
    """A state that is saved and restored is where it was.

    In host memory it takes no memory of the GPU, and the host waits for the copies of the moments
    before it reads them.
    """
    gpu.memory.reset_peak()
    before = gpu.bytes
    with Watch() as seen:
        state = worker.state_dict()
    worker.load_state_dict(state)
    check_devices(worker)
    if worker.config.offload_optimizer:
        assert any(wait.startswith("synchronize") for wait in seen.waits)
        assert gpu.memory.peak <= before + SLACK_BYTES


def check_weights(gpu, worker, model, is_critic):
    """They are those of the model as Hugging Face has it."""
    auto = AutoModelForSequenceClassification if is_critic else AutoModelForCausalLM
    config = make_config(model, num_labels=1)
    with torch.device("meta"):
        hf = auto.from_config(config)
    before = gpu.bytes
    shapes = {}
    for name, weight in worker.iter_full_weights(torch.bfloat16):
        assert weight.dtype == torch.bfloat16 and weight.device == PLANNED_DEVICE, name
        shapes[name] = weight.shape
        del weight
    assert shapes == {name: parameter.shape for name, parameter in hf.named_parameters()}
    assert gpu.bytes == before


def test_the_host_does_not_wait_for_candidates():
    """What top_p left to draw from: their sets are of any size."""
    with fake_gpu() as gpu:
        worker = gpu.worker(max_length_per_device=TOKENS)
        batch = gpu.batch(worker, TOKENS, packs=2, answers=4)
        counts = batch.mask.int() * 3
        ids = [torch.arange(total, dtype=torch.int32) for total in counts.sum(1).tolist()]
        check_update(gpu, worker, replace(batch, candidates=Candidates(counts, ids)), False)


@pytest.mark.parametrize("keys", [{}, {"offload_model": True}, {"lora_rank": 4}])
def test_the_reference_model_is_frozen_and_in_bf16(keys):
    with fake_gpu(8) as gpu:
        worker = gpu.worker(max_length_per_device=TOKENS, **keys)
        batch = gpu.batch(worker, TOKENS)
        before = gpu.bytes + gpu.host.bytes
        reference = worker.reference()
        grown = gpu.bytes + gpu.host.bytes - before
        if "lora_rank" in keys:
            assert grown == 0  # the same weights, with the adapters off
        else:
            ours = sum(p.to_local().nbytes for p in worker.model.parameters())
            assert ours / 2 <= grown <= ours / 2 + SLACK_BYTES
        before = gpu.bytes
        scores = reference.score(batch)
        assert scores.logps.shape == batch.mask.shape and gpu.bytes == before


# Host memory


def test_copies_to_a_gpu_come_from_page_locked_memory():
    """All other tests count on it: they see the copies of these functions, and not the memory."""
    locked, copied = [], []

    def pin_memory(tensor):
        locked.append(tensor.clone())
        return locked[-1]

    def to(tensor, *arguments, **options):
        copied.append((tensor, arguments, options))

    device = torch.device("cuda", 0)
    with (
        FakeTensorMode(),
        mock.patch.object(torch.Tensor, "pin_memory", pin_memory),
        mock.patch.object(offload, "_pin", locked.append),
    ):
        with mock.patch.object(torch.Tensor, "to", to):
            copy_to_device(torch.empty(8), device)
        [(source, arguments, options)] = copied
        assert source is locked.pop() and arguments == (device,) and options["non_blocking"]
        likes = [torch.empty(3, 5, device=device), torch.empty(7, device=device)]
        tensors = offload.empty_on_host(likes)
        [block] = locked
        for tensor, like in zip(tensors, likes, strict=True):
            assert tensor.device.type == "cpu" and tensor.shape == like.shape
            assert tensor.untyped_storage()._cdata == block.untyped_storage()._cdata


@pytest.mark.parametrize("keys", [{}, {"lora_rank": 4}])
def test_only_what_changed_is_copied_back_and_nothing_waits(keys):
    """Of a model with adapters, these alone."""
    with fake_gpu() as gpu:
        worker = gpu.worker(max_length_per_device=TOKENS, **OFFLOAD, **keys)
        batch = gpu.batch(worker, TOKENS, packs=2)
        size = sum(p.numel() * p.element_size() for p in worker.model.parameters())
        trained = sum(4 * parameter.numel() for parameter in worker.trained_parameters.values())
        assert gpu.bytes < SLACK_BYTES
        for _ in range(2):
            with Watch() as seen:
                worker.score(batch)
            assert seen.copied["to host"] == batch.mask.numel() * 4
            assert seen.waits.total() == 1, seen.waits
            with Watch() as seen:
                worker.update(batch, policy_loss, with_entropy=True)
            assert seen.waits.total() <= WAITS_OF_AN_UPDATE, seen.waits
            assert 3 * trained <= seen.copied["to host"] < 3 * trained + 100
            # The moments come while the step goes on.
            assert seen.beside == {"to device": 2 * trained}
            with Watch() as seen:
                for _, weight in worker.iter_full_weights(torch.bfloat16):
                    del weight
            assert seen.copied == {"to device": size} and not seen.waits
            assert gpu.bytes < SLACK_BYTES


def test_ranks_that_do_not_read_the_model_have_no_host_copy_of_it():
    with fake_gpu(8, rank=1) as gpu:
        with Watch() as seen:
            worker = gpu.worker()
        largest = max(4 * parameter.numel() for parameter in worker.model.parameters())
        # accelerate makes one weight after the other, and drops it.
        assert gpu.host.peak <= largest + SLACK_BYTES
    assert seen.copied["to device"] < SLACK_BYTES


# The order of work


def test_a_layer_is_gathered_before_the_one_in_front_of_it_computes():
    with fake_gpu(8) as gpu:
        worker = gpu.worker(max_length_per_device=256)
        batch = gpu.batch(worker, tokens=256)
        worker.score(batch)
        with Watch() as seen:
            worker.score(batch)
    names = {"flash_attention": "attention", "allgather": "gather"}
    order = [event for work in seen.work for name, event in names.items() if name in work]
    # The embedding and the head, and both layers; then each layer's attention.
    assert order == ["gather", "gather", "gather", "attention", "attention"]


# The cache of the embedded engine

# Questions and views.
NO_KERNELS = {"device", "view", "_unsafe_view", "select", "slice", "expand", "transpose", "permute"}
NO_KERNELS |= {"unsqueeze", "t", "detach", "alias", "split", "unflatten", "flatten", "reshape"}


def decode(cache):
    """The work of a step's attention in four layers, after one that made the memory."""
    positions = torch.full((64,), 1000, device=PLANNED_DEVICE)
    shapes = ((64, 12, 1, 128), (64, 2, 1, 128), (64, 2, 1, 128))
    heads = [torch.randn(shape, device=PLANNED_DEVICE, dtype=torch.bfloat16) for shape in shapes]
    for step in range(2):
        with Watch() as seen:
            cache.begin_step(positions + step, 1000 + step)
            for layer in range(4):
                out = cache(SimpleNamespace(layer_idx=layer), *heads, 0.1)
        assert out.shape == (64, 1, 12, 128) and out.device == PLANNED_DEVICE
        assert out.dtype == torch.bfloat16
    return seen


def test_a_layer_takes_few_kernels_and_never_waits():
    counts = {}
    with planned_process(1), torch.inference_mode():
        for kind in (DenseKVCache, KVCache):
            seen = decode(kind(64))
            counts[kind] = sum(name not in NO_KERNELS for name in seen.work) / 4
            assert not seen.waits, seen.waits
    # The writes of keys and of values, the attention, and a share of what all layers need.
    assert counts[DenseKVCache] < 6 and counts[KVCache] > 60, counts
