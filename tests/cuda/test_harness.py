"""The harness itself: what it counts in programs whose answer is known."""

import pytest
import torch
from fake_cuda import fake_cuda

MIB = 2**20


@pytest.fixture(scope="module")
def gpu():
    with fake_cuda(world=8, rank=3) as gpu:
        yield gpu


def test_copies_and_waits(gpu):
    pageable = torch.empty(MIB)
    pinned = torch.empty(MIB, pin_memory=True)
    assert pinned.is_pinned() and not pageable.is_pinned() and pageable.pin_memory().is_pinned()
    with gpu.phase() as phase:
        pageable.cuda(non_blocking=True)
        on_device = pinned.cuda(non_blocking=True)
        with torch.cuda.stream(torch.cuda.Stream()):
            pinned.copy_(on_device, non_blocking=True)
        on_device.to("cpu", non_blocking=True)
        on_device.cpu()
    assert phase.copies == {"to device": 2, "to host": 3}
    assert phase.copied_bytes == {"to device": 8 * MIB, "to host": 12 * MIB}
    assert phase.side_stream_bytes == {"to host": 4 * MIB}
    assert phase.waits == {("copy to device", ""): 1, ("copy to host", ""): 1}
    with gpu.phase() as phase:
        torch.tensor([1, 2], device="cuda")
        on_device[on_device > 0]
        on_device.sum().item()
        on_device[:3].tolist()
        (on_device > 0).nonzero()
        torch.cuda.synchronize()
        torch.cuda.Event().synchronize()
    assert sorted(what for what, _ in phase.waits.elements()) == [
        "Event.synchronize",
        "copy to device",
        "copy to host",
        "index with a mask",
        "item",
        "nonzero",
        "torch.cuda.synchronize",
    ]


def test_tensors_on_two_devices_are_refused_by_the_optimizer_s_kernels(gpu):
    parameter = torch.nn.Parameter(torch.zeros(MIB, device="cuda"))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = optimizer.state[parameter]
    state["step"] = state["step"].cpu()
    with pytest.raises(RuntimeError, match="_fused_adamw_ got tensors on cpu and cuda"):
        optimizer.step()


def test_collectives_are_counted_and_send_nothing(gpu):
    with gpu.phase() as phase:
        torch.distributed.all_reduce(torch.zeros(4, device="cuda"))
    assert phase.collectives == {"allreduce_": 1} and phase.num_waits == 0
    assert torch.distributed.get_rank() == 3 and torch.distributed.get_world_size() == 8
