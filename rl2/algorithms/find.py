"""Finds the loss or the estimator that a config key such as `actor.loss` names.

It is a name of a table, or `path/to/file.py:function` of the user's: a function of all inputs,
`def loss(x: PolicyInputs)`, or a declaration such as
`Estimator(function, needs=("rewards", "values"))`. A function of the user's is called once with
small inputs before any model loads: a wrong shape would otherwise end a run inside rl2, or be
broadcast and train something else, as a loss of one number ignores `actor.average`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from rl2.algorithms.advantages import ADVANTAGE_ESTIMATORS, AdvantageInputs, Estimator, RewardPart
from rl2.algorithms.losses import (
    POLICY_LOSSES,
    PREFERENCE_LOSSES,
    Declaration,
    PolicyInputs,
    PolicyLoss,
    PreferenceInputs,
    PreferenceLoss,
)
from rl2.user_files import describe_failure, import_file

Declared = TypeVar("Declared", bound=Declaration)


@dataclass(frozen=True)
class Choices(Generic[Declared]):
    """What a config key may name."""

    key: str
    built_in: Mapping[str, Declared]
    kind: type[Declared]
    # Calls a function of this file once. ValueError, with what to return, for what is wrong.
    trial: Callable[[Declared, Path], None]

    def find(self, name: str) -> Declared:
        """Returns what `name` names. ValueError, with the choices, if there is no such function."""
        try:
            return self._find(name)
        except ValueError as error:
            raise ValueError(f"{self.key}={name}: {error}") from error

    def _find(self, name: str) -> Declared:
        if name in self.built_in:
            return self.built_in[name]
        path, _, attribute = name.rpartition(":")
        if not path.endswith(".py"):
            choices = ", ".join(self.built_in)
            raise ValueError(f"choose {choices}, or your own as path/to/file.py:function")
        if not _file_of(name).is_file():
            raise ValueError(f"no such file {path}")
        entry = getattr(_import_once(_file_of(name)), attribute, None)
        if isinstance(entry, self.kind):
            return entry
        if isinstance(entry, Declaration):
            kind, expected = type(entry).__name__, self.kind.__name__
            raise ValueError(f"{attribute} is declared as {kind}; this key takes {expected}")
        if not callable(entry):
            raise ValueError(f"{path} has no function {attribute}")
        return self.kind(entry)

    def look_up(self, name: str) -> Declared:
        """As `find`, for the rules of other keys: what is not found counts as a plain function."""
        try:
            return self._find(name)
        except ValueError:
            return self.kind(lambda x: x)

    def check(self, name: str) -> None:
        """Raises ValueError for a name that `find` refuses, or if a call of the user's fails.

        The error does not name the key.
        """
        declared = self._find(name)
        if name not in self.built_in:
            self.trial(declared, _file_of(name))


def forget_files() -> None:
    """Imports the user's files again where they are used next: they may have changed since."""
    _import_once.cache_clear()


@cache
def _import_once(file: Path) -> ModuleType:
    return import_file(file)


def _file_of(name: str) -> Path:
    return Path(name.rpartition(":")[0]).expanduser().resolve()


class _TrialRows:
    """Two prompts with two answers each, the second two of equal rewards.

    Each trial has rows of its own, since a function may change its inputs. Those that it does not
    need are None.
    """

    def __init__(self) -> None:
        self.rewards = torch.tensor([1.0, 0.0, 1.0, 1.0])
        self.group = torch.tensor([0, 0, 1, 1])
        self.trajectory = torch.arange(4)
        self.mask = torch.tensor([[0.0, 1, 1, 0], [0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 0]])
        self.logps = -0.1 * (1 + torch.arange(16) % 7).view(4, 4) * self.mask


def _try_estimator(declared: Estimator, file: Path) -> None:
    rows, needs = _TrialRows(), declared.needs
    inputs = AdvantageInputs(
        rewards=rows.rewards[:, None] * rows.mask,
        mask=rows.mask,
        group=rows.group,
        trajectory=rows.trajectory,
        gamma=1.0,
        lamda=1.0,
        norm_var=True,
        reward_parts={"reward": RewardPart(rows.rewards, 1.0)},
        values=0.3 * rows.mask if "values" in needs else None,
        old_logps=rows.logps if "old_logps" in needs else None,
        teacher_logps=2 * rows.logps if "teacher_logps" in needs else None,
    )
    advantages = _call(declared, inputs, file)
    wanted = "finite advantages [B, T]"
    if "values" in needs:
        wanted = "(advantages, returns), both finite [B, T]: the critic learns the returns"
        advantages, returns = _pair(advantages, wanted)
        _check_tensor("returns", returns, rows.mask, wanted)
    _check_tensor("advantages", advantages, rows.mask, wanted)


