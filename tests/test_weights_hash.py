"""The hash of a worker's weights: every bit and every place counts, the layout does not."""

import random

import pytest
import torch
from common import make_model
from parity import worker_config

from rl2.parallel.offload import WeightMemory
from rl2.run.weights_hash import _sum_rows, hash_weights
from rl2.worker import Worker


def hash_of(worker):
    hashes = hash_weights({"actor": worker})
    assert hashes.keys() == {"actor"} and len(hashes["actor"]) == 16
    return hashes["actor"]


def bits_of(parameter):
    return parameter._local_tensor.view(torch.int32).view(-1)


def test_each_changed_bit_and_each_exchange_changes_the_hash(tmp_path, device):
    name = make_model(tmp_path / "model")
    worker = Worker(worker_config(name, lr=1e-3), device, False, 8)
    expected = hash_of(worker)
    rng = random.Random(0)
    for parameter in worker.trained_parameters.values():
        bits = bits_of(parameter)
        for bit in range(32):
            place = rng.randrange(len(bits))
            bits[place] ^= -(2**31) if bit == 31 else 2**bit
            assert hash_of(worker) != expected
            bits[place] ^= -(2**31) if bit == 31 else 2**bit
    square = worker.trained_parameters["hf.model.layers.0.self_attn.q_proj.weight"]._local_tensor
    with torch.no_grad():
        square.copy_(square.T.clone())
        assert hash_of(worker) != expected, "transposed"
        square.copy_(square.T.clone())
        first, second = square[0].clone(), square[1].clone()
        square[0], square[1] = second, first
        assert hash_of(worker) != expected, "two rows exchanged"
        square[0], square[1] = -first, -second
        assert hash_of(worker) != expected, "an even number of signs changed"
        square[0], square[1] = first, second
    norms = [worker.trained_parameters[f"hf.model.layers.{i}.mlp.up_proj.weight"] for i in (0, 1)]
    weights = [norm._local_tensor.clone() for norm in norms]
    for norm, weight in zip(norms, reversed(weights), strict=True):
        norm._local_tensor.copy_(weight)
    assert hash_of(worker) != expected, "two parameters exchanged"
    for norm, weight in zip(norms, weights, strict=True):
        norm._local_tensor.copy_(weight)
    assert hash_of(worker) == expected


def test_weights_in_host_memory_and_frozen_ones_have_a_hash(tmp_path, device):
    name = make_model(tmp_path / "model")
    worker = Worker(worker_config(name, lr=1e-3), device, False, 8)
    frozen = Worker(worker_config(name), device)
    expected = hash_of(worker)
    assert hash_of(frozen) == expected, "all weights are trained, and all are in a frozen model"
    worker.memory = WeightMemory(worker.model, in_host_memory=True)
    assert hash_of(worker) == expected
    half = Worker(worker_config(name, dtype="bfloat16"), device)
    assert hash_of(half) != expected


def test_of_a_model_with_adapters_these_are_hashed(tmp_path, device):
    name = make_model(tmp_path / "model")
    worker = Worker(worker_config(name, lr=1e-3, lora_rank=2), device, False, 8)
    expected = hash_of(worker)
    base = dict(worker.model.named_parameters())
    base_name = next(key for key in base if key not in worker.trained_parameters)
    bits_of(base[base_name])[0] ^= 1
    assert hash_of(worker) == expected
    bits_of(next(iter(worker.trained_parameters.values())))[0] ^= 1
    assert hash_of(worker) != expected


@pytest.mark.parametrize("shape", [(0, 5), (1, 7), (300, 1000), (3, 70_000)])
def test_rows_are_summed_in_parts_with_wrap_around(shape):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)
    numbers = torch.randint(-(2**62), 2**62, shape[1:], generator=generator)
    expected = (rows.long() * numbers).sum(-1)
    assert torch.equal(_sum_rows(rows, numbers), expected)
