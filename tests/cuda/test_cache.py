"""Tests the embedded engine's cache for GPUs on fake CUDA tensors: devices, kernels and waits."""

from types import SimpleNamespace

import torch
from fake_cuda import fake_cuda
from torch.utils._python_dispatch import TorchDispatchMode

from rl2.engine.cache import DenseKVCache, KVCache

# Questions and views.
NO_KERNELS = {"device", "view", "_unsafe_view", "select", "slice", "expand", "transpose", "permute"}
NO_KERNELS |= {"unsqueeze", "t", "detach", "alias", "split", "unflatten", "flatten", "reshape"}


class Counter(TorchDispatchMode):
    """Counts the operators of a step."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def decode(cache, device, num_layers, slots=64, position=1000):
    """The operators of a step's attention in all layers, after one that made the memory."""
    positions = torch.full((slots,), position, device=device)
    shapes = ((slots, 12, 1, 128), (slots, 2, 1, 128), (slots, 2, 1, 128))
    heads = [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes]
    counter = Counter()
    for step in range(2):
        counter.names.clear()
        with counter:
            cache.begin_step(positions + step, position + step)
            for layer in range(num_layers):
                out = cache(SimpleNamespace(layer_idx=layer), *heads, 0.1)
        assert out.shape == (slots, 1, 12, 128) and out.device == device
        assert out.dtype == torch.bfloat16
    return counter.names


def test_a_layer_takes_few_kernels_and_never_waits():
    with fake_cuda() as gpu, torch.inference_mode():
        counts = {}
        for kind in (DenseKVCache, KVCache):
            with gpu.phase() as phase:
                names = decode(kind(64), gpu.device, num_layers=4)
            counts[kind] = sum(name not in NO_KERNELS for name in names) / 4
            assert not phase.num_waits, phase.describe_waits()
    # The writes of keys and of values, the attention, and a share of what all layers need.
    assert counts[DenseKVCache] < 6 and counts[KVCache] > 60, counts
