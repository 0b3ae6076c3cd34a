"""The optimizers of a worker: AdamW and Muon, their learning rate and the gradient's norm."""

import math
from collections.abc import Collection, Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim.adamw import adamw
from transformers import PreTrainedModel

from rl2.parallel.mesh import all_reduce_sum_
from rl2.parallel.offload import (
    as_sharded,
    local_shard,
    visit_device,
    wait_for_copies,
    zeros_like_all,
)

ADAMW_EPS = 1e-8
MUON_MOMENTUM = 0.95
# Of Newton-Schulz iterations a X + b (X X^T) X + c (X X^T)^2 X, as in torch.optim.Muon.
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


class AdamW:
    """AdamW (Loshchilov & Hutter, 2019, arXiv:1711.05101) on this process's shards of parameters.

    The moments exist from the start, on the device of the parameters or in host memory. `betas` are
    the decay rates of the two moments, the means of the gradient and of its square.
    """

    def __init__(
        self,
        parameters: dict[str, DTensor],
        weight_decay: float,
        in_host_memory: bool = False,
        betas: Sequence[float] = (0.9, 0.999),
    ):
        self.parameters = parameters
        self.weight_decay = weight_decay
        self.beta1, self.beta2 = betas
        self.in_host_memory = in_host_memory
        self.num_steps = 0
        shards = [local_shard(parameter) for parameter in parameters.values()]
        self.moments = {  # name of the moment -> name of the parameter -> shard
            key: dict(zip(parameters, zeros_like_all(shards, in_host_memory), strict=True))
            for key in ("exp_avg", "exp_avg_sq")  # torch's names
        }

    def step(self, lr: float) -> None:
        """Changes the parameters by their gradients, with the learning rate `lr`."""
        if not self.parameters:  # as of Muon's, where adapters are all that is trained
            return
        shards = [local_shard(parameter) for parameter in self.parameters.values()]
        gradients = [local_shard(parameter.grad) for parameter in self.parameters.values()]
        moments = [list(shard_of.values()) for shard_of in self.moments.values()]
        change = partial(self._change, lr)
        if self.in_host_memory:
            visit_device(change, [shards, gradients], moments)
        else:
            change(shards, gradients, *moments)
        self.num_steps += 1

    def _change(self, lr: float, shards, gradients, exp_avgs, exp_avg_sqs) -> None:
        """One step of these shards, lists of tensors."""
        steps = torch.full((len(shards),), float(self.num_steps), device=shards[0].device)
        adamw(
            shards,
            gradients,
            exp_avgs,
            exp_avg_sqs,
            max_exp_avg_sqs=[],
            state_steps=list(steps.unbind()),  # torch counts up these copies
            fused=True,  # even on the CPU: one pass over the memory instead of ten
            amsgrad=False,
            beta1=self.beta1,
            beta2=self.beta2,
            lr=lr,
            weight_decay=self.weight_decay,
            eps=ADAMW_EPS,
            maximize=False,
        )

    def state_dict(self) -> dict[str, Tensor]:
        """The sharded state by the names that torch gives it in a checkpoint."""
        entries: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            wait_for_copies(parameter.device)
            entries[f"state.{name}.step"] = torch.tensor(float(self.num_steps))
            for key, shard_of in self.moments.items():
                entries[f"state.{name}.{key}"] = as_sharded(shard_of[name], parameter)
        return entries

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores what `state_dict` returned, in the same memory."""
        for key, entry in self.state_dict().items():
            entry.copy_(state[key])
            if key.endswith(".step"):  # the same number for all parameters
                self.num_steps = int(entry)


class Muon:
    """Muon (Jordan et al., 2024) for the weights of `matrices`, AdamW for the other parameters.

    A matrix moves by its momentum, with the singular values of all directions made about equal.
    The factor 0.2 sqrt(larger side) gives this update the usual size of one of AdamW, so `lr` and
    `weight_decay` are those of AdamW (Moonlight, arXiv:2502.16982; "match_rms_adamw" of
    torch.optim.Muon). `betas` are AdamW's; Muon's momentum is 0.95, with Nesterov's step.

    The momentum is sharded as the parameters are: one state of 4 bytes a weight, where AdamW has
    two. In a step every process gathers one matrix after the other, and computes its whole update.
    """

    def __init__(
        self,
        parameters: dict[str, DTensor],
        matrices: Collection[str],
        weight_decay: float,
        in_host_memory: bool = False,
        betas: Sequence[float] = (0.9, 0.999),
    ):
        self.matrices = {name: p for name, p in parameters.items() if name in matrices}
        others = {name: p for name, p in parameters.items() if name not in matrices}
        self.adamw = AdamW(others, weight_decay, in_host_memory, betas)
        self.weight_decay = weight_decay
        self.in_host_memory = in_host_memory
        shards = [local_shard(parameter) for parameter in self.matrices.values()]
        buffers = zeros_like_all(shards, in_host_memory)
        self.momentum = dict(zip(self.matrices, buffers, strict=True))

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Changes the parameters by their gradients, with the learning rate `lr`.

        All processes must call.
        """
        for name, parameter in self.matrices.items():
            gradient = local_shard(parameter.grad)
            momentum = self.momentum[name].to(gradient.device, non_blocking=True)
            momentum.lerp_(gradient, 1 - MUON_MOMENTUM)
            if self.in_host_memory:
                self.momentum[name].copy_(momentum, non_blocking=True)
            direction = as_sharded(gradient.lerp(momentum, MUON_MOMENTUM), parameter).full_tensor()
            update = own_part(orthogonalise(direction), parameter)
            scale = 0.2 * math.sqrt(max(parameter.shape[-2:]))
            shard = local_shard(parameter)
            shard.mul_(1 - lr * self.weight_decay).add_(update, alpha=-lr * scale)
        self.adamw.step(lr)

    def state_dict(self) -> dict[str, Tensor]:
        """The sharded state by the names that torch gives it in a checkpoint."""
        entries = self.adamw.state_dict()
        for name, parameter in self.matrices.items():
            wait_for_copies(parameter.device)
            # torch's name
            entries[f"state.{name}.momentum_buffer"] = as_sharded(self.momentum[name], parameter)
        return entries

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restores what `state_dict` returned, in the same memory."""
        self.adamw.load_state_dict(state)
        for key, entry in self.state_dict().items():
            if key.endswith(".momentum_buffer"):
                entry.copy_(state[key])


def hidden_matrices(hf: PreTrainedModel) -> set[str]:
    """Returns the names in `hf` of the weights that Muon may move.

    They are matrices, or stacks of matrices [experts, out, in], which map hidden states to hidden
    states: not embeddings, the head, vectors or the taps of a convolution [channels, 1, width].
    """
    heads = [hf.get_output_embeddings(), getattr(hf, "score", None)]
    outer = [module for module in hf.modules() if isinstance(module, nn.Embedding)]
    excluded = {id(module.weight) for module in outer + heads if module is not None}
    names = set()
    for name, parameter in hf.named_parameters():
        is_matrix = parameter.ndim >= 2 and min(parameter.shape[-2:]) > 1
        if is_matrix and id(parameter) not in excluded:
            names.add(name)
    return names


def orthogonalise(matrix: Tensor) -> Tensor:
    """About U V^T of the matrix U S V^T, or of each of a stack [..., m, n].

    Newton-Schulz iterations move all singular values into about 0.7 to 1.2. They run in bfloat16
    on a GPU, as in torch.optim.Muon, and in float32 on a CPU: they enlarge small singular values up
    to 485 times, so in bfloat16 the rounding of another layout would show.
    """
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    x = matrix.float() if matrix.device.type == "cpu" else matrix.bfloat16()
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:  # the smaller product X X^T
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


def own_part(full: Tensor, parameter: DTensor) -> Tensor:
    """This process's part of the whole tensor, cut as the parameter is."""
    shape, offset = compute_local_shape_and_global_offset(
        full.shape, parameter.device_mesh, parameter.placements
    )
    for dim, (length, start) in enumerate(zip(shape, offset, strict=True)):
        full = full.narrow(dim, min(start, full.shape[dim]), length)
    return full


