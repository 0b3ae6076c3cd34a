"""One call of a user's own function on small inputs, before any model loads.

A wrong shape would otherwise end a run inside rl2, or be broadcast and train something else: a loss
of one number ignores `actor.average`. Each function raises WrongResult.
"""

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

# Two prompts with two answers each, of which the second ones earn the same.
GROUP = torch.tensor([0, 0, 1, 1])
REWARDS = torch.tensor([1.0, 0.0, 1.0, 1.0])
MASK = torch.tensor(
    [[0, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 0], [0, 1, 0, 0, 1, 1], [0, 0, 0, 1, 0, 0]]
)
MASK = MASK.float()
LOGPS = -0.1 * (1 + torch.arange(MASK.numel()) % 7).view_as(MASK) * MASK
TAKEN_METRICS = ("loss", "grad_norm", "lr", "skipped", "approx_kl", "kl", "entropy")


class WrongResult(Exception):
    """What is wrong with the result of the user's function, and what to return."""


def call_policy_loss(loss: PolicyLoss) -> None:
    logps = LOGPS.clone().requires_grad_()
    advantages = (REWARDS - torch.tensor([0.5, 0.5, 1.0, 1.0]))[:, None] * MASK
    returned: Any = loss.compute(
        PolicyInputs(
            logps=logps,
            old_logps=LOGPS - 0.1 * MASK,
            engine_logps=LOGPS - 0.1 * MASK,
            advantages=advantages,
            mask=MASK,
            group=GROUP,
            trajectory=torch.arange(len(MASK)),
            clip=0.2,
            clip_high=0.2,
            ref_logps=LOGPS - 0.2 * MASK if "ref_logps" in loss.needs else None,
            ages=MASK if "ages" in loss.needs else None,
        )
    )
    remedy = "return (losses, metrics): the loss of each token [b, T], and {name: [b, T]}, or {}"
    losses, metrics = _pair(returned, remedy)
    gradient = _gradient(losses, logps, remedy)
    if loss.vanishes_without_advantage and gradient[advantages == 0].any():
        raise WrongResult(
            "it has a gradient in tokens of advantage 0, so do not declare "
            "vanishes_without_advantage: rows of such tokens would not be trained"
        )
    if not isinstance(metrics, dict):
        raise WrongResult(f"it returned metrics of type {type(metrics).__name__}: {remedy}")
    for name, values in metrics.items():
        if name in TAKEN_METRICS or not isinstance(name, str):
            raise WrongResult(f"choose another name for the metric {name!r}, which rl2 logs itself")
        _check(values, MASK, f"the metric {name}", remedy)


def call_estimator(estimator: Estimator) -> None:
    needs = estimator.needs
    last = MASK.cumsum(1).argmax(1, keepdim=True)
    returned: Any = estimator.compute(
        AdvantageInputs(
            rewards=torch.zeros_like(MASK).scatter(1, last, REWARDS[:, None]),
            mask=MASK,
            group=GROUP,
            trajectory=torch.arange(len(MASK)),
            gamma=1.0,
            lamda=1.0,
            norm_var=True,
            reward_parts={"reward": RewardPart(REWARDS, 1.0)},
            values=0.3 * MASK if "values" in needs else None,
            old_logps=LOGPS if "old_logps" in needs else None,
            teacher_logps=LOGPS - 0.1 * MASK if "teacher_logps" in needs else None,
        )
    )
    if "values" in needs:
        remedy = "return (advantages, returns), both [B, T]: the critic learns the returns"
        returned, returns = _pair(returned, remedy)
        _check(returns, MASK, "returns", remedy)
    remedy = "return finite advantages [B, T], also where the answers to a prompt earned the same"
    _check(returned, MASK, "advantages", remedy)


def call_preference_loss(loss: PreferenceLoss) -> None:
    logps = torch.tensor([[-1.5, -2.25, -0.9], [-2.0, -2.0, -1.0]], requires_grad=True)
    chosen, rejected = logps
    losses = loss.compute(
        PreferenceInputs(
            chosen_logps=chosen,
            rejected_logps=rejected,
            chosen_length=torch.tensor([4.0, 5.0, 3.0]),
            rejected_length=torch.tensor([5.0, 4.0, 3.0]),
            beta=0.1,
            label_smoothing=0.0,
            target_margin=0.5,
            chosen_gain=chosen + 1.6 if loss.needs else None,
            rejected_gain=rejected + 1.6 if loss.needs else None,
        )
    )
    _gradient(losses, logps, "return the loss of each pair [P]", like=chosen)


def call_unpaired_loss(loss: UnpairedLoss) -> None:
    logps = torch.tensor([-1.5, -2.25, -0.9], requires_grad=True)
    losses = loss.compute(
        UnpairedInputs(
            logps=logps,
            length=torch.tensor([4.0, 5.0, 3.0]),
            label=torch.tensor([True, False, True]),
            beta=0.1,
            desirable_weight=1.0,
            undesirable_weight=1.0,
            gain=logps + 1.6 if loss.needs else None,
            reference_point=torch.full((3,), 0.2) if "reference_point" in loss.needs else None,
        )
    )
    _gradient(losses, logps, "return the loss of each reply [R]")


def _pair(returned: Any, remedy: str) -> tuple[Any, Any]:
    if isinstance(returned, tuple) and len(returned) == 2:
        return returned
    raise WrongResult(f"it returned a {type(returned).__name__}, no pair: {remedy}")


def _check(values: Any, like: Tensor, what: str, remedy: str) -> None:
    """WrongResult unless the values are a finite tensor of the shape of `like`."""
    if not isinstance(values, Tensor):
        raise WrongResult(f"it returned {what} of type {type(values).__name__}: {remedy}")
    if values.shape != like.shape:
        shapes = f"{list(values.shape)} for inputs of shape {list(like.shape)}"
        raise WrongResult(f"it returned {what} of shape {shapes}: {remedy}")
    if not values.isfinite().all():
        raise WrongResult(f"it returned {what} that are not finite: {remedy}")


def _gradient(losses: Any, logps: Tensor, remedy: str, like: Tensor | None = None) -> Tensor:
    """The gradient of the losses, which have the shape of `like`, in logps. WrongResult without."""
    _check(losses, logps if like is None else like, "losses", remedy)
    if not losses.requires_grad:
        raise WrongResult("its losses have no gradient: they have to depend on the logps")
    [gradient] = torch.autograd.grad(losses.sum(), logps, materialize_grads=True)
    if not gradient.isfinite().all():
        raise WrongResult(
            "its gradient is not finite, such as that of a root at 0, also where the mask is 0"
        )
    return gradient
