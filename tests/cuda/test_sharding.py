"""What FSDP does when: gathers ahead of the layers that need them, and layers that run again."""

import pytest
from fake_cuda import fake_cuda, policy_loss
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class OrderOfWork(TorchDispatchMode):
    """Notes each gather of weights and each attention kernel."""

    def __init__(self):
        super().__init__()
        self.events = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        if "flash_attention" in func._opname:
            self.events.append("backward" if "backward" in func._opname else "attention")
        elif "allgather" in func._opname:
            self.events.append("gather")
        return func(*args, **(kwargs or {}))


def test_a_layer_is_gathered_before_the_one_in_front_of_it_computes():
    with fake_cuda(world=8) as gpu:
        worker = gpu.worker("small", max_length_per_device=256)
        batch = gpu.batch(worker, tokens=256)
        worker.infer(batch)
        with OrderOfWork() as work:
            worker.infer(batch)
    # The embedding and the head, and both layers; then each layer's attention.
    assert work.events == ["gather", "gather", "gather", "attention", "attention"]


@pytest.mark.parametrize(("sp_size", "recomputed"), [(1, True), (2, 1)])  # of two layers
def test_a_layer_that_runs_again_does_not_compute_its_attention_again(sp_size, recomputed):
    def update(gradient_checkpointing):
        with fake_cuda(world=4) as gpu:
            worker = gpu.worker(
                "small",
                max_length_per_device=1024,
                sp_size=sp_size,
                gradient_checkpointing=gradient_checkpointing,
            )
            batch = gpu.batch(worker, tokens=1024, answers=4)
            worker.update(batch, policy_loss)
            with OrderOfWork() as work, gpu.phase() as phase:
                worker.update(batch, policy_loss)
        return work.events, phase

    events, phase = update(recomputed)
    plain_events, plain_phase = update(False)
    for kind in ("attention", "backward"):
        assert events.count(kind) == plain_events.count(kind) > 0
    messages = [run.collectives["send"] for run in (phase, plain_phase)]  # of the ring
    assert messages[0] == messages[1] and (messages[0] > 0) == (sp_size > 1)
    assert phase.peak_bytes < plain_phase.peak_bytes