def schedule(done: int, total: int, warmup_ratio: float, kind: str, floor: float = 0.0) -> float:
    """The factor of the learning rate after `done` of `total` updates.

    It rises linearly to 1 in the first `warmup_ratio` of the updates. Then it is constant, or falls
    to `floor` linearly or as a cosine (`kind`: constant | linear | cosine). After `total` it stays.
    """
    warmup = math.ceil(warmup_ratio * total)
    if done < warmup:
        return (done + 1) / warmup
    progress = min(1.0, (done - warmup) / max(1, total - warmup))
    factors = {
        "constant": 1.0,
        "linear": 1 - progress,
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
    }
    return floor + (1 - floor) * factors[kind]


def gradient_norm(parameters: Iterable[DTensor]) -> Tensor:
    """The norm [] in fp64 over all parameters and all processes, which all must call.

    A shard that several processes hold counts once: each of them adds its square times shards /
    processes.
    """
    gradients = []
    num_shards = []
    for parameter in parameters:
        gradients.append(local_shard(parameter.grad))
        num_shards.append(_num_shards(parameter))
    squares = torch.stack(torch._foreach_norm(gradients)).double().square()
    counted = torch.stack(torch._foreach_mul(squares.unbind(), num_shards)) / dist.get_world_size()
    total = counted.cumsum(0)[-1]  # on the CPU a sum in this order, whatever its instructions
    return all_reduce_sum_(total).sqrt()


def clip_gradient_(parameters: Iterable[DTensor], norm: float, max_norm: float) -> None:
    """Scales the gradient, whose norm is `norm`, down to `max_norm`, in place."""
    gradients = [local_shard(parameter.grad) for parameter in parameters]
    torch._foreach_mul_(gradients, min(1.0, max_norm / (norm + 1e-6)))


def _num_shards(parameter: DTensor) -> int:
    """How many different parts the parameter is cut into."""
    mesh = parameter.device_mesh
    sharded_axes = [i for i, place in enumerate(parameter.placements) if not place.is_replicate()]
    return math.prod(mesh.size(axis) for axis in sharded_axes)
