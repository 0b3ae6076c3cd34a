"""One call of a user's own function on small inputs, before any model loads.

A wrong shape would otherwise end a run inside rl2, or be broadcast and train something else: a loss
of one number ignores `actor.average`.
"""

from typing import Any

import torch
from torch import Tensor

from rl2.algorithms.advantages import AdvantageInputs, Estimator, RewardPart
from rl2.algorithms.losses import (
    Declaration,
    PolicyInputs,
    PolicyLoss,
    PreferenceInputs,
    UnpairedLoss,
    dpo_loss,
    policy_loss,
    unpaired_loss,
)

# Two prompts with two answers each, of which the second ones earn the same.
GROUP = torch.tensor([0, 0, 1, 1])
REWARDS = torch.tensor([1.0, 0.0, 1.0, 1.0])
MASK = torch.tensor(
    [[0, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 0], [0, 1, 0, 0, 1, 1], [0, 0, 0, 1, 0, 0]]
).float()
LOGPS = -0.1 * (1 + torch.arange(MASK.numel()) % 7).view_as(MASK) * MASK
TAKEN_METRICS = ("loss", "grad_norm", "lr", "skipped", "approx_kl", "kl", "entropy")


class WrongResult(ValueError):
    """What is wrong with the result of the user's function, and what to return."""


def call_once(declared: Declaration) -> None:
    """Raises WrongResult for what the function returns, or what the function raises."""
    if isinstance(declared, Estimator):
        _call_estimator(declared)
        return
    logps = LOGPS.clone().requires_grad_()
    ref_logps = LOGPS - 0.2 * MASK
    advantages = (REWARDS - torch.tensor([0.5, 0.5, 1.0, 1.0]))[:, None] * MASK

    def compute(x: Any) -> Any:
        returned = declared.compute(x)
        _check_losses(declared, x, returned)
        return returned

    if isinstance(declared, PolicyLoss):
        inputs = PolicyInputs(
            logps=logps,
            old_logps=LOGPS - 0.1 * MASK,
            engine_logps=LOGPS - 0.1 * MASK,
            advantages=advantages,
            mask=MASK,
            group=GROUP,
            trajectory=torch.arange(len(MASK)),
            clip=0.2,
            clip_high=0.2,
            ref_logps=ref_logps if "ref_logps" in declared.needs else None,
            ages=MASK if "ages" in declared.needs else None,
        )
        total, _ = policy_loss(compute, inputs, MASK)
    else:
        columns = (logps, ref_logps if declared.needs else None, MASK, MASK)
        if isinstance(declared, UnpairedLoss):
            point = 0.2 * REWARDS if "reference_point" in declared.needs else None
            total, _ = unpaired_loss(compute, *columns, REWARDS, point, beta=0.1)
        else:
            total, _ = dpo_loss(compute, *columns, beta=0.1, label_smoothing=0.0)
    [gradient] = torch.autograd.grad(total, logps, materialize_grads=True)
    if not gradient.isfinite().all():
        raise WrongResult(
            "its gradient is not finite, such as that of a root at 0, also where the mask is 0"
        )
    vanishes = isinstance(declared, PolicyLoss) and declared.vanishes_without_advantage
    if vanishes and gradient[advantages == 0].any():
        raise WrongResult(
            "it has a gradient in tokens of advantage 0, so do not declare "
            "vanishes_without_advantage: rows of such tokens would not be trained"
        )


def _check_losses(declared: Declaration, x: Any, returned: Any) -> None:
    """WrongResult unless the function returns what a loss of these inputs has to."""
    like = x.chosen_logps if isinstance(x, PreferenceInputs) else x.logps
    metrics: dict[Any, Any] = {}
    remedy = "return the loss of each pair [P], or of each labelled reply [R]"
    if isinstance(declared, PolicyLoss):
        remedy = (
            "return (losses, metrics): the loss of each token [b, T], and {name: [b, T]}, or {}"
        )
        returned, metrics = _pair(returned, remedy)
    _check(returned, like, "losses", remedy)
    if not returned.requires_grad:
        raise WrongResult("its losses have no gradient: they have to depend on the logps")
    if not isinstance(metrics, dict):
        raise WrongResult(f"it returned metrics of type {type(metrics).__name__}: {remedy}")
    for name, values in metrics.items():
        if name in TAKEN_METRICS or not isinstance(name, str):
            raise WrongResult(f"choose another name for the metric {name!r}, which rl2 logs itself")
        _check(values, like, f"the metric {name}", remedy)


def _call_estimator(estimator: Estimator) -> None:
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
