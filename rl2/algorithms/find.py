"""Finds the loss or the estimator that a config key such as `actor.loss` names.

It is a name of a table, or `path/to/file.py:function` of the user's: a function of all inputs,
`def loss(x: PolicyInputs)`, or a declaration such as
`Estimator(function, needs=("rewards", "values"))`. A function of the user's is called once with
small inputs before any model loads: a wrong shape would otherwise end a run inside rl2, or be
broadcast and train something else, as a loss of one number ignores `actor.average`.
"""

from collections.abc import Mapping
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
    UnpairedInputs,
    UnpairedLoss,
)
from rl2.user_files import describe_failure, import_file

Declared = TypeVar("Declared", bound=Declaration)


@dataclass(frozen=True)
class Choices(Generic[Declared]):
    """What a config key may name."""

    key: str
    built_in: Mapping[str, Declared]
    kinds: tuple[type[Declared], ...]  # a function without a declaration is of the first one

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
        entry: Any = getattr(_import_once(_file_of(name)), attribute, None)
        if isinstance(entry, self.kinds):
            return entry
        if isinstance(entry, Declaration):
            kind, expected = type(entry).__name__, " or ".join(it.__name__ for it in self.kinds)
            raise ValueError(f"{attribute} is declared as {kind}; this key takes {expected}")
        if not callable(entry):
            raise ValueError(f"{path} has no function {attribute}")
        return self.kinds[0](entry)

    def look_up(self, name: str) -> Declared:
        """As `find`, for the rules of other keys: what is not found counts as a plain function."""
        try:
            return self._find(name)
        except ValueError:
            return self.kinds[0](lambda x: x)

    def check(self, name: str) -> None:
        """Raises ValueError for a name that `find` refuses, or if a call of the user's fails.

        The error does not name the key.
        """
        declared = self._find(name)
        if name in self.built_in:
            return
        inputs = _small_inputs(declared)
        try:
            returned = declared.compute(inputs)
        except (Exception, SystemExit) as error:
            reason = describe_failure(error, _file_of(name))
            if "NoneType" in reason:
                reason += (
                    "; an input that takes work is None unless the file declares "
                    f"{type(declared).__name__}(function, needs=...)"
                )
            raise ValueError(f"a call with small inputs fails: {reason}") from error
        _check_result(declared, inputs, returned)


POLICY_LOSS_CHOICES = Choices("actor.loss", POLICY_LOSSES, (PolicyLoss,))
ESTIMATOR_CHOICES = Choices("adv.estimator", ADVANTAGE_ESTIMATORS, (Estimator,))
PREFERENCE_LOSS_CHOICES = Choices("dpo.loss", PREFERENCE_LOSSES, (PreferenceLoss, UnpairedLoss))
CHOICES: dict[str, Choices[Any]] = {  # by the config key
    choices.key: choices
    for choices in (POLICY_LOSS_CHOICES, ESTIMATOR_CHOICES, PREFERENCE_LOSS_CHOICES)
}
find_policy_loss = POLICY_LOSS_CHOICES.find
find_estimator = ESTIMATOR_CHOICES.find
find_preference_loss = PREFERENCE_LOSS_CHOICES.find


def forget_files() -> None:
    """Imports the user's files again where they are used next: they may have changed since."""
    _import_once.cache_clear()


@cache
def _import_once(file: Path) -> ModuleType:
    return import_file(file)


def _file_of(name: str) -> Path:
    return Path(name.rpartition(":")[0]).expanduser().resolve()


