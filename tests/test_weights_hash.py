"""The hash of a worker's weights: every bit and every place counts, the layout does not."""

import random

import torch
from parity import worker_config

from rl2.parallel.offload import WeightMemory
from rl2.run.weights_hash import WORDS_AT_A_TIME, hash_weights
from rl2.worker import Worker


def hash_of(worker):
    return hash_weights({"actor": worker})["actor"]


def test_each_changed_bit_and_each_exchange_changes_the_hash(model, device, monkeypatch):
    worker = Worker(worker_config(model, lr=1e-3), device, False, 8)
    expected = hash_of(worker)
    weights = {name: p._local_tensor for name, p in worker.trained_parameters.items()}
    saved = {name: weight.clone() for name, weight in weights.items()}
    rng = random.Random(0)
    changes = []
    for name, weight in saved.items():
        for bit in range(32):
            changed = weight.clone()
            place = rng.randrange(changed.numel())
            changed.view(torch.int32).view(-1)[place] ^= -(2**31) if bit == 31 else 2**bit
            changes.append({name: changed})
    square = "hf.model.layers.0.self_attn.q_proj.weight"
    negated = saved[square].clone()
    negated[:2] *= -1  # an even number of signs
    changes += [{square: saved[square].T}, {square: saved[square].roll(1, 0)}, {square: negated}]
    first, second = (f"hf.model.layers.{i}.mlp.up_proj.weight" for i in (0, 1))
    changes.append({first: saved[second], second: saved[first]})
    hashes = {expected}
    for change in changes:
        for name, changed in change.items():
            weights[name].copy_(changed)
        hashes.add(hash_of(worker))
        for name in change:
            weights[name].copy_(saved[name])
    assert len(hashes) == 1 + len(changes)
    monkeypatch.setitem(WORDS_AT_A_TIME, "cpu", 100)  # several parts of each weight
    assert hash_of(worker) == expected


def test_the_hash_of_given_weights_is_that_of_older_versions(model, device):
    """Checkpoints hold hashes, which are compared when a run resumes."""
    worker = Worker(worker_config(model, lr=1e-3), device, False, 8)
    for name, parameter in worker.trained_parameters.items():
        weight = parameter._local_tensor
        weight.copy_(((torch.arange(weight.numel()) + len(name)) / 7).view_as(weight))
    assert hash_of(worker) == "e2b58885750223e9"


def test_weights_in_host_memory_and_frozen_ones_have_a_hash(model, device):
    worker = Worker(worker_config(model, lr=1e-3), device, False, 8)
    frozen = Worker(worker_config(model), device)
    expected = hash_of(worker)
    assert hash_of(frozen) == expected, "all weights are trained, and all are in a frozen model"
    worker.memory = WeightMemory(worker.model, in_host_memory=True)
    assert hash_of(worker) == expected
    half = Worker(worker_config(model, dtype="bfloat16"), device)
    assert hash_of(half) != expected


def test_of_a_model_with_adapters_these_are_hashed(model, device):
    worker = Worker(worker_config(model, lr=1e-3, lora_rank=2), device, False, 8)
    expected = hash_of(worker)
    base = dict(worker.model.named_parameters())
    base_name = next(key for key in base if key not in worker.trained_parameters)
    base[base_name]._local_tensor.view(torch.int32).view(-1)[0] ^= 1
    assert hash_of(worker) == expected
    adapter = next(iter(worker.trained_parameters.values()))
    adapter._local_tensor.view(torch.int32).view(-1)[0] ^= 1
    assert hash_of(worker) != expected
