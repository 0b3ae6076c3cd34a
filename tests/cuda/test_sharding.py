"""What FSDP does when: gathers ahead of the layers that need them, and layers that run again."""

from fake_cuda import fake_cuda
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
