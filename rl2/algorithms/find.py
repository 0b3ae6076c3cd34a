"""Finds the loss or the estimator that a config key such as `actor.loss` names.

It is a name of a table, or `path/to/file.py:function` of the user's. The latter may be

- a declaration: `Estimator(function, needs=("rewards", "values"))`;
- a function of one argument, the inputs: `def loss(x: PolicyInputs)`. It is taken with the defaults
  of the declaration;
- a function of several arguments: `def loss(log_ratio, advantages, clip)`. It gets the inputs that
  its parameters name, and these names are its declaration.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar, get_args

from rl2.algorithms.advantages import (
    ADVANTAGE_ESTIMATORS,
    AdvantageInputs,
    AdvantageSetting,
    Estimator,
    Need,
)
from rl2.algorithms.losses import (
    POLICY_LOSSES,
    PREFERENCE_LOSSES,
    PolicyInputs,
    PolicyLoss,
    PolicyNeed,
    PolicySetting,
    PreferenceInputs,
    PreferenceLoss,
    PreferenceNeed,
    PreferenceSetting,
    UnpairedInputs,
    UnpairedLoss,
    UnpairedNeed,
    UnpairedSetting,
)
from rl2.algorithms.named_arguments import (
    NamedArguments,
    input_names,
    parameter_names,
    takes_whole_inputs,
)
from rl2.algorithms.trial import (
    try_estimator,
    try_policy_loss,
    try_preference_loss,
    try_unpaired_loss,
)
from rl2.user_files import describe_failure, import_file

Declaration = PolicyLoss | Estimator | PreferenceLoss | UnpairedLoss
Declared = TypeVar("Declared", bound=Declaration)
DECLARATIONS = (PolicyLoss, Estimator, PreferenceLoss, UnpairedLoss)
# What a parameter of this name needs, where it is not an input of the same name.
IMPLIED_NEEDS = {
    "margin": "ref_logps",
    "mean_margin": "ref_logps",
    "chosen_gain": "ref_logps",
    "rejected_gain": "ref_logps",
    "gain": "ref_logps",
}


@dataclass(frozen=True)
class Kind:
    """A kind of function: those with one type of inputs."""

    declaration: type[Declaration]
    inputs: type[Any]
    settings: tuple[str, ...]  # that a declaration may list
    needs: tuple[str, ...]  # that a declaration may list
    trial: Callable[[Any], Iterator[str]]


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
        """Yields what is wrong with `name` and, if it is the user's, with the function."""
        try:
            declared = self._find(name)
        except ValueError as error:
            yield str(error)
            return
        if name not in self.built_in:
            wrong = list(self._wrong_names(declared))
            yield from wrong or self._failures(declared, absolute_path(name.rpartition(":")[0]))

    def _find(self, name: str) -> Declared:
        if name in self.built_in:
            return self.built_in[name]
        path, _, attribute = name.rpartition(":")
        if Path(name).suffix == ".py":
            raise ValueError(f"name the function in it, as {self.key}={name}:FUNCTION")
        if Path(path).suffix != ".py":
            choices = ", ".join(self.built_in)
            raise ValueError(f"choose {choices}, or your own as path/to/file.py:function")
        file = absolute_path(path)
        if not file.is_file():
            raise ValueError(f"no such file {path}")
        module = _import_once(file)
        entry: Any = getattr(module, attribute, None)
        declared: Any = entry
        if not isinstance(entry, DECLARATIONS):
            declared = self.kinds[0].declaration(entry)
        if not any(isinstance(declared, kind.declaration) for kind in self.kinds):
            found = type(declared).__name__
            expected = " or ".join(kind.declaration.__name__ for kind in self.kinds)
            raise ValueError(f"{attribute} is declared as {found}; this key takes {expected}")
        if not callable(declared.compute):
            own = ", ".join(_functions(module)) or "none"
            raise ValueError(f"{path} has no function {attribute}; it has {own}")
        kind = self._kind_of(declared)
        named: Declared = declare_by_names(declared, kind.inputs, kind.settings, kind.needs)
        return named

    def _kind_of(self, declared: Declared) -> Kind:
        return next(kind for kind in self.kinds if isinstance(declared, kind.declaration))

    def _wrong_names(self, declared: Declared) -> Iterator[str]:
        """Yields the names of inputs, settings and needs that do not exist."""
        kind = self._kind_of(declared)
        if isinstance(declared.compute, NamedArguments):
            wrong = declared.compute.required - input_names(kind.inputs)
            if wrong:
                asked, choices = _in_words(wrong), _in_words(input_names(kind.inputs))
                yield f"it asks for {asked}; it may ask for {choices}"
        lists: dict[str, tuple[Iterable[str], tuple[str, ...]]] = {
            "settings": (declared.settings, kind.settings),
            "needs": (declared.needs, kind.needs),
        }
        for field, (names, known) in lists.items():
            unknown = set(names) - set(known)
            if unknown:
                yield f"it declares {field}={_in_words(unknown)}; there are {_in_words(known)}"

    def _failures(self, declared: Declared, file: Path) -> Iterator[str]:
        """Yields what a call of the user's function on made-up rows shows."""
        if inspect.iscoroutinefunction(inspect.unwrap(declared.compute)):
            yield "it is async: write it as a plain function"
            return
        kind = self._kind_of(declared)
        try:
            for problem in kind.trial(declared):
                yield f"it {problem}"
        except (Exception, SystemExit) as error:
            reason = describe_failure(error, file)
            if "NoneType" in reason:
                inputs = [x.name for x in fields(kind.inputs) if x.default is None]
                optional = _in_words(set(inputs) - set(kind.settings))
                reason += (
                    f"; {optional} are None unless the file has a declaration "
                    f"{kind.declaration.__name__}(function, needs=...) that asks for them"
                )
            yield f"it fails on made-up rows: {reason}"


