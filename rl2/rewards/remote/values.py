"""The types of values that the two processes exchange, and how each is taken apart.

Both sides know them: server.py encodes a value of the program, references.py decodes it.
"""

import collections
import json
import sys
from collections.abc import Callable
from types import GeneratorType, MappingProxyType, SimpleNamespace
from typing import Any

SCALARS = (type(None), bool, int, float, str, bytes)  # sent as they are

COLLECTIONS = (list, tuple, set, frozenset)


def _defaultdict(factory: Any, items: dict) -> dict:
    return collections.defaultdict(factory if isinstance(factory, type) else None, items)


def _clock(value: Any) -> tuple:
    return value.hour, value.minute, value.second, value.microsecond


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


def type_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}".replace("pathlib._local.", "pathlib.")


def is_numpy(value: Any) -> bool:
    """Returns whether it is an array or a scalar that can be sent as bytes or as a list."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.generic | numpy.ndarray):
        return False
    is_own = type(value).__module__ == "numpy" and type(value).__name__ != "matrix"
    return is_own and value.dtype.kind in "biufcSUmMO"


def as_json(value: Any) -> Any:
    """Returns the value as JSON has it, where that makes a difference: lists, and texts as keys."""
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