def _try_policy_loss(declared: PolicyLoss, file: Path) -> None:
    rows = _TrialRows()
    inputs = PolicyInputs(
        logps=rows.logps.clone().requires_grad_(),
        old_logps=2 * rows.logps,
        engine_logps=2 * rows.logps,
        advantages=torch.tensor([0.5, -0.5, 0, 0])[:, None] * rows.mask,
        mask=rows.mask,
        group=rows.group,
        trajectory=rows.trajectory,
        clip=0.2,
        clip_high=0.2,
        ref_logps=3 * rows.logps if "ref_logps" in declared.needs else None,
        ages=1.0 * rows.mask if "ages" in declared.needs else None,
    )
    has_no_advantage = (inputs.advantages == 0) & (inputs.mask > 0)
    wanted = "(losses, metrics): the loss of each token [b, T], and {name: [b, T]}, or {}"
    losses, metrics = _pair(_call(declared, inputs, file), wanted)
    if not isinstance(metrics, dict):
        raise ValueError(f"it returned metrics of type {type(metrics).__name__}: return {wanted}")
    if "loss" in metrics:
        raise ValueError("choose another name for the metric 'loss', which rl2 logs itself")
    for name, values in metrics.items():
        _check_tensor(f"the metric {name}", values, rows.mask, wanted)
    _check_tensor("losses", losses, rows.mask, wanted)
    gradient = _finite_gradient(losses, inputs.logps)
    if declared.vanishes_without_advantage and gradient[has_no_advantage].any():
        raise ValueError(
            "it has a gradient in tokens of advantage 0, so do not declare "
            "vanishes_without_advantage: rows of such tokens would not be trained"
        )


def _try_preference_loss(declared: PreferenceLoss, file: Path) -> None:
    rows = _TrialRows()
    logps = rows.logps.sum(1).requires_grad_()
    inputs = PreferenceInputs(
        logps=logps,
        lengths=rows.mask.sum(1),
        beta=0.1,
        label_smoothing=0.0,
        target_margin=0.0,
        desirable_weight=1.0,
        undesirable_weight=1.0,
        labels=None if declared.in_pairs else rows.rewards > 0,
        gains=logps + 0.2 if "ref_logps" in declared.needs else None,
        reference_point=0.2 * rows.rewards if "reference_point" in declared.needs else None,
    )
    losses = _call(declared, inputs, file)
    like = logps[::2] if declared.in_pairs else logps
    _check_tensor(
        "losses",
        losses,
        like,
        "the loss of each pair [P], or of each reply [R] if it is declared with in_pairs=False",
    )
    _finite_gradient(losses, logps)


def _call(declared: Declaration, inputs: object, file: Path) -> Any:
    try:
        return declared.compute(inputs)
    except (Exception, SystemExit) as error:
        reason = describe_failure(error, file)
        if "NoneType" in reason:
            kind = type(declared).__name__
            reason += (
                "; an input that takes work is None unless the file declares "
                f"{kind}(function, needs=...)"
            )
        raise ValueError(f"a call with small inputs fails: {reason}") from error


def _pair(returned: object, wanted: str) -> tuple[Any, Any]:
    if isinstance(returned, tuple) and len(returned) == 2:
        return returned
    raise ValueError(f"it returned a {type(returned).__name__}, no pair: return {wanted}")


def _check_tensor(what: str, values: object, like: Tensor, wanted: str) -> None:
    if not isinstance(values, Tensor):
        found = f"of type {type(values).__name__}"
    elif values.shape != like.shape:
        found = f"of shape {list(values.shape)} in place of {list(like.shape)}"
    elif not values.isfinite().all():
        found = "that are not finite"
    else:
        return
    raise ValueError(f"it returned {what} {found}: return {wanted}")


def _finite_gradient(losses: Tensor, logps: Tensor) -> Tensor:
    if not losses.requires_grad:
        raise ValueError("its losses have no gradient: they have to depend on the logps")
    [gradient] = torch.autograd.grad(losses.sum(), logps, materialize_grads=True)
    if not gradient.isfinite().all():
        raise ValueError(
            "its gradient is not finite, such as that of a root at 0, also where the mask is 0"
        )
    return gradient


POLICY_LOSS_CHOICES = Choices("actor.loss", POLICY_LOSSES, PolicyLoss, _try_policy_loss)
ESTIMATOR_CHOICES = Choices("adv.estimator", ADVANTAGE_ESTIMATORS, Estimator, _try_estimator)
PREFERENCE_LOSS_CHOICES = Choices(
    "dpo.loss", PREFERENCE_LOSSES, PreferenceLoss, _try_preference_loss
)
CHOICES: dict[str, Choices[Any]] = {  # by the config key
    choices.key: choices
    for choices in (POLICY_LOSS_CHOICES, ESTIMATOR_CHOICES, PREFERENCE_LOSS_CHOICES)
}
find_policy_loss = POLICY_LOSS_CHOICES.find
find_estimator = ESTIMATOR_CHOICES.find
find_preference_loss = PREFERENCE_LOSS_CHOICES.find
