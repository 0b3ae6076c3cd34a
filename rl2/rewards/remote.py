"""Tests of a program that runs in another sandbox, whose values cannot deceive them.

This text is the first part of two programs, whose standard inputs are connected. One calls
`serve(PROGRAM)`, the other calls `check(TESTS)`. In the tests a name of the program is a `Remote`.
The server makes the calls of it and sends the results. Plain values (None, numbers, text, bytes,
and lists, tuples, sets and dicts of them) arrive as copies. Any other value arrives as a `Remote`.
So the program does not get what the tests expect, unless they hand it over in a call, and no method
of the program takes part in a comparison.
"""

import ast
import builtins
import os
import pickle
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FunctionType, ModuleType
from typing import Any, BinaryIO, ClassVar, NoReturn

COLLECTIONS = (list, tuple, set, frozenset)
SCALARS = (bool, int, float, str, bytes)
PLAIN = {*COLLECTIONS, *SCALARS, dict, type(None)}
VALUES: list[Any] = []  # of the program, for which the tests have a Remote


class Remote:
    """A value of the program, for the tests."""

    streams: ClassVar[tuple[BinaryIO, BinaryIO]]  # from the server, and to it
    num_calls: ClassVar[int] = 0

    def __init__(self, number: int):
        self._rl2_number = number  # in VALUES of the server

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return ask(getattr, self, name)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        Remote.num_calls += 1
        return ask(self, *arguments, **keywords)

    def __bool__(self) -> NoReturn:
        raise TypeError("the program returned a value that is not plain")


class Requests(pickle.Pickler):
    def persistent_id(self, value: Any) -> int | None:
        return value._rl2_number if type(value) is Remote else None


class Answers(pickle.Unpickler):
    """Whatever the program sends becomes plain values and Remotes, or an error."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"the program sent {module}.{name}")

    def persistent_load(self, number: int) -> Remote:
        return Remote(number)


def ask(function: Callable, *arguments: Any, **keywords: Any) -> Any:
    """What a function returns or raises that is called in the server."""
    answers, requests = Remote.streams
    try:
        Requests(requests).dump((function, arguments, keywords))
        requests.flush()
        value, error = Answers(answers).load()
    except (EOFError, OSError):
        sys.stderr.write("the program has ended")
        os._exit(1)  # no test can catch this
    if error is None:
        return value
    name, text = error
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        raise kind(text)
    raise Exception(f"{name}: {text}")


def check(tests: str) -> None:
    """Runs the tests, and those of their functions whose names begin with test_."""
    Remote.streams = connect()
    program = Remote(0)
    sys.modules["solution"] = program  # type: ignore[assignment]
    tree = ast.parse(tests)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    scope: dict[str, Any] = {"__name__": "tests"}
    # The program must not provide what judges it, such as `math` in math.isclose(f(1), 0.5).
    for name in names - sys.stdlib_module_names - set(dir(builtins)):
        with suppress(AttributeError):
            scope[name] = getattr(program, name)
    exec(compile(tree, "tests", "exec"), scope)
    for name, value in list(scope.items()):
        if name.startswith("test_") and isinstance(value, FunctionType):
            value()
    if not Remote.num_calls:
        sys.exit("the tests call nothing of the program")


class Calls(pickle.Unpickler):
    def persistent_load(self, number: int) -> Any:
        return VALUES[number]


class Results(pickle.Pickler):
    def persistent_id(self, value: Any) -> int | None:
        if type(value) in PLAIN:
            return None
        VALUES.append(value)
        return len(VALUES) - 1


def serve(program: str) -> None:
    """Runs the program, which defines functions and classes. Then it makes calls for the tests."""
    calls, results = connect()
    module = ModuleType("program")
    sys.modules["program"] = module
    VALUES.append(module)
    exec(compile(program, "program", "exec"), vars(module))
    while True:
        function, arguments, keywords = Calls(calls).load()
        value, error = None, None
        try:
            value = plain(function(*arguments, **keywords))
        except Exception as exception:
            error = type(exception).__name__, str(exception)
        Results(results).dump((value, error))
        results.flush()


def plain(value: Any) -> Any:
    """The value without subclasses of the plain types: a Counter becomes a dict."""
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    for collection in COLLECTIONS:
        if isinstance(value, collection):
            return collection(map(plain, value))
    scalar: Any
    for scalar in SCALARS:
        if isinstance(value, scalar):
            return scalar(value)
    return value


def connect() -> tuple[BinaryIO, BinaryIO]:
    """The connection to the other side. The standard input is empty from then on."""
    connection = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return open(connection, "rb"), open(connection, "wb", closefd=False)
