"""One call of a user's own function on made-up rows, before any model loads.

A wrong shape would otherwise end a run inside rl2, or be broadcast and train something else: a loss
of one number ignores `actor.average`. Each function here yields what is wrong, in words that follow
"it".
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rl2.algorithms.advantages import AdvantageInputs, Estimator, RewardPart
from rl2.algorithms.losses import (
    PolicyInputs,
    PolicyLoss,
    PreferenceInputs,
    PreferenceLoss,
    UnpairedInputs,
    UnpairedLoss,
)

NUM_ROWS, NUM_TOKENS = 4, 6  # which differ, so that a transposed result is found
# Two prompts with two answers each, of which the second ones earn the same.
GROUP = torch.tensor([0, 0, 1, 1])
REWARDS = torch.tensor([1.0, 0.0, 1.0, 1.0])
ANSWERS = ((1, 5), (2, 6), (1, 3), (3, 4))  # the first column of each answer and the one after it

TAKEN_METRICS = ("loss", "grad_norm", "lr", "skipped", "approx_kl", "kl", "entropy")


def try_policy_loss(loss: PolicyLoss) -> Iterator[str]:
    """What is wrong with the (losses, metrics) that a policy loss returns."""
    mask = _made_up_mask()
    logps = _made_up_logps(mask).requires_grad_()
    returned: Any = loss.compute(
        PolicyInputs(
            logps=logps,
            old_logps=logps.detach() - 0.1 * mask,
            engine_logps=logps.detach() - 0.1 * mask,
            advantages=(REWARDS - 0.5)[:, None] * mask,
            mask=mask,
            group=GROUP,
            trajectory=torch.arange(NUM_ROWS),
            clip=0.2,
            clip_high=0.2,
            ref_logps=logps.detach() - 0.2 * mask if "ref_logps" in loss.needs else None,
            # As if the first token of each answer were of older weights.
            ages=(mask.cumsum(1) == 1) * mask if "ages" in loss.needs else None,
        )
    )
    expected = (
        "return (losses, metrics): the loss of each token [b, T], which actor.average makes a mean "
        "of, and a dict of metrics of each token, {} for none"
    )
    if not (isinstance(returned, tuple) and len(returned) == 2):
        yield f"returned {_describe(returned)}: {expected}"
        return
    losses, metrics = returned
    if not _is_column(losses, mask):
        yield f"returned as losses {_describe(losses)} for rows of {_size(mask)}: {expected}"
    else:
        yield from _check_differentiable(losses, logps, "logps or log_ratio")
    if not isinstance(metrics, dict):
        yield f"returned as metrics {_describe(metrics)}: {expected}"
        return
    for name, values in metrics.items():
        if name in TAKEN_METRICS or not isinstance(name, str):
            yield f"returned a metric {name!r}: choose a text that is none of rl2's own metrics"
        if not _is_column(values, mask):
            yield (
                f"returned as metric {name!r} {_describe(values)} for rows of {_size(mask)}: "
                "return its value at each token [b, T]; the mean is made from these"
            )


def try_estimator(estimator: Estimator) -> Iterator[str]:
    """What is wrong with the advantages, and returns, that an estimator returns."""
    mask = _made_up_mask()
    last = torch.tensor([end - 1 for _, end in ANSWERS])
    rewards = torch.zeros_like(mask).scatter(1, last[:, None], REWARDS[:, None])
    logps = _made_up_logps(mask)
    needs = estimator.needs
    returned: Any = estimator.compute(
        AdvantageInputs(
            rewards=rewards,
            mask=mask,
            group=GROUP,
            trajectory=torch.arange(NUM_ROWS),
            gamma=1.0,
            lamda=1.0,
            norm_var=True,
            reward_parts={"reward": RewardPart(REWARDS, 1.0)},
            values=0.3 * mask if "values" in needs else None,
            old_logps=logps if "old_logps" in needs else None,
            teacher_logps=logps - 0.1 * mask if "teacher_logps" in needs else None,
        )
    )
    columns = {"advantages": returned}
    expected = "return the advantages [B, T]"
    if "values" in needs:
        expected = (
            "return (advantages, returns), both [B, T]; it needs values, so a critic learns the "
            "returns"
        )
        if not (isinstance(returned, tuple) and len(returned) == 2):
            yield f"returned {_describe(returned)}: {expected}"
            return
        columns = {"advantages": returned[0], "returns": returned[1]}
    for name, values in columns.items():
        if not _is_column(values, mask):
            yield f"returned as {name} {_describe(values)} for rows of {_size(mask)}: {expected}"
        elif not values.isfinite().all():
            yield (
                f"returned {name} that are not finite. Of the rows that it was tried on, two "
                "answers to a prompt earned the same: is there a division by a standard deviation?"
            )


def try_preference_loss(loss: PreferenceLoss) -> Iterator[str]:
    """What is wrong with the losses that a preference loss returns."""
    logps = torch.tensor([[-1.5, -2.25, -0.9], [-2.0, -2.0, -1.0]], requires_grad=True)
    chosen, rejected = logps
    has_reference = "ref_logps" in loss.needs
    losses = loss.compute(
        PreferenceInputs(
            chosen_logps=chosen,
            rejected_logps=rejected,
            chosen_length=torch.tensor([4.0, 5.0, 3.0]),
            rejected_length=torch.tensor([5.0, 4.0, 3.0]),
            beta=0.1,
            label_smoothing=0.0,
            target_margin=0.5,
            chosen_gain=chosen + 1.6 if has_reference else None,
            rejected_gain=rejected + 1.6 if has_reference else None,
        )
    )
    if not _is_column(losses, chosen):
        yield f"returned {_describe(losses)} for 3 pairs: return the loss of each pair [P]"
    else:
        names = "margin, mean_margin or the logps" if has_reference else "the logps"
        yield from _check_differentiable(losses, logps, names)


def try_unpaired_loss(loss: UnpairedLoss) -> Iterator[str]:
    """What is wrong with the losses that a loss of labelled replies returns."""
    logps = torch.tensor([-1.5, -2.25, -0.9], requires_grad=True)
    has_reference = bool(loss.needs)
    losses = loss.compute(
        UnpairedInputs(
            logps=logps,
            length=torch.tensor([4.0, 5.0, 3.0]),
            label=torch.tensor([True, False, True]),
            beta=0.1,
            desirable_weight=1.0,
            undesirable_weight=1.0,
            gain=logps + 1.6 if has_reference else None,
            reference_point=torch.full((3,), 0.2) if "reference_point" in loss.needs else None,
        )
    )
    if not _is_column(losses, logps):
        yield f"returned {_describe(losses)} for 3 replies: return the loss of each reply [R]"
    else:
        names = "gain or the logps" if has_reference else "the logps"
        yield from _check_differentiable(losses, logps, names)


def _made_up_mask() -> Tensor:
    mask = torch.zeros(NUM_ROWS, NUM_TOKENS)
    for row, (first, end) in enumerate(ANSWERS):
        mask[row, first:end] = 1
    return mask


def _made_up_logps(mask: Tensor) -> Tensor:
    """Log-probabilities from -0.1 on, 0 where the mask is 0."""
    return -0.1 * (1 + torch.arange(mask.numel()) % 7).view_as(mask) * mask


def _check_differentiable(losses: Tensor, inputs: Tensor, name: str) -> Iterator[str]:
    if not losses.isfinite().all():
        yield "returned losses that are not finite, where log-probabilities and advantages are"
    elif not losses.requires_grad:
        yield f"returned losses without a gradient: they have to depend on {name}"
    else:
        [gradient] = torch.autograd.grad(
            losses.sum(), inputs, allow_unused=True, materialize_grads=True
        )
        if not gradient.isfinite().all():
            yield (
                f"has a gradient in {name} that is not finite, such as that of a square root at 0, "
                "also where the mask is 0"
            )


def _is_column(values: Any, like: Tensor) -> bool:
    """Whether it is a tensor of numbers of the shape of `like`."""
    return isinstance(values, Tensor) and values.shape == like.shape


def _size(mask: Tensor) -> str:
    return f"shape {list(mask.shape)}"


def _describe(value: Any) -> str:
    """What a function returned, in words."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}" if value.ndim else "one number (a tensor)"
    if isinstance(value, int | float):
        return f"one number ({type(value).__name__})"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    module = type(value).__module__
    kind = type(value).__name__ if module == "builtins" else f"{module}.{type(value).__name__}"
    return "None" if value is None else f"a {kind}"