def _small_inputs(declared: Declaration) -> Any:
    """The inputs of a call: two prompts with two answers each, the second two of equal rewards.

    Those that the function does not need are None. Log-probabilities have a gradient.
    """
    needs = declared.needs
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0])
    mask = torch.tensor([[0.0, 1, 1, 0], [0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 0]])
    logps = -0.1 * (1 + torch.arange(16) % 7).view(4, 4) * mask
    rows: dict[str, Any] = {
        "group": torch.tensor([0, 0, 1, 1]),
        "trajectory": torch.arange(4),
        "mask": mask,
    }
    if isinstance(declared, Estimator):
        return AdvantageInputs(
            rewards=rewards[:, None] * mask,
            **rows,
            gamma=1.0,
            lamda=1.0,
            norm_var=True,
            reward_parts={"reward": RewardPart(rewards, 1.0)},
            values=0.3 * mask if "values" in needs else None,
            old_logps=logps if "old_logps" in needs else None,
            teacher_logps=2 * logps if "teacher_logps" in needs else None,
        )
    if isinstance(declared, PolicyLoss):
        return PolicyInputs(
            logps=logps.clone().requires_grad_(),
            old_logps=2 * logps,
            engine_logps=2 * logps,
            advantages=torch.tensor([0.5, -0.5, 0, 0])[:, None] * mask,
            **rows,
            clip=0.2,
            clip_high=0.2,
            ref_logps=3 * logps if "ref_logps" in needs else None,
            ages=mask if "ages" in needs else None,
        )
    totals = logps.sum(1).requires_grad_()
    gains = totals + 0.2 if "ref_logps" in needs else None
    lengths = mask.sum(1)
    if isinstance(declared, UnpairedLoss):
        return UnpairedInputs(
            logps=totals,
            length=lengths,
            label=rewards > 0,
            beta=0.1,
            desirable_weight=1.0,
            undesirable_weight=1.0,
            gain=gains,
            reference_point=0.2 * rewards if "reference_point" in needs else None,
        )
    return PreferenceInputs(
        chosen_logps=totals[::2],
        rejected_logps=totals[1::2],
        chosen_length=lengths[::2],
        rejected_length=lengths[1::2],
        beta=0.1,
        label_smoothing=0.0,
        target_margin=0.0,
        chosen_gain=None if gains is None else gains[::2],
        rejected_gain=None if gains is None else gains[1::2],
    )


def _check_result(declared: Declaration, x: Any, returned: Any) -> None:
    """ValueError, with what to return, unless the function has returned that for the inputs `x`."""
    if isinstance(declared, Estimator):
        if "values" in declared.needs:
            wanted = "(advantages, returns), both finite [B, T]: the critic learns the returns"
            advantages, returns = _pair(returned, wanted)
            _check_tensor("returns", returns, x.mask, wanted)
        else:
            wanted, advantages = "finite advantages [B, T]", returned
        _check_tensor("advantages", advantages, x.mask, wanted)
        return
    losses: Any = returned
    metrics: Any = {}
    wanted = "the loss of each pair [P], or of each labelled reply [R]"
    if isinstance(declared, PolicyLoss):
        wanted = "(losses, metrics): the loss of each token [b, T], and {name: [b, T]}, or {}"
        losses, metrics = _pair(returned, wanted)
        if not isinstance(metrics, dict):
            raise ValueError(
                f"it returned metrics of type {type(metrics).__name__}: return {wanted}"
            )
    like = x.chosen_logps if isinstance(x, PreferenceInputs) else x.logps
    _check_tensor("losses", losses, like, wanted)
    if "loss" in metrics:
        raise ValueError("choose another name for the metric 'loss', which rl2 logs itself")
    for name, values in metrics.items():
        _check_tensor(f"the metric {name}", values, like, wanted)
    if not losses.requires_grad:
        raise ValueError("its losses have no gradient: they have to depend on the logps")
    [gradient] = torch.autograd.grad(losses.sum(), like, materialize_grads=True)
    if not gradient.isfinite().all():
        raise ValueError(
            "its gradient is not finite, such as that of a root at 0, also where the mask is 0"
        )
    vanishes = isinstance(declared, PolicyLoss) and declared.vanishes_without_advantage
    if vanishes and gradient[(x.advantages == 0) & (x.mask > 0)].any():
        raise ValueError(
            "it has a gradient in tokens of advantage 0, so do not declare "
            "vanishes_without_advantage: rows of such tokens would not be trained"
        )


def _pair(returned: object, wanted: str) -> tuple[Any, Any]:
    if isinstance(returned, tuple) and len(returned) == 2:
        return returned
    raise ValueError(f"it returned a {type(returned).__name__}, no pair: return {wanted}")


def _check_tensor(what: str, values: object, like: Tensor, wanted: str) -> None:
    found = f"of type {type(values).__name__}"
    if isinstance(values, Tensor):
        if values.shape == like.shape and values.isfinite().all():
            return
        found = f"of shape {list(values.shape)} for inputs of shape {list(like.shape)}"
        if values.shape == like.shape:
            found = "that are not finite"
    raise ValueError(f"it returned {what} {found}: return {wanted}")
