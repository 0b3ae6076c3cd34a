"""Functions that are chosen by name and that ask by parameter name for what they need.

A config key such as `actor.loss` holds a name of a table, or `path/to/file.py:function`. The
parameters of the function say which inputs and which settings it uses. So the checks of the config
know which keys have an effect, and a new function needs no entry anywhere else.

An entry of a table, or of a file, is the function itself, or a named tuple that has the function as
`compute` and declares more about it, such as `PolicyLoss` in algorithms/losses.py.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from rl2.config.synonyms import explain_algorithm
from rl2.user_files import import_file

Function = Callable[..., Any]


def find_entry(name: str, table: Mapping[str, Any], key: str) -> Any:
    """The entry that the config key `key` names: one of `table`, or `file.py:function`.

    ValueError if there is no such entry, file or function, or if the file fails on import.
    """
    if name in table:
        return table[name]
    file, attribute = own_file(name)
    if Path(name).suffix == ".py":
        raise ValueError(f"{key}={name}: name the function in it, as {key}={name}:FUNCTION")
    if file.suffix != ".py":
        choices = ", ".join(table)
        algorithm = explain_algorithm(name)
        hint = f"{algorithm}; or " if algorithm else ""
        raise ValueError(
            f"{key}={name}: {hint}choose {choices}, or your own as path/to/file.py:function"
        )
    path = name.rpartition(":")[0]
    names = _run_file(file, f"{key}={path}")
    entry = names.get(attribute)
    if not callable(function_of(entry)):
        raise ValueError(
            f"{key}={name}: {path} has no function {attribute}; it has {_list_functions(names)}"
        )
    return entry


def own_file(name: str) -> tuple[Path, str]:
    """(file, name in it) of `path/to/file.py:function`."""
    path, _, attribute = name.rpartition(":")
    return Path(path).expanduser().resolve(), attribute


def function_of(entry: Any) -> Function:
    """The function of an entry, which may be the entry itself."""
    function: Function = getattr(entry, "compute", entry)
    return function


def find_function(name: str, table: Mapping[str, Any], key: str) -> Function:
    """The function of the entry that the config key `key` names, see `find_entry`."""
    return function_of(find_entry(name, table, key))


def choose_function(name: str, table: Mapping[str, Any], key: str) -> Callable[[object], Any]:
    """`find_function` as a function of one object, whose attributes are the inputs."""
    return partial(call_by_name, find_function(name, table, key))


def argument_names(function: Function) -> tuple[str, ...]:
    """The names of the inputs and settings that the function asks for."""
    return tuple(inspect.signature(function).parameters)


def required_names(function: Function) -> set[str]:
    """The names of the inputs and settings without which the function cannot be called."""
    names = set()
    for entry in inspect.signature(function).parameters.values():
        is_named = entry.kind not in (entry.VAR_POSITIONAL, entry.VAR_KEYWORD)
        if is_named and entry.default is entry.empty:
            names.add(entry.name)
    return names


def call_by_name(function: Function, inputs: object) -> Any:
    """Calls the function with the attributes of `inputs` that its parameters name."""
    names = [name for name in argument_names(function) if hasattr(inputs, name)]
    return function(**{name: getattr(inputs, name) for name in names})


def _list_functions(names: dict[str, Any]) -> str:
    """The functions that a file itself defines."""
    own = []
    for name, entry in names.items():
        is_imported = getattr(function_of(entry), "__module__", "") != names["__name__"]
        if callable(function_of(entry)) and not is_imported:
            own.append(name)
    return ", ".join(own) or "none"


@cache
def _run_file(file: Path, setting: str) -> dict[str, Any]:
    """The names that the file defines. `setting` is where the user named it, for messages."""
    if not file.is_file():
        raise ValueError(f"{setting}: there is no such file")
    try:
        return vars(import_file(file))
    except ValueError as error:
        raise ValueError(f"{setting} {error}") from error
