"""The side of the tests: values of the program, as copies and as references to it.

`ask` has a function called in the program's process. `decode` makes the value of what comes back.
What a reference can do is at the end: operators and methods that ask.
"""

import builtins
import importlib
import math
import operator
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, BinaryIO, ClassVar, NoReturn

from rl2.rewards.remote.connection import send
from rl2.rewards.remote.server import (
    enter,
    finish,
    finish_enter,
    finish_leave,
    finish_next,
    leave,
    plain_form,
    public_names,
)
from rl2.rewards.remote.values import IMMUTABLE, PUT_TOGETHER, SHOWN_AS, TAKE_APART


class Reference:
    """A value of the program, for the tests."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return [name for name in ask(public_names, self) if name not in Remote.judges]
        if name.startswith("__") and name not in ("__name__", "__doc__", "__dict__"):
            raise AttributeError(name)
        return ask(getattr, self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        ask(setattr, self, name, value)

    def __delattr__(self, name: str) -> None:
        ask(delattr, self, name)


class Remote(Reference):
    """A value of the program of which the tests have no copy."""

    __slots__ = ("_rl2_number", "_rl2_shown_as")
    calls: ClassVar[BinaryIO]
    results: ClassVar[BinaryIO]
    num_calls: ClassVar[int] = 0
    judges: ClassVar[set[str]] = set()  # names that the program must not provide
    known: ClassVar[dict[int, Any]] = {}  # Remotes and exception classes, by their number
    functions: ClassVar[list[Callable]] = [bool]  # of the tests, which the program may call, from 1

    def __init__(self, number: int, shown_as: str):
        object.__setattr__(self, "_rl2_number", number)
        object.__setattr__(self, "_rl2_shown_as", shown_as)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # what isinstance() sees
        return SHOWN_AS.get(self._rl2_shown_as, Remote)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        Remote.num_calls += 1
        return ask(self, *arguments, **keywords)

    def __instancecheck__(self, instance: Any) -> bool:
        return is_reference(instance) and ask(isinstance, instance, self)

    def __subclasscheck__(self, subclass: Any) -> bool:
        return is_reference(subclass) and ask(issubclass, subclass, self)

    def __enter__(self) -> Any:
        return ask(enter, self)

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> Any:
        return ask(leave, self, kind, error)

    def __await__(self) -> Iterator[Any]:
        yield from ()
        return ask(finish, self)

    def __aiter__(self) -> Any:
        return ask(aiter, self)

    async def __anext__(self) -> Any:
        return ask(finish_next, self)

    async def __aenter__(self) -> Any:
        return ask(finish_enter, self)

    async def __aexit__(self, kind: Any, error: Any, traceback: Any) -> Any:
        return ask(finish_leave, self, kind, error)


def is_reference(value: Any) -> bool:
    return issubclass(type(value), Reference)


def form_of(reference: Any) -> tuple[bool, Any]:
    """Whether a reference has a plain form that can be compared with other values, and that."""
    if type(reference) is Remote:
        return ask(plain_form, reference)
    return True, reference._rl2_form


def ask(function: Callable, *arguments: Any, **keywords: Any) -> Any:
    """Returns what a function returns or raises that is called in the server."""
    request: tuple = ("call", function, arguments, keywords)
    while True:
        try:
            send(Remote.calls, request, Requests)
            kind, *parts = Answers(Remote.results).load()
        except (EOFError, OSError):
            sys.stderr.write("the program has ended")
            os._exit(1)  # no test can catch this
        if kind == "result":
            break
        request = call_function(*parts)
    value, error = parts
    if error is None:
        return decode(value)
    raise decode_error(*error)


def call_function(number: int, arguments: Any, keywords: Any) -> tuple:
    """Calls a function of the tests for the program. Returns the message with its result."""
    try:
        value = Remote.functions[number](*decode(arguments), **decode(keywords))
        return "result", value, None
    except Exception as error:
        return "result", None, error


class Requests(pickle.Pickler):
    def persistent_id(self, value: Any) -> int | None:
        kind = type(value)
        if issubclass(kind, Reference):
            return value._rl2_number
        if issubclass(kind, BaseException) and hasattr(value, "_rl2_number"):
            return value._rl2_number
        if kind is FunctionType and value.__globals__["__name__"] == "tests":
            Remote.functions.append(value)
            return 1 - len(Remote.functions)
        return None


class Answers(pickle.Unpickler):
    """Whatever the program sends becomes plain values, or an error."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"the program sent {module}.{name}")


# What the server does with a Remote
FORWARDED: dict[str, Callable] = {
    **{f"__{f.__name__}__": f for f in (len, iter, next, hash, bool, int, float, complex)},
    **{f"__{f.__name__}__": f for f in (round, abs, bytes, reversed)},
    **{f"__{f.__name__}__": f for f in (math.floor, math.ceil, math.trunc)},
    **{f"__{name}__": getattr(operator, name) for name in ("index", "neg", "pos", "invert")},
    **{f"__{name}__": getattr(operator, name) for name in ("getitem", "setitem", "delitem")},
    "__contains__": operator.contains,
    "__fspath__": os.fspath,
}

# What the server does with a copy too
FORWARDED_TEXTS: dict[str, Callable] = {"__str__": str, "__repr__": repr, "__format__": format}

