"""KL(policy || teacher) over the whole vocabulary, without holding the logits of all tokens.

Shapes: P scored pairs, E hidden size of the policy, F that of the teacher, V vocabulary (or this
process's part of it).
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rl2.model.candidates import CandidateMask
from rl2.model.fused import compiled
from rl2.model.head import cap_slope, chunks, divided, products
from rl2.parallel.tensor import sum_softmax


@dataclass(frozen=True)
class HeadInputs:
    """What the head of a model multiplies."""

    hidden: Tensor  # [P, F]
    weight: Tensor  # [V, F], or this process's part of V
    divisor: float  # of the logits: the temperature, times the model's own divisor
    dtype: torch.dtype  # what the logits are rounded to, see `head_scores`
    bias: Tensor | None = None  # [V], or this process's part
    cap: float | None = None  # of the logits before their division


@dataclass(frozen=True)
class KLSettings:
    """How the divergences of a call are computed, see `full_kl`."""

    temperature: float  # of the policy's logits, with its divisor
    teacher_temperature: float
    teacher_dtype: torch.dtype
    group: dist.ProcessGroup | None
    dtype: torch.dtype
    compile: bool
    candidates: CandidateMask | None
    cap: float | None
    teacher_cap: float | None


def full_kl(
    hidden: Tensor,
    weight: Tensor,
    teacher: HeadInputs,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    dtype: torch.dtype = torch.float32,
    compile: bool = False,
    candidates: CandidateMask | None = None,
    bias: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """hidden [P, E], weight [V, E] -> KL(policy || teacher) [P] in fp32, in nats.

    The policy's logits are divided by `temperature`, the teacher's by `teacher.divisor`. With
    `candidates` both distributions are among these tokens only. `hidden` and `weight` get a
    gradient, the teacher gets none. `group`, `dtype`, `compile`, `bias` and `cap` are as in
    `head_scores`.

    Models with the same tokens may pad their vocabularies to different sizes. Then both
    distributions are among the ids that both have; not with `group`, where the parts would not
    have the same ids: ValueError.
    """
    shared = min(len(weight), len(teacher.weight))
    if group is not None and len(weight) != len(teacher.weight):
        raise ValueError(
            f"the parts of the vocabulary have {len(weight)} tokens in the policy and "
            f"{len(teacher.weight)} in the teacher"
        )
    teacher_weight, teacher_bias = teacher.weight, teacher.bias
    if len(weight) != len(teacher_weight):
        weight, teacher_weight = weight[:shared], teacher_weight[:shared]
        bias = None if bias is None else bias[:shared]
        teacher_bias = None if teacher_bias is None else teacher_bias[:shared]
    settings = KLSettings(
        temperature=temperature,
        teacher_temperature=teacher.divisor,
        teacher_dtype=torch.promote_types(teacher.dtype, teacher.hidden.dtype),
        group=group,
        dtype=torch.promote_types(dtype, hidden.dtype),
        compile=compile,
        candidates=candidates,
        cap=cap,
        teacher_cap=teacher.cap,
    )
    return _FullKL.apply(
        hidden, weight, bias, teacher.hidden, teacher_weight, teacher_bias, settings
    )


class _FullKL(torch.autograd.Function):
    """A chunk of the vocabulary at a time. The backward pass computes the logits again.

    With p = softmax(z) of the policy and q = softmax(y) of the teacher, KL = sum p (log p - log q)
    = sum p (z - y) - lse(z) + lse(y), and dKL / dz = p (log p - log q - KL).
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, *teacher_and_settings):
        *teacher, settings = teacher_and_settings
        ctx.settings = settings
        zeros = torch.zeros(len(hidden), device=hidden.device)
        lowest = zeros - torch.inf
        # See `_add_chunk`. Each is a tensor of its own: a function is compiled anew for aliases.
        sums: tuple[Tensor, ...] = tuple(
            first.clone() for first in (lowest, zeros, zeros, lowest, zeros)
        )
        add_chunk = compiled(_add_chunk, 0) if settings.compile else _add_chunk
        for columns in chunks(hidden, weight):
            z, y = _both_logits((hidden, weight, bias), teacher, columns, settings)
            sums = add_chunk(z, y, *sums)
        top, total, difference, teacher_top, teacher_total = sums
        lse, teacher_lse = total.log() + top, teacher_total.log() + teacher_top
        difference = difference / total
        if settings.group:
            lse, _, difference = sum_softmax(lse, zeros, difference, settings.group)
            teacher_lse, _, _ = sum_softmax(teacher_lse, zeros, zeros, settings.group)
        kl = difference - lse + teacher_lse
        ctx.save_for_backward(hidden, weight, bias, *teacher, lse, teacher_lse, kl)
        return kl

    @staticmethod
    def backward(ctx, d_kl):
        hidden, weight, bias, *teacher, lse, teacher_lse, kl = ctx.saved_tensors
        settings = ctx.settings
        gradient = compiled(_gradient_of_chunk, 0) if settings.compile else _gradient_of_chunk
        scale = d_kl / settings.temperature
        d_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        d_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None  # None: frozen
        d_bias = torch.empty_like(bias) if ctx.needs_input_grad[2] else None
        for columns in chunks(hidden, weight):
            z, y = _both_logits((hidden, weight, bias), teacher, columns, settings)
            d_logits = gradient(z, y, lse, teacher_lse, kl, scale)
            if settings.cap is not None:
                d_logits = d_logits * cap_slope(z, settings.temperature, settings.cap)
            d_logits = d_logits.to(hidden.dtype)
            d_hidden += d_logits @ weight[columns]
            if d_weight is not None:
                d_weight[columns] = d_logits.T @ hidden
            if d_bias is not None:
                d_bias[columns] = d_logits.sum(0, dtype=torch.float32)
        if settings.group:
            dist.all_reduce(d_hidden, group=settings.group)
        return d_hidden.to(hidden.dtype), d_weight, d_bias, None, None, None, None


