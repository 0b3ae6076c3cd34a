"""A call of a tool, and the values that its arguments may have."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rl2.env.results import MAX_NESTING, check_nesting

MAX_NAME = 200  # characters of a tool's name


@dataclass
class ToolCall:
    """A call that the model wrote. `error` says what is wrong with its text, or is empty."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def to_call(name: Any, arguments: Any) -> ToolCall:
    """Returns the call, with its arguments as plain JSON by name.

    ValueError, TypeError or RecursionError if they are something else.
    """
    name = str(name or "")
    if not 0 < len(name) <= MAX_NAME:
        raise ValueError(f"the name of the tool has {len(name)} characters")
    if isinstance(arguments, str):
        arguments = DECODER.decode(arguments)
    if not isinstance(arguments, dict | None):
        raise ValueError("expected the arguments as an object, by name")
    text = json.dumps([name, arguments or {}], ensure_ascii=False, allow_nan=False)
    # Escapes may write halves of characters. Whole ones are joined, others replaced.
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    name, arguments = json.loads(text)
    check_nesting(arguments, MAX_NESTING)
    return ToolCall(name, arguments)


def argument_schemas(tools: Sequence[dict], name: str) -> dict[str, Any]:
    """Returns the schemas of a tool's arguments by their names; none if there is no such tool."""
    for tool in tools:
        if tool["function"]["name"] == name:
            return (tool["function"].get("parameters") or {}).get("properties") or {}
    return {}


def to_typed(text: str, schema: Any) -> Any:
    """Returns the value of an argument that is written without quotes: a text, or JSON.

    "5" is a text if the schema of the argument allows texts, and else a number. Python's True,
    False and None are read too.
    """
    types = _declared_types(schema)
    plain = text.strip()
    plain = {"True": "true", "False": "false", "None": "null"}.get(plain, plain)
    if "string" in types:
        return None if "null" in types and plain == "null" else text
    try:
        value = DECODER.decode(plain)
    except (ValueError, RecursionError):
        return text
    # Texts are written without quotes, so these are its own.
    return text if isinstance(value, str) else value


def _declared_types(schema: Any) -> set[str]:
    """Returns the types that a schema of JSON allows; none if it does not say."""
    if not isinstance(schema, dict):
        return set()
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else {*(declared or [])}
    types = types.union(*map(_declared_types, schema.get("anyOf") or []))
    return types | {"null"} if schema.get("nullable") else types


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
