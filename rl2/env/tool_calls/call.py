"""A call of a tool, the values that its arguments may have, and calls that are written as JSON."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rl2.env.results import MAX_NESTING, check_nesting

MAX_NAME = 200  # characters of a tool's name
JSON_START = re.compile(r"[;,\s]*(?=\{|\[\s*\{)")
NO_SPACE = re.compile(r"\S")


@dataclass
class ToolCall:
    """A call that the model wrote. `error` says why it is not made, or is empty."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    is_unreadable: bool = False  # which the error says


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


def read_json_calls(text: str, start: int) -> tuple[list[ToolCall], int]:
    """Returns the calls in JSON values, one after another, each a call or a list of calls."""
    calls: list[ToolCall] = []
    place = JSON_START.match(text, start)
    position = place.end() if place else skip_space(text, start)
    while place or not calls:
        value, position = DECODER.raw_decode(text, position)
        calls += map(_from_json, value if isinstance(value, list) else [value])
        if not calls:
            raise ValueError("the list has no call")
        place = JSON_START.match(text, position)
        position = place.end() if place else position
    return calls, position


def _from_json(value: Any) -> ToolCall:
    """Returns the call in an object: OpenAI's, with its field `function`, or what is in there."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        raise ValueError("expected an object with the name and the arguments")
    arguments = value.get("arguments", value.get("parameters"))
    return to_call(value.get("name", value.get("tool_name")), arguments)


def skip_space(text: str, start: int) -> int:
    """Returns the place of the next character other than a space, or the end."""
    place = NO_SPACE.search(text, start)
    return place.start() if place else len(text)


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