def _both_logits(policy, teacher, columns: slice, settings: KLSettings) -> tuple[Tensor, Tensor]:
    """The logits [P, columns] of the policy and the teacher, divided by their temperatures.

    Each of the two is (hidden, weight, bias).
    """
    logits = []
    for (hidden, weight, bias), temperature, cap, dtype in (
        (policy, settings.temperature, settings.cap, settings.dtype),
        (teacher, settings.teacher_temperature, settings.teacher_cap, settings.teacher_dtype),
    ):
        chunk = divided(products(hidden, weight[columns], dtype, bias, columns), temperature, cap)
        if settings.candidates is not None:
            settings.candidates.exclude_others_(chunk, columns)
        logits.append(chunk)
    return logits[0], logits[1]


def _add_chunk(z, y, top, total, difference, teacher_top, teacher_total) -> tuple[Tensor, ...]:
    """The sums [P] of the columns so far and of the logits [P, columns] of both models.

    They are the largest z, the sums of exp(z - top) and of (z - y) exp(z - top), the largest y, and
    the sum of exp(y - teacher_top).
    """
    new_top = torch.maximum(top, z.amax(1))
    scale = (top - new_top).exp()
    weights = (z - new_top[:, None]).exp()
    total = total * scale + weights.sum(1)
    difference = difference * scale + (weights * (z - y)).sum(1)
    new_teacher_top = torch.maximum(teacher_top, y.amax(1))
    teacher_total = teacher_total * (teacher_top - new_teacher_top).exp()
    teacher_total = teacher_total + (y - new_teacher_top[:, None]).exp().sum(1)
    return new_top, total, difference, new_teacher_top, teacher_total


def _gradient_of_chunk(z, y, lse, teacher_lse, kl, scale) -> Tensor:
    """scale p (log p - log q - KL), the gradient of the products [P, columns] of a chunk."""
    log_p = z - lse[:, None]
    log_q = y - teacher_lse[:, None]
    return log_p.exp() * (log_p - log_q - kl[:, None]) * scale[:, None]
