"""Tools: the documented methods of an environment's object."""

import inspect
from collections.abc import Callable
from types import MethodType

from transformers.utils import get_json_schema

from rl2.env.contract import METHOD, METHODS, TOOL
from rl2.env.results import raising_env_error


def object_functions(make_env: Callable) -> dict[str, Callable]:
    """The methods of the objects that `make_env` makes, by the names of their calls.

    A function is called once to see what it makes. EnvError if that fails; ValueError if the
    objects have neither step nor a tool.
    """
    kind = make_env
    if not inspect.isclass(kind):
        with raising_env_error("make_env"):
            kind = type(make_env())
    functions: dict[str, Callable] = {}
    for name, function in inspect.getmembers(kind, inspect.isfunction):
        if name in METHODS:
            functions[METHOD + name] = MethodType(function, kind)
        elif name[0] != "_" and function.__doc__:
            functions[TOOL + name] = MethodType(function, kind)
    if METHOD + "step" not in functions and not list_tools(functions):
        raise ValueError(
            "make_env: expected a method step(message), or public methods with docstrings as tools"
        )
    return functions


def list_tools(functions: dict[str, Callable]) -> list[dict]:
    """The schemas of the tools among the functions. ValueError names the tool that has none."""
    schemas = []
    for name, function in functions.items():
        if name.startswith(TOOL):
            try:
                schemas.append(get_json_schema(function))
            except Exception as error:  # transformers has classes of its own for types and texts
                raise ValueError(
                    f"make_env: the method {function.__name__} has a docstring, so it is a tool, "
                    f"but {error} If it is no tool, let its name begin with _"
                ) from error
    return schemas
