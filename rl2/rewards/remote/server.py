"""The side of the program: runs it, and makes the calls that the tests ask for.

`serve` is the main function. Those at the end of the file are only called for the tests.
"""

import asyncio
import builtins
import functools
import pickle
import sys
from types import CoroutineType, GeneratorType, ModuleType
from typing import Any, BinaryIO, ClassVar, NoReturn

from rl2.rewards.remote.connection import connect, send
from rl2.rewards.remote.values import (
    COLLECTIONS,
    IMMUTABLE,
    MUTABLE,
    SCALARS,
    TAKE_APART,
    is_numpy,
    type_name,
)


class Server:
    calls: ClassVar[BinaryIO]
    results: ClassVar[BinaryIO]


def serve(program: str) -> NoReturn:
    """Runs the program, which defines functions and classes. Then it makes calls for the tests."""
    Server.calls, Server.results = connect()
    module = ModuleType("program")
    sys.modules["program"] = module
    Objects.number(module)
    exec(compile(program, "program", "exec"), vars(module))
    while True:
        answer_call()


def answer_call() -> tuple | None:
    """Makes the next call. If the result of a function of the tests comes instead, returns it."""
    kind, *parts = Calls(Server.calls).load()
    if kind == "result":
        return tuple(parts)
    function, arguments, keywords = parts
    value, error = None, None
    try:
        value = encode(function(*arguments, **keywords))
    except BaseException as exception:
        error = encode_error(exception)
    send(Server.results, ("result", value, error))
    return None


def call_back(number: int, *arguments: Any, **keywords: Any) -> Any:
    """Calls a function of the tests, which the program got as an argument."""
    send(Server.results, ("call", number, encode(list(arguments)), encode(keywords)))
    while True:
        answer = answer_call()
        if answer is not None:
            value, error = answer
            if error is not None:
                raise error
            return value


class Calls(pickle.Unpickler):
    def persistent_load(self, number: int) -> Any:
        if number >= 0:
            return Objects.values[number]
        return functools.partial(call_back, -number)


class Objects:
    """The values of the program that the tests have as references, by their number."""

    values: ClassVar[list[Any]] = []
    numbers: ClassVar[dict[int, int]] = {}  # by id(), so that an object has one number

    @classmethod
    def number(cls, value: Any) -> int:
        if id(value) not in cls.numbers:
            cls.numbers[id(value)] = len(cls.values)
            cls.values.append(value)
        return cls.numbers[id(value)]


def encode(value: Any) -> Any:
    """Returns the value as scalars, lists and tuples, for `decode`."""
    kind = type(value)
    if kind in SCALARS:
        return value
    if kind in COLLECTIONS:
        return kind.__name__, [encode(item) for item in value]
    if kind is dict:
        return "dict", [(encode(key), encode(item)) for key, item in value.items()]
    name = type_name(kind)
    if name in TAKE_APART:
        return "value", name, [encode(part) for part in TAKE_APART[name](value)]
    if is_numpy(value):
        is_object = value.dtype.kind == "O"
        data = [encode(item) for item in value.flat] if is_object else value.tobytes()
        return "numpy", kind.__name__ == "ndarray", value.dtype.str, value.shape, data
    if isinstance(value, type):
        return encode_type(value)
    if isinstance(value, CoroutineType):
        return "coroutine", Objects.number(value)
    for base, take in IMMUTABLE.items():
        if isinstance(value, base):
            return "copy", Objects.number(value), base.__name__, encode(take(value))
    shown_as = next(
        (base.__name__ for base in (*MUTABLE, GeneratorType) if isinstance(value, base)), ""
    )
    return "object", Objects.number(value), shown_as


def encode_type(kind: type) -> tuple:
    if getattr(builtins, kind.__name__, None) is kind:
        return "type", "builtins", kind.__name__
    if not issubclass(kind, BaseException):
        return "object", Objects.number(kind), "type"
    if kind.__module__ in sys.modules and kind.__module__ not in ("program", "__main__"):
        return "type", kind.__module__, kind.__qualname__
    base = next(base for base in kind.__mro__[1:] if issubclass(base, BaseException))
    return "exception", Objects.number(kind), kind.__name__, encode_type(base)


def encode_error(error: BaseException) -> tuple:
    try:
        arguments = [encode(argument) for argument in error.args]
        return encode_type(type(error)), arguments, str(error), Objects.number(error)
    except Exception:
        return ("type", "builtins", "Exception"), [], type(error).__name__, Objects.number(error)


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def finish(awaitable: Any) -> Any:
    """Returns what an awaitable of the program returns."""

    async def wait() -> Any:
        return await awaitable

    return event_loop().run_until_complete(wait())


def public_names(module: Any) -> list[str]:
    """Returns what `from module import *` imports."""
    names = [name for name in vars(module) if not name.startswith("_")]
    return list(getattr(module, "__all__", names))


def plain_form(value: Any) -> tuple[bool, Any]:
    """Whether the object is a list, dict, set ... of a class of its own, and its content."""
    for base, take in MUTABLE.items():
        if isinstance(value, base):
            return True, take(value)
    return False, None


def enter(value: Any) -> Any:
    return type(value).__enter__(value)


def leave(value: Any, kind: Any, error: Any) -> Any:
    return type(value).__exit__(value, kind, error, None)


def finish_next(value: Any) -> Any:
    return finish(anext(value))


def finish_enter(value: Any) -> Any:
    return finish(type(value).__aenter__(value))


def finish_leave(value: Any, kind: Any, error: Any) -> Any:
    return finish(type(value).__aexit__(value, kind, error, None))
