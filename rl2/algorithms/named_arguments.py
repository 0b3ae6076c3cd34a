"""Functions of the user that ask for inputs by the names of their parameters.

`def loss(log_ratio, advantages, clip)` gets the fields of PolicyInputs that have these names.
"""

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import cached_property
from typing import Any


class NamedArguments:
    """A function that asks for inputs by the names of its parameters, as a function of all inputs.

    A parameter with a default keeps it if there is no input of that name.
    """

    def __init__(self, function: Callable[..., Any], inputs: type[Any]):
        self.__wrapped__ = function
        self.required = required_names(function)
        self.names = [n for n in parameter_names(function) if n in input_names(inputs)]

    def __call__(self, inputs: Any) -> Any:
        return self.__wrapped__(**{name: getattr(inputs, name) for name in self.names})


def takes_whole_inputs(function: Callable[..., Any], inputs: type[Any]) -> bool:
    """Whether the function has one argument, which is not an input by name or annotation."""
    required = required_names(function)
    if len(required) != 1:
        return False
    [name] = required
    annotation = inspect.signature(function).parameters[name].annotation
    return name not in input_names(inputs) or annotation in (inputs, inputs.__name__)


def parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def required_names(function: Callable[..., Any]) -> set[str]:
    """Returns the names of the parameters without which the function cannot be called."""
    names = set()
    for entry in inspect.signature(function).parameters.values():
        is_named = entry.kind not in (entry.VAR_POSITIONAL, entry.VAR_KEYWORD)
        if is_named and entry.default is entry.empty:
            names.add(entry.name)
    return names


def input_names(inputs: type[Any]) -> set[str]:
    """Returns the names of the inputs, also of those that are computed when they are read."""
    computed = {n for n, value in vars(inputs).items() if isinstance(value, cached_property)}
    return computed | {field.name for field in fields(inputs)}
