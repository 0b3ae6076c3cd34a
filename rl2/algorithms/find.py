"""Finds the loss or the estimator that a config key such as `actor.loss` names.

It is a name of a table, or `path/to/file.py:function` of the user's: a function of all inputs,
`def loss(x: PolicyInputs)`, or a declaration such as
`Estimator(function, needs=("rewards", "values"))`.
"""

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar, get_args

from rl2.algorithms.advantages import (
    ADVANTAGE_ESTIMATORS,
    AdvantageSetting,
    Estimator,
    Need,
)
from rl2.algorithms.dry_call import (
    WrongResult,
    call_estimator,
    call_policy_loss,
    call_preference_loss,
    call_unpaired_loss,
)
from rl2.algorithms.losses import (
    POLICY_LOSSES,
    PREFERENCE_LOSSES,
    PolicyLoss,
    PolicyNeed,
    PolicySetting,
    PreferenceLoss,
    PreferenceNeed,
    PreferenceSetting,
    UnpairedLoss,
    UnpairedNeed,
    UnpairedSetting,
)
from rl2.user_files import describe_failure, import_file

Declaration = PolicyLoss | Estimator | PreferenceLoss | UnpairedLoss
Declared = TypeVar("Declared", bound=Declaration)
DECLARATIONS = (PolicyLoss, Estimator, PreferenceLoss, UnpairedLoss)


@dataclass(frozen=True)
class Kind:
    """A kind of function: those with one type of inputs."""

    declaration: type[Declaration]
    settings: tuple[str, ...]  # that a declaration may list
    needs: tuple[str, ...]  # that a declaration may list
    call: Callable[[Any], None]  # the dry call

    def check(self, declared: Declaration) -> None:
        """ValueError for names that do not exist, and for a function of several arguments."""
        _check_names("it declares the settings", declared.settings, self.settings)
        _check_names("it declares the needs", declared.needs, self.needs)
        parameters = inspect.signature(declared.compute).parameters.values()
        optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        required = [p.name for p in parameters if p.kind not in optional and p.default is p.empty]
        if len(required) != 1:
            has = ", ".join(required) or "nothing"
            raise ValueError(
                f"it takes {has}: write a function of one argument x, which has all inputs, as "
                "x.mask"
            )


@dataclass(frozen=True)
class Choices(Generic[Declared]):
    """What a config key may name."""

    key: str
    built_in: Mapping[str, Declared]
    kinds: tuple[Kind, ...]  # a function without a declaration is of the first one

    def find(self, name: str) -> Declared:
        """Returns the declaration that `name` names. ValueError if there is none."""
        try:
            return self._find(name)
        except ValueError as error:
            raise ValueError(f"{self.key}={name}: {error}") from error

    def look_up(self, name: str) -> Declared | None:
        """Returns the declaration, or None if there is none, which `problems` explains."""
        try:
            return self._find(name)
        except ValueError:
            return None

    def settings_of(self, name: str) -> tuple[str, ...]:
        """Returns the settings that a function reads; () if there is no such function."""
        declared = self.look_up(name)
        return () if declared is None else declared.settings

    def problems(self, name: str) -> Iterator[str]:
        """Yields what is wrong with `name` and, if it is the user's, with a call of it."""
        try:
            declared = self._find(name)
        except ValueError as error:
            yield str(error)
            return
        if name in self.built_in:
            return
        try:
            self._kind_of(declared).call(declared)
        except WrongResult as error:
            yield str(error)
        except (Exception, SystemExit) as error:
            reason = describe_failure(error, _file_of(name))
            if "NoneType" in reason:
                reason += (
                    "; an input that takes work is None unless the file declares "
                    f"{type(declared).__name__}(function, needs=...)"
                )
            yield f"a call with small inputs fails: {reason}"

    def _find(self, name: str) -> Declared:
        if name in self.built_in:
            return self.built_in[name]
        path, _, attribute = name.rpartition(":")
        if Path(name).suffix == ".py":
            raise ValueError(f"name the function in it, as {self.key}={name}:FUNCTION")
        if Path(path).suffix != ".py":
            choices = ", ".join(self.built_in)
            raise ValueError(f"choose {choices}, or your own as path/to/file.py:function")
        if not _file_of(name).is_file():
            raise ValueError(f"no such file {path}")
        module = _import_once(_file_of(name))
        entry: Any = getattr(module, attribute, None)
        declared: Any = entry
        if not isinstance(entry, DECLARATIONS):
            declared = self.kinds[0].declaration(entry)
        if not any(isinstance(declared, kind.declaration) for kind in self.kinds):
            kind = type(declared).__name__
            expected = " or ".join(kind.declaration.__name__ for kind in self.kinds)
            raise ValueError(f"{attribute} is declared as {kind}; this key takes {expected}")
        if not callable(declared.compute):
            own = ", ".join(_functions(module)) or "none"
            raise ValueError(f"{path} has no function {attribute}; it has {own}")
        self._kind_of(declared).check(declared)
        found: Declared = declared
        return found

    def _kind_of(self, declared: Declared) -> Kind:
        return next(kind for kind in self.kinds if isinstance(declared, kind.declaration))


POLICY_LOSS = Kind(PolicyLoss, get_args(PolicySetting), get_args(PolicyNeed), call_policy_loss)
ESTIMATOR = Kind(Estimator, get_args(AdvantageSetting), get_args(Need), call_estimator)
PREFERENCE_LOSS = Kind(
    PreferenceLoss, get_args(PreferenceSetting), get_args(PreferenceNeed), call_preference_loss
)
UNPAIRED_LOSS = Kind(
    UnpairedLoss, get_args(UnpairedSetting), get_args(UnpairedNeed), call_unpaired_loss
)
POLICY_LOSS_CHOICES = Choices("actor.loss", POLICY_LOSSES, (POLICY_LOSS,))
ESTIMATOR_CHOICES = Choices("adv.estimator", ADVANTAGE_ESTIMATORS, (ESTIMATOR,))
PREFERENCE_LOSS_CHOICES = Choices("dpo.loss", PREFERENCE_LOSSES, (PREFERENCE_LOSS, UNPAIRED_LOSS))
CHOICES: dict[str, Choices[Any]] = {  # by the config key
    choices.key: choices
    for choices in (POLICY_LOSS_CHOICES, ESTIMATOR_CHOICES, PREFERENCE_LOSS_CHOICES)
}


# What a key names. ValueError if there is none, or its file fails.
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
        function = entry.compute if isinstance(entry, DECLARATIONS) else entry
        if callable(function) and getattr(function, "__module__", "") == module.__name__:
            yield name


def _check_names(words: str, names: Iterable[str], known: Iterable[str]) -> None:
    """ValueError for names that are not known, with those that look like them."""
    unknown = sorted(set(names) - set(known))
    if not unknown:
        return
    near = [other for name in unknown for other in difflib.get_close_matches(name, known, n=1)]
    meant = f" (did you mean {', '.join(near)}?)" if near else ""
    raise ValueError(f"{words} {', '.join(unknown)}{meant}; there are {', '.join(sorted(known))}")
