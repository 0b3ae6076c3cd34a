"""Finds the loss or the estimator that a config key such as `actor.loss` names.

It is a name of a table, or `path/to/file.py:function` of the user's: a function of all inputs,
`def loss(x: PolicyInputs)`, or a declaration such as
`Estimator(function, needs=("rewards", "values"))`.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from rl2.algorithms.advantages import ADVANTAGE_ESTIMATORS, Estimator
from rl2.algorithms.dry_call import WrongResult, call_once
from rl2.algorithms.losses import (
    POLICY_LOSSES,
    PREFERENCE_LOSSES,
    Declaration,
    PolicyLoss,
    PreferenceLoss,
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
        if name.endswith(".py"):
            raise ValueError(f"name the function in it, as {self.key}={name}:FUNCTION")
        if not path.endswith(".py"):
            choices = ", ".join(self.built_in)
            raise ValueError(f"choose {choices}, or your own as path/to/file.py:function")
        if not _file_of(name).is_file():
            raise ValueError(f"no such file {path}")
        module = _import_once(_file_of(name))
        entry: Any = getattr(module, attribute, None)
        if isinstance(entry, self.kinds):
            return entry
        if isinstance(entry, Declaration):
            kind, expected = type(entry).__name__, " or ".join(it.__name__ for it in self.kinds)
            raise ValueError(f"{attribute} is declared as {kind}; this key takes {expected}")
        if not callable(entry):
            own = ", ".join(_functions(module)) or "none"
            raise ValueError(f"{path} has no function {attribute}; it has {own}")
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
        try:
            inspect.signature(declared.compute).bind("x")
        except TypeError as error:
            raise ValueError(f"{error}; write def function(x), where x has all inputs") from error
        try:
            call_once(declared)
        except WrongResult:
            raise
        except (Exception, SystemExit) as error:
            reason = describe_failure(error, _file_of(name))
            if "NoneType" in reason:
                reason += (
                    "; an input that takes work is None unless the file declares "
                    f"{type(declared).__name__}(function, needs=...)"
                )
            raise ValueError(f"a call with small inputs fails: {reason}") from error


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


def _functions(module: ModuleType) -> Iterator[str]:
    """Yields the names of the functions and declarations that a file itself defines."""
    for name, entry in vars(module).items():
        function = entry.compute if isinstance(entry, Declaration) else entry
        if callable(function) and getattr(function, "__module__", "") == module.__name__:
            yield name
