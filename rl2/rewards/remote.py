"""Tests of a program that runs in another sandbox, so that no code of it decides the verdict.

This text is the first part of two programs, which are connected by their standard inputs. One calls
`serve(PROGRAM)`, the other calls `check(TESTS, TOKEN)`. In the tests a name of the program is a
`Remote`. The server makes the calls of it and sends the results:

- Values of Python's own types and NumPy's arrays and scalars arrive as copies (VALUES).
- An object of a class of the program that derives from int, str, tuple or another immutable type
  (an IntEnum, a namedtuple) arrives as a copy that also knows its original.
- All else arrives as a Remote, and what is done with it is done by the server.

A comparison of an object with a value that the tests have is never done by the server: neither sees
the program what is expected, nor can its `__eq__` decide. It decides about two objects of its own.
"""

import ast
import asyncio
import builtins
import collections
import functools
import importlib
import inspect
import io
import itertools
import json
import math
import operator
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import (
    CoroutineType,
    FunctionType,
    GeneratorType,
    MappingProxyType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, BinaryIO, ClassVar, NoReturn

SCALARS = (type(None), bool, int, float, str, bytes)  # sent as they are
COLLECTIONS = (list, tuple, set, frozenset)


# Values: a tuple on the way between the processes, whose first item says what the others are.


def _defaultdict(factory: Any, items: dict) -> dict:
    return collections.defaultdict(factory if isinstance(factory, type) else None, items)


# How other types are taken apart, and put together where the type itself does not do it.
TAKE_APART: dict[str, Callable[[Any], tuple]] = {
    "builtins.complex": lambda value: (value.real, value.imag),
    "builtins.range": lambda value: (value.start, value.stop, value.step),
    "builtins.slice": lambda value: (value.start, value.stop, value.step),
    "builtins.bytearray": lambda value: (bytes(value),),
    "builtins.memoryview": lambda value: (value.tobytes(),),
    "builtins.mappingproxy": lambda value: (dict(value),),
    "builtins.dict_keys": lambda value: (list(value),),
    "builtins.dict_values": lambda value: (list(value),),
    "builtins.dict_items": lambda value: (list(value),),
    "collections.deque": lambda value: (list(value), value.maxlen),
    "collections.Counter": lambda value: (dict(value),),
    "collections.OrderedDict": lambda value: (list(value.items()),),
    "collections.defaultdict": lambda value: (value.default_factory, dict(value)),
    "collections.ChainMap": lambda value: tuple(value.maps),
    "fractions.Fraction": lambda value: (value.numerator, value.denominator),
    "decimal.Decimal": lambda value: (str(value),),
    "datetime.date": lambda value: (value.year, value.month, value.day),
    "datetime.time": lambda value: (*_clock(value), value.tzinfo),
    "datetime.datetime": lambda value: (
        *(value.year, value.month, value.day),
        *(*_clock(value), value.tzinfo),
    ),
    "datetime.timedelta": lambda value: (value.days, value.seconds, value.microseconds),
    "datetime.timezone": lambda value: (value.utcoffset(None),),
    "zoneinfo.ZoneInfo": lambda value: (value.key,),
    "uuid.UUID": lambda value: (str(value),),
    "array.array": lambda value: (value.typecode, value.tolist()),
    "types.SimpleNamespace": lambda value: (vars(value),),
    "pathlib.PosixPath": lambda value: (str(value),),
    "pathlib.PurePosixPath": lambda value: (str(value),),
}
PUT_TOGETHER: dict[str, Callable[..., Any]] = {
    "builtins.mappingproxy": MappingProxyType,
    "builtins.dict_keys": lambda keys: dict.fromkeys(keys).keys(),
    "builtins.dict_values": lambda values: dict(enumerate(values)).values(),
    "builtins.dict_items": lambda items: dict(items).items(),
    "collections.defaultdict": _defaultdict,
    "types.SimpleNamespace": lambda names: SimpleNamespace(**names),
}
# The immutable types of which a program may derive classes, and their part of such an object.
IMMUTABLE: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    complex: complex.__complex__,
    str: str.__str__,
    bytes: bytes.__bytes__,
    tuple: lambda value: tuple(tuple.__iter__(value)),
    frozenset: lambda value: frozenset(frozenset.__iter__(value)),
}
MUTABLE: dict[type, Callable[[Any], Any]] = {
    list: lambda value: list(list.__iter__(value)),
    dict: lambda value: dict(dict.items(value)),
    set: lambda value: set(set.__iter__(value)),
    bytearray: lambda value: bytes(value),
    collections.deque: lambda value: collections.deque(collections.deque.__iter__(value)),
}
SHOWN_AS: dict[str, type] = {kind.__name__: kind for kind in (*MUTABLE, type, GeneratorType)}


