"""KL(policy || teacher) over the whole vocabulary, without holding the logits of all tokens.

Shapes: P scored pairs, V vocabulary (or this process's part of it).
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rl2.model.candidates import CandidateMask
from rl2.model.head import HeadInputs, chunks
from rl2.model.logits import LogitSettings, cap_slope
from rl2.parallel.tensor import sum_softmax


@dataclass(frozen=True)
class KLSettings:
    """How the divergences of a call are computed, see `full_kl`."""

    policy: LogitSettings
    teacher: LogitSettings
    group: dist.ProcessGroup | None


def full_kl(
    policy: HeadInputs,
    teacher: HeadInputs,
    *,
    group: dist.ProcessGroup | None = None,
    candidates: CandidateMask | None = None,
) -> Tensor:
    """KL(policy || teacher) of each pair [P] in fp32, in nats.

    With `candidates` both distributions are among these tokens only. The tensors of the policy get
    a gradient, those of the teacher get none. `group` is as in `head_scores`.

    Models with the same tokens may pad their vocabularies to different sizes. Then both
    distributions are among the ids that both have; not with `group`, where the parts would not
    have the same ids: ValueError.
    """
    if group is not None and len(policy.weight) != len(teacher.weight):
        raise ValueError(
            f"the parts of the vocabulary have {len(policy.weight)} tokens in the policy and "
            f"{len(teacher.weight)} in the teacher"
        )
    num_shared = min(len(policy.weight), len(teacher.weight))
    settings = KLSettings(
        policy=policy.logit_settings(candidates),
        teacher=teacher.logit_settings(candidates),
        group=group,
    )
    return _FullKL.apply(
        *_first_tokens(policy, num_shared), *_first_tokens(teacher, num_shared), settings
    )


def _first_tokens(head: HeadInputs, count: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """(hidden states, weight, bias) of a head that has the first `count` tokens only."""
    if count == len(head.weight):
        return head.hidden, head.weight, head.bias
    return head.hidden, head.weight[:count], None if head.bias is None else head.bias[:count]


class _FullKL(torch.autograd.Function):
    """A chunk of the vocabulary at a time. The backward pass computes the logits again.

    With p = softmax(z) of the policy and q = softmax(y) of the teacher, KL = sum p (log p - log q)
    = sum p (z - y) - lse(z) + lse(y), and dKL / dz = p (log p - log q - KL).
    """

    @staticmethod
    def forward(
        ctx,
        hidden,
        weight,
        bias,
        teacher_hidden,
        teacher_weight,
        teacher_bias,
        settings: KLSettings,
    ):
        ctx.settings = settings
        zeros = torch.zeros(len(hidden), device=hidden.device)
        lowest = zeros - torch.inf
        sums: tuple[Tensor, ...] = (lowest, zeros, zeros, lowest, zeros)  # see `_add_chunk`
        for columns in chunks(hidden, weight):
            z = settings.policy.compute(hidden, weight, bias, columns)
            y = settings.teacher.compute(teacher_hidden, teacher_weight, teacher_bias, columns)
            sums = _add_chunk(z, y, *sums)
        top, total, difference, teacher_top, teacher_total = sums
        lse, teacher_lse = total.log() + top, teacher_total.log() + teacher_top
        difference = difference / total
        if settings.group:
            lse, _, difference = sum_softmax(lse, zeros, difference, settings.group)
            teacher_lse, _, _ = sum_softmax(teacher_lse, zeros, zeros, settings.group)
        kl = difference - lse + teacher_lse
        ctx.save_for_backward(
            hidden,
            weight,
            bias,
            teacher_hidden,
            teacher_weight,
            teacher_bias,
            lse,
            teacher_lse,
            kl,
        )
        return kl

    @staticmethod
    def backward(ctx, d_kl):
        hidden, weight, bias, *teacher_head, lse, teacher_lse, kl = ctx.saved_tensors
        teacher_hidden, teacher_weight, teacher_bias = teacher_head
        settings: KLSettings = ctx.settings
        temperature, cap = settings.policy.divisor, settings.policy.cap
        scale = d_kl / temperature
        d_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        d_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None  # None: frozen
        d_bias = torch.empty_like(bias) if ctx.needs_input_grad[2] else None
        for columns in chunks(hidden, weight):
            z = settings.policy.compute(hidden, weight, bias, columns)
            y = settings.teacher.compute(teacher_hidden, teacher_weight, teacher_bias, columns)
            d_logits = _gradient_of_chunk(z, y, lse, teacher_lse, kl, scale)
            if cap is not None:
                d_logits = d_logits * cap_slope(z, temperature, cap)
            d_logits = d_logits.to(hidden.dtype)
            d_hidden += d_logits @ weight[columns]
            if d_weight is not None:
                d_weight[columns] = d_logits.T @ hidden
            if d_bias is not None:
                d_bias[columns] = d_logits.sum(0, dtype=torch.float32)
        if settings.group:
            dist.all_reduce(d_hidden, group=settings.group)
        no_gradients_of_teacher = (None, None, None)
        return d_hidden.to(hidden.dtype), d_weight, d_bias, *no_gradients_of_teacher, None


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
