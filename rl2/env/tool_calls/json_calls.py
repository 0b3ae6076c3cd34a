"""Calls that are written as JSON."""

import re
from typing import Any

from rl2.env.tool_calls.call import DECODER, ToolCall, to_call

JSON_START = re.compile(r"[;,\s]*(?=\{|\[\s*\{)")
NO_SPACE = re.compile(r"\S")


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