OPERATORS = [
    *("add", "mul", "matmul", "truediv", "floordiv", "mod", "pow"),
    *("lshift", "rshift", "and_", "or_", "xor"),
]

# If one side is a value of the tests, it may be what they expect: they do these with a copy.
COMPARISONS = ["eq", "ne", "lt", "le", "gt", "ge", "sub"]


def _forward(function: Callable) -> Callable:
    return lambda self, *arguments: ask(function, self, *arguments)


def _operate(function: Callable, is_comparison: bool, is_reflected: bool) -> Callable:
    def method(self: Any, other: Any) -> Any:
        if not is_comparison or is_reference(other):
            return ask(function, *((other, self) if is_reflected else (self, other)))
        is_plain, form = form_of(self)
        if not is_plain:
            return NotImplemented
        return function(other, form) if is_reflected else function(form, other)

    return method


def _define_methods() -> dict[type, type]:
    """Gives references their methods. Returns the classes of copies by their type."""
    for name, function in FORWARDED.items():
        setattr(Remote, name, _forward(function))
    for name, function in FORWARDED_TEXTS.items():
        setattr(Reference, name, _forward(function))
    for name in (*OPERATORS, *COMPARISONS):
        function, is_comparison = getattr(operator, name), name in COMPARISONS
        word = name.strip("_")
        setattr(Reference, f"__{word}__", _operate(function, is_comparison, False))
        if name not in COMPARISONS or name == "sub":
            setattr(Reference, f"__r{word}__", _operate(function, is_comparison, True))
    copies = {
        base: type(base.__name__, (Reference, base), {"__hash__": base.__hash__})
        for base in IMMUTABLE
    }
    # The names of a namedtuple may be those of methods of a tuple.
    copies[tuple].__getattribute__ = _get_of_tuple  # type: ignore[method-assign,assignment]
    return copies


def _get_of_tuple(self: Any, name: str) -> Any:
    if name.startswith(("__", "_rl2_")):
        return object.__getattribute__(self, name)
    return ask(getattr, self, name)


COPIES = _define_methods()


def decode(message: Any) -> Any:
    """Returns the value that `encode` has sent.

    Whatever the program sends, no code of it runs here.
    """
    if type(message) is not tuple:
        return message
    kind, *parts = message
    if kind in ("list", "tuple", "set", "frozenset"):
        return getattr(builtins, kind)(map(decode, parts[0]))
    if kind == "dict":
        return {decode(key): decode(value) for key, value in parts[0]}
    return DECODERS[kind](*parts)


def decode_value(name: str, parts: list) -> Any:
    if name not in TAKE_APART:
        raise pickle.UnpicklingError(f"the program sent {name}")
    if name in PUT_TOGETHER:
        return PUT_TOGETHER[name](*map(decode, parts))
    module, _, kind = name.rpartition(".")
    return getattr(importlib.import_module(module), kind)(*map(decode, parts))


def decode_numpy(is_array: bool, dtype: str, shape: tuple, data: Any) -> Any:
    numpy: Any = importlib.import_module("numpy")
    if type(data) is list:
        array = numpy.empty(len(data), object)
        for i, item in enumerate(data):
            array[i] = decode(item)
    else:
        array = numpy.frombuffer(data, dtype).copy()
    return array.reshape(shape) if is_array else array[0]


def decode_copy(number: int, name: str, form: Any) -> Any:
    base = getattr(builtins, name)
    form = base(decode(form))
    copy = COPIES[base].__new__(COPIES[base], form)
    object.__setattr__(copy, "_rl2_form", form)
    object.__setattr__(copy, "_rl2_number", number)
    return copy


def decode_object(number: int, shown_as: str) -> Any:
    if number not in Remote.known:
        Remote.known[number] = Remote(number, shown_as)
    return Remote.known[number]


def decode_type(module: str, name: str) -> Any:
    """Returns a type of Python. Exceptions that skip tests would deceive them."""
    is_own = module.partition(".")[0] in sys.stdlib_module_names - {"unittest"}
    kind = getattr(sys.modules.get(module), name, None) if is_own else None
    is_known = isinstance(kind, type) and (module == "builtins" or issubclass(kind, BaseException))
    return kind if is_known else Exception


def decode_exception(number: int, name: str, base: tuple) -> Any:
    """Returns a class that can be raised and caught, for an exception of the program."""
    if number not in Remote.known:
        kind = decode(base)
        kind = kind if issubclass(kind, BaseException) else Exception
        Remote.known[number] = type(name, (kind,), {"__getattr__": Reference.__getattr__})
    return Remote.known[number]


async def decode_coroutine(number: int) -> Any:
    return ask(finish, decode_object(number, ""))


DECODERS: dict[str, Callable] = {
    "value": decode_value,
    "numpy": decode_numpy,
    "copy": decode_copy,
    "object": decode_object,
    "type": decode_type,
    "exception": decode_exception,
    "coroutine": decode_coroutine,
}


def decode_error(kind: Any, arguments: list, text: str, number: int) -> BaseException:
    kind = decode(kind)
    if not issubclass(kind, BaseException):
        kind = Exception
    try:
        error = kind(*map(decode, arguments))
    except Exception:
        error = kind.__new__(kind, text)
    error._rl2_number = number
    return error