def _clock(value: Any) -> tuple:
    return value.hour, value.minute, value.second, value.microsecond


def _type_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}".replace("pathlib._local.", "pathlib.")


def is_numpy(value: Any) -> bool:
    """Whether it is an array or a scalar that can be sent as bytes or as a list."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.generic | numpy.ndarray):
        return False
    is_own = type(value).__module__ == "numpy" and type(value).__name__ != "matrix"
    return is_own and value.dtype.kind in "biufcSUmMO"


# The side of the program


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
    """The value as scalars, lists and tuples, for `decode`."""
    kind = type(value)
    if kind in SCALARS:
        return value
    if kind in COLLECTIONS:
        return kind.__name__, [encode(item) for item in value]
    if kind is dict:
        return "dict", [(encode(key), encode(item)) for key, item in value.items()]
    name = _type_name(kind)
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


class Calls(pickle.Unpickler):
    def persistent_load(self, number: int) -> Any:
        if number >= 0:
            return Objects.values[number]
        return functools.partial(call_back, -number)


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


def encode_error(error: BaseException) -> tuple:
    try:
        arguments = [encode(argument) for argument in error.args]
        return encode_type(type(error)), arguments, str(error), Objects.number(error)
    except Exception:
        return ("type", "builtins", "Exception"), [], type(error).__name__, Objects.number(error)


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


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def finish(awaitable: Any) -> Any:
    """What an awaitable of the program returns."""

    async def wait() -> Any:
        return await awaitable

    return event_loop().run_until_complete(wait())


def public_names(module: Any) -> list[str]:
    """What `from module import *` imports."""
    names = [name for name in vars(module) if not name.startswith("_")]
    return list(getattr(module, "__all__", names))


def plain_form(value: Any) -> tuple[bool, Any]:
    """Whether the object is a list, dict, set ... of a class of its own, and its content."""
    for base, take in MUTABLE.items():
        if isinstance(value, base):
            return True, take(value)
    return False, None


# The side of the tests


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


def is_reference(value: Any) -> bool:
    return issubclass(type(value), Reference)


def form_of(reference: Any) -> tuple[bool, Any]:
    """Whether a reference has a plain form that can be compared with other values, and that."""
    if type(reference) is Remote:
        return ask(plain_form, reference)
    return True, reference._rl2_form


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
    """The value that `encode` has sent. Whatever the program sends, no code of it runs here."""
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
    """A type of Python. Exceptions that skip tests would deceive them."""
    is_own = module.partition(".")[0] in sys.stdlib_module_names - {"unittest"}
    kind = getattr(sys.modules.get(module), name, None) if is_own else None
    is_known = isinstance(kind, type) and (module == "builtins" or issubclass(kind, BaseException))
    return kind if is_known else Exception


def decode_exception(number: int, name: str, base: tuple) -> Any:
    """A class that can be raised and caught, for an exception of the program."""
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


def ask(function: Callable, *arguments: Any, **keywords: Any) -> Any:
    """What a function returns or raises that is called in the server."""
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


def check(tests: str, token: str) -> NoReturn:
    """Runs the tests. When all have passed, writes the token, which they do not know."""
    Remote.results, Remote.calls = connect()
    program = decode_object(0, "")
    sys.modules["solution"] = program
    module = ModuleType("tests")
    sys.modules["tests"] = module
    scope = vars(module)
    tree = ast.parse(tests)
    names, Remote.judges = divide_names(tree)
    for name in names - Remote.judges:
        with suppress(AttributeError):
            scope[name] = getattr(program, name)
    if "unittest" in tests:
        unittest: Any = importlib.import_module("unittest")
        unittest.main = lambda *_, **__: None  # what it would run is collected below
    exec(compile(tree, "tests", "exec"), scope)
    collected = list(collect(scope))
    for test in collected:
        run_test(test)
    if not collected:
        for node in tree.body:
            if isinstance(node, ast.If) and is_main_guard(node):
                exec(compile(ast.Module(node.body, []), "tests", "exec"), scope)
    if not Remote.num_calls:
        sys.exit("the tests call nothing of the program")
    sys.stdout.flush()
    os.write(1, token.encode())
    os._exit(0)


def divide_names(tree: ast.Module) -> tuple[set[str], set[str]]:
    """The names in the tests, and all names that the program must not provide.

    Else it could provide what judges it, such as `math` in math.isclose(f(1), 0.5).
    """
    names: set[str] = set()
    called: set[str] = set()
    judges: set[str] = set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called.add(node.func.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            if getattr(node, "module", "") != "solution":
                judges.update(alias.asname or alias.name for alias in node.names)
    # No module can be called: the tests that call bisect(x) mean a function of the program.
    return names, judges | (sys.stdlib_module_names - called)


def is_main_guard(node: ast.If) -> bool:
    """Whether it is `if __name__ == "__main__":`."""
    return ast.unparse(node.test) in ("__name__ == '__main__'", "'__main__' == __name__")


def collect(scope: dict[str, Any]) -> Iterator[Callable]:
    """The tests that pytest would collect: functions, methods of classes, and those of unittest."""
    unittest = sys.modules.get("unittest")
    for name, value in list(scope.items()):
        if getattr(value, "__module__", "") != "tests":
            continue
        if unittest and isinstance(value, type) and issubclass(value, unittest.TestCase):
            suite = unittest.defaultTestLoader.loadTestsFromTestCase(value)
            if suite.countTestCases():
                yield functools.partial(run_suite, suite)
        elif isinstance(value, type) and name.startswith("Test"):
            for method in [name for name in dir(value) if name.startswith("test")]:
                run = functools.partial(run_method, value, method)
                yield from with_arguments(run, getattr(value, method))
        elif isinstance(value, FunctionType) and name.startswith("test"):
            yield from with_arguments(value, value)


def with_arguments(run: Callable, function: Callable) -> Iterator[Callable]:
    """The test once, or once for each set of arguments that pytest's parametrize gives it.

    A function that needs other arguments is none of the tests: they call it.
    """
    marks = [mark for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"]
    choices = []
    given = {"self"}
    for mark in marks:
        names, values = mark.args[:2]
        names = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
        given.update(names)
        choices.append([named_values(names, value) for value in values])
    if needed_arguments(function) - given:
        return
    for choice in itertools.product(*choices):
        arguments: dict[str, Any] = {}
        for part in choice:
            arguments |= part
        yield functools.partial(run, **arguments)


def named_values(names: list[str], value: Any) -> dict[str, Any]:
    if type(value).__name__ == "ParameterSet":  # of pytest.param
        value = value.values
    elif len(names) == 1:
        value = [value]
    return dict(zip(names, value, strict=True))


def needed_arguments(function: Callable) -> set[str]:
    return {
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def run_method(kind: type, name: str, **arguments: Any) -> None:
    """Runs a method of a new object of a class, between what pytest runs before and after it."""
    tests = kind()
    method = getattr(tests, name)
    hooks = ("setup_class", "setup_method", "setup"), ("teardown_method", "teardown_class")
    for before in hooks[0]:
        run_hook(tests, before, method)
    try:
        run_test(functools.partial(method, **arguments))
    finally:
        for after in hooks[1]:
            run_hook(tests, after, method)


def run_hook(tests: Any, name: str, method: Callable) -> None:
    hook = getattr(tests, name, None)
    if hook is not None:
        takes_method = name.endswith("_method") and inspect.signature(hook).parameters
        run_test(functools.partial(hook, method) if takes_method else hook)


def run_test(test: Callable) -> None:
    result = test()
    if inspect.iscoroutine(result):
        asyncio.run(result)


def run_suite(suite: Any) -> None:
    """Runs tests of unittest. AssertionError if one fails, or if all are skipped."""
    result: Any = importlib.import_module("unittest").TestResult()
    suite.run(result)
    for test, text in (*result.failures, *result.errors):
        raise AssertionError(f"{test.id()}: {text.strip().splitlines()[-1]}")
    if not result.wasSuccessful() or result.testsRun == len(result.skipped):
        raise AssertionError("a test passed that was to fail, or all tests are skipped")


def send(stream: BinaryIO, message: tuple, pickler: type = pickle.Pickler) -> None:
    buffer = io.BytesIO()
    pickler(buffer).dump(message)
    stream.write(buffer.getvalue())
    stream.flush()


def connect() -> tuple[BinaryIO, BinaryIO]:
    """The connection to the other side. The standard input is empty from then on."""
    connection = os.dup(0)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return open(connection, "rb"), open(connection, "wb", closefd=False)


def as_json(value: Any) -> Any:
    """The value as JSON has it, where that makes a difference: lists, and texts as keys."""
    if isinstance(value, dict):
        return {_json_key(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if is_numpy(value):
        return value.tolist()
    return value


def _json_key(key: Any) -> str:
    if isinstance(key, str):
        return key
    return json.dumps(key) if isinstance(key, int | float | None) else str(key)
