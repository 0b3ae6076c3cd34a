"""Functions that are chosen by name and that ask by parameter name for what they need.

A config key such as `actor.loss` holds a name of a table, or `path/to/file.py:function`. The
parameters of the function say which inputs and which settings it uses. So the checks of the config
know which keys have an effect, and a new function needs no entry anywhere else.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

Function = Callable[..., Any]


def find_function(name: str, table: Mapping[str, Function], key: str) -> Function:
    """The function that the config key `key` names: an entry of `table`, or `file.py:function`.

    ValueError if there is no such entry, file or function, or if the file fails on import.
    """
    if name in table:
        return table[name]
    path, colon, attribute = name.rpartition(":")
    if not colon or not path.endswith(".py"):
        choices = ", ".join(table)
        raise ValueError(f"{key}={name}: choose {choices}, or your own as path/to/file.py:function")
    function: Function | None = getattr(_load_file(path, key), attribute, None)
    if function is None or not callable(function):
        raise ValueError(f"{key}={name}: {path} has no function {attribute}")
    return function


def argument_names(function: Function) -> tuple[str, ...]:
    """The names of the inputs and settings that the function asks for."""
    return tuple(inspect.signature(function).parameters)


def call_by_name(function: Function, available: Mapping[str, Any]) -> Any:
    """Calls the function with those of the `available` values that its parameters name.

    TypeError if the function asks for a value that is not there and has no default for it.
    """
    parameters = inspect.signature(function).parameters
    required = [name for name, p in parameters.items() if p.default is p.empty]
    missing = [name for name in required if name not in available]
    if missing:
        raise TypeError(
            f"{function.__name__} asks for {', '.join(missing)}; there are {', '.join(available)}"
        )
    return function(**{name: available[name] for name in parameters if name in available})


@cache
def _load_file(path: str, key: str) -> Any:
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise ValueError(f"{key}={path}: there is no such file")
    name = f"rl2_user_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{key}={path}: the file fails on import: {reason}") from error
    return module
