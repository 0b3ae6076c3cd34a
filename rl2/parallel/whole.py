"""The weights of a model that one process holds whole, without FSDP2.

The parameters stay DTensors, as FSDP2 makes them: optimizer, checkpoints and exports know one kind.
While the model computes, plain tensors are in their place. FSDP2 would do the same a layer and a
micro-batch at a time, with hooks that take the host longer than the layer itself.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from rl2.parallel.offload import as_sharded, local_shard


def as_one_shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Makes the parameters of `model` DTensors over the `mesh` of one process. It has no memory."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            shard = DTensor.from_local(parameter.data, mesh, [Shard(0)], run_check=False)
            setattr(module, name, nn.Parameter(shard, parameter.requires_grad))


class WholeWeights:
    """Puts plain tensors in the place of the parameters of `model`, but in `idle` modules.

    They are the parameter's own memory, or a copy where `compute_dtype` is another dtype. It takes
    2 bytes a weight in bf16, while the model computes. A gradient is added to the parameter's, in
    fp32, as soon as the backward pass has it.
    """

    def __init__(
        self, model: nn.Module, compute_dtype: torch.dtype | None, idle: Iterable[nn.Module]
    ):
        never_run = {part for module in idle for part in module.modules()}
        places = defaultdict(list)  # tied weights have several
        for module in model.modules():
            if module not in never_run:
                for name, parameter in module.named_parameters(recurse=False):
                    places[parameter].append((module, name))
        self.places: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        self.copies: list[Tensor] = []
        self.shards: list[Tensor] = []  # that these are copies of
        for parameter, of_parameter in places.items():
            shard = local_shard(parameter)
            plain = shard.detach()
            if shard.is_floating_point() and shard.dtype != (compute_dtype or shard.dtype):
                plain = torch.empty_like(shard, dtype=compute_dtype)
                self.copies.append(plain)
                self.shards.append(shard)
            leaf = nn.Parameter(plain, parameter.requires_grad)
            if leaf.requires_grad:
                leaf.register_post_accumulate_grad_hook(partial(_add_gradient, parameter))
            self.places += [(module, name, parameter, leaf) for module, name in of_parameter]
        self._free()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """A context for forward and backward passes, in which no weight changes."""
        for copy in self.copies:
            copy.untyped_storage().resize_(copy.nbytes)
        if self.copies:
            torch._foreach_copy_(self.copies, self.shards)
        for module, name, _, leaf in self.places:
            module._parameters[name] = leaf
        try:
            yield
        finally:
            for module, name, parameter, _ in self.places:
                module._parameters[name] = parameter
            self._free()

    def before_backward(self, is_last: bool) -> None:
        """Nothing: the gradients are those of all processes."""

    def _free(self) -> None:
        for copy in self.copies:
            copy.untyped_storage().resize_(0)


@torch.no_grad()
def _add_gradient(parameter: Tensor, leaf: Tensor) -> None:
    gradient, leaf.grad = leaf.grad, None
    assert gradient is not None
    if parameter.grad is None:
        parameter.grad = as_sharded(gradient.float(), parameter)
    else:
        local_shard(parameter.grad).add_(gradient)
