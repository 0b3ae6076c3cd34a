"""A call of a tool, and the values that its arguments may have."""

import json
import math
from dataclasses import dataclass, field
from typing import Any

from rl2.env.results import MAX_NESTING

# Python writes no number of more than 4,300 digits as text, and JSON is text.
MAX_DIGITS = 4000
MAX_BITS = int(MAX_DIGITS * math.log2(10))
MAX_NAME = 200  # characters of a tool's name


@dataclass
class ToolCall:
    """A call that the model wrote. `error` says what is wrong with its text, or is empty."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def to_call(name: Any, arguments: Any) -> ToolCall:
    """Returns the call, with its arguments as plain JSON by name.

    ValueError if they are something else.
    """
    name = str(name or "")
    if not 0 < len(name) <= MAX_NAME:
        raise ValueError(f"the name of the tool has {len(name)} characters")
    if isinstance(arguments, str):
        arguments = DECODER.decode(arguments)
    if not isinstance(arguments, dict | None):
        raise ValueError("expected the arguments as an object, by name")
    return ToolCall(_to_plain(name), _to_plain(arguments or {}))


def _to_plain(value: Any, levels: int = MAX_NESTING) -> Any:
    """Returns a copy of a value. ValueError if JSON has no such value, or no tool could use it."""
    if isinstance(value, str):
        # Escapes may write halves of characters. Whole ones are joined, others replaced.
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            raise ValueError(f"a number has more than {MAX_DIGITS} digits")
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"the number {value} is not finite")
        return value
    if levels == 0:
        raise ValueError(f"arguments are nested more than {MAX_NESTING} deep")
    if isinstance(value, list | tuple):
        return [_to_plain(item, levels - 1) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {_to_plain(key): _to_plain(item, levels - 1) for key, item in value.items()}
    raise ValueError(f"arguments are values of JSON, {type(value).__name__} is none")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