POLICY_LOSS = Kind(
    PolicyLoss, PolicyInputs, get_args(PolicySetting), get_args(PolicyNeed), try_policy_loss
)
ESTIMATOR = Kind(
    Estimator, AdvantageInputs, get_args(AdvantageSetting), get_args(Need), try_estimator
)
PREFERENCE_LOSS = Kind(
    PreferenceLoss,
    PreferenceInputs,
    get_args(PreferenceSetting),
    get_args(PreferenceNeed),
    try_preference_loss,
)
UNPAIRED_LOSS = Kind(
    UnpairedLoss,
    UnpairedInputs,
    get_args(UnpairedSetting),
    get_args(UnpairedNeed),
    try_unpaired_loss,
)
POLICY_LOSS_CHOICES = Choices("actor.loss", POLICY_LOSSES, (POLICY_LOSS,))
ESTIMATOR_CHOICES = Choices("adv.estimator", ADVANTAGE_ESTIMATORS, (ESTIMATOR,))
PREFERENCE_LOSS_CHOICES = Choices("dpo.loss", PREFERENCE_LOSSES, (PREFERENCE_LOSS, UNPAIRED_LOSS))
CHOICES: dict[str, Choices[Any]] = {  # by the config key
    choices.key: choices
    for choices in (POLICY_LOSS_CHOICES, ESTIMATOR_CHOICES, PREFERENCE_LOSS_CHOICES)
}


def find_policy_loss(name: str) -> PolicyLoss:
    """Returns what `actor.loss` names. ValueError if there is none, or its file fails."""
    return POLICY_LOSS_CHOICES.find(name)


def find_estimator(name: str) -> Estimator:
    """Returns what `adv.estimator` names. ValueError if there is none, or its file fails."""
    return ESTIMATOR_CHOICES.find(name)


def find_preference_loss(name: str) -> PreferenceLoss | UnpairedLoss:
    """Returns what `dpo.loss` names. ValueError if there is none, or its file fails."""
    return PREFERENCE_LOSS_CHOICES.find(name)


def declare_by_names(
    declared: Declared, inputs: type[Any], settings: tuple[str, ...], needs: tuple[str, ...]
) -> Declared:
    """Lets the parameters of a function declare its settings and needs, if it has several.

    Functions of one argument are returned as they are declared.
    """
    function = declared.compute
    if takes_whole_inputs(function, inputs):
        return declared
    names = parameter_names(function)
    needed = {IMPLIED_NEEDS.get(name, name) for name in names}
    by_name: dict[str, Any] = {
        "compute": NamedArguments(function, inputs),
        "settings": tuple(name for name in names if name in settings),
        "needs": tuple(need for need in needs if need in needed),
    }
    return replace(declared, **by_name)


def absolute_path(path: str) -> Path:
    return Path(path).expanduser().resolve()


def forget_files() -> None:
    """Imports the user's files again where they are used next: they may have changed since."""
    _import_once.cache_clear()


@cache
def _import_once(file: Path) -> ModuleType:
    return import_file(file)


def _functions(module: ModuleType) -> Iterator[str]:
    """Yields the names of the functions and declarations that a file itself defines."""
    for name, entry in vars(module).items():
        function = entry.compute if isinstance(entry, DECLARATIONS) else entry
        if callable(function) and getattr(function, "__module__", "") == module.__name__:
            yield name


def _in_words(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
