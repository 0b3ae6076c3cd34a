"""Calls of tools, and how each family of models writes them: the table `SYNTAXES`.

A syntax has a mark in front of a call, and a function that reads what follows the mark.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rl2.env.results import LONE_SURROGATE, check_nesting

MAX_NAME = 200  # characters of a tool's name
JSON_START = re.compile(r"[;,\s]*(?=\{|\[\s*\{)")
NO_SPACE = re.compile(r"\S")
MISTRAL_NAME = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]*)?\s*(?:\[ARGS\])?\s*(?=\{)")
GEMMA_CALL = re.compile(  # up to the mark outside of quotes
    r"""\s*call:([\w.-]+)(?=\{)((?:<\|"\|>.*?<\|"\|>|.)*?)(?:<tool_call\|>|\Z)""", re.DOTALL
)
GEMMA_KEY = re.compile(r"([{,]\s*)([^\s{}\[\],:\"]+)\s*:")
DEEPSEEK_NAME = re.compile(  # of version 3.1, or of 3 and R1
    r"\s*+(?:<｜tool▁call▁begin｜>)?(?:function<｜tool▁sep｜>([^\n<{]++)\n```(?:json)?\n"
    r"|([^\n<{]++)<｜tool▁sep｜>)"
)
KIMI_NAME = re.compile(
    r"\s*+(?:<\|tool_call_begin\|>)?\s*+(?:functions\.)?([\w.-]+?)(?::\d+)?\s*"
    r"<\|tool_call_argument_begin\|>"
)
HARMONY_NAME = re.compile(r"([\w.-]++)(?:<\|channel\|>|<\|constrain\|>|[\s\w])*+<\|message\|>")
XML_NAME = re.compile(r"\s*<function=([^>\n]+)>\s*")
XML_ARGUMENT = re.compile(
    r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|</function>|</tool_call>|\Z)",
    re.DOTALL,
)
GLM_NAME = re.compile(r"\s*([^\s<>{}\[\]]+)\s*")
GLM_ARGUMENT = re.compile(
    r"<arg_key>([^<]*+)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*(?=<arg_key>|</tool_call>|\Z)",
    re.DOTALL,
)


@dataclass
class ToolCall:
    """A call that the model wrote. `error` says why it is not made, or is empty."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    is_unreadable: bool = False  # which the error says


def to_call(name: object, arguments: object) -> ToolCall:
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
    plain_name, plain_arguments = json.loads(LONE_SURROGATE.sub("\ufffd", text))
    check_nesting(plain_arguments)
    return ToolCall(plain_name, plain_arguments)


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


def _from_json(value: object) -> ToolCall:
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


def to_typed(text: str, schema: object) -> Any:
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


def _declared_types(schema: object) -> set[str]:
    """Returns the types that a schema of JSON allows; none if it does not say."""
    if not isinstance(schema, dict):
        return set()
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else set(declared or [])
    for other in schema.get("anyOf") or []:
        types |= _declared_types(other)
    return types | {"null"} if schema.get("nullable") else types


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


DECODER = json.JSONDecoder(parse_constant=_refuse_constant)

Calls = tuple[list[ToolCall], int]  # the calls, and where their text ends
Tools = Sequence[dict]  # the schemas of the tools


@dataclass(frozen=True)
class Syntax:
    """How a family writes calls.

    `read(text, start, tools, closing)` returns the calls after a mark that ends at `start`.
    It raises if there is something else.
    """

    name: str
    opening: str  # a regular expression: the mark in front of a call, or of several
    closing: str  # the mark after it, or ""
    read: Callable[[str, int, Tools, str], Calls]


def _read_json(text: str, start: int, _: Tools, closing: str) -> Calls:
    """{"name": NAME, "arguments": {...}}, or a list of them."""
    calls, end = read_json_calls(text, start)
    return calls, _expect(text, end, closing)


def _read_named_json(text: str, start: int, _: Tools, closing: str, name: re.Pattern) -> Calls:
    """A name, the group of the pattern that matches, and its arguments as JSON."""
    head = _match(name, text, start)
    arguments, end = DECODER.raw_decode(text, skip_space(text, head.end()))
    call = to_call(next(filter(None, head.groups())).strip(), arguments)
    end = skip_space(text, end)
    if text.startswith("```", end):  # of DeepSeek
        end += len("```")
    return [call], _expect(text, end, closing)


def _read_marked_arguments(
    text: str,
    start: int,
    tools: Tools,
    _closing: str,
    name: re.Pattern,
    argument: re.Pattern,
    end_of_call: str,
) -> Calls:
    """A name and arguments, each between marks and without quotes: the schema gives the types.

    The groups of `argument` are its name and its value.
    """
    head = _match(name, text, start)
    tool, end = head[1].strip(), head.end()
    schemas = argument_schemas(tools, tool)
    arguments = {}
    while match := argument.match(text, end):
        key = match[1].strip()
        arguments[key] = to_typed(match[2], schemas.get(key))
        end = match.end()
    return [to_call(tool, arguments)], _expect(text, end, end_of_call)


def _read_mistral(text: str, start: int, tools: Tools, closing: str) -> Calls:
    """A list of calls, or NAME[ARGS]{...}, which may have [CALL_ID] and an id in between."""
    if JSON_START.match(text, start):
        return read_json_calls(text, start)
    return _read_named_json(text, start, tools, closing, MISTRAL_NAME)


def _read_gemma(text: str, start: int, _: Tools, _closing: str) -> Calls:
    """call:NAME{KEY:VALUE}, in which <|"|> quotes texts: JSON with other quotes."""
    call = _match(GEMMA_CALL, text, start)
    pieces = call[2].split('<|"|>')
    pieces[::2] = [GEMMA_KEY.sub(r'\1"\2":', piece) for piece in pieces[::2]]
    pieces[1::2] = map(json.dumps, pieces[1::2])  # between quotes
    return [to_call(call[1], DECODER.decode("".join(pieces)))], call.end()


def _match(pattern: re.Pattern, text: str, start: int) -> re.Match:
    """Returns the match of what every call begins with."""
    match = pattern.match(text, start)
    if match is None:
        raise ValueError(f"expected the name of a tool instead of {text[start : start + 20]!r}")
    return match


def _expect(text: str, start: int, closing: str) -> int:
    """Returns where the mark ends that has to follow. It may be missing at the end of the turn."""
    start = skip_space(text, start)
    if text.startswith(closing, start):
        return start + len(closing)
    if start == len(text):
        return start
    raise ValueError(f"expected {closing} instead of {text[start : start + 20]!r}")


LLAMA = Syntax("llama", r"<\|python_tag\|>", "", _read_json)
# Syntaxes with one mark are tried in this order; the first of them explains a mistake.
SYNTAXES = (
    Syntax("hermes", "<tool_call>", "</tool_call>", _read_json),
    Syntax(
        "qwen3_coder",  # also of Qwen3.5 and Nemotron 3
        "<tool_call>|(?=<function=)",
        "</tool_call>",
        partial(
            _read_marked_arguments, name=XML_NAME, argument=XML_ARGUMENT, end_of_call="</function>"
        ),
    ),
    Syntax(
        "glm",
        "<tool_call>",
        "</tool_call>",
        partial(
            _read_marked_arguments,
            name=GLM_NAME,
            argument=GLM_ARGUMENT,
            end_of_call="</tool_call>",
        ),
    ),
    LLAMA,
    Syntax("mistral", r"\[TOOL_CALLS\]", "", _read_mistral),
    Syntax(
        "deepseek",
        "<｜tool▁calls?▁begin｜>",
        "<｜tool▁call▁end｜>",
        partial(_read_named_json, name=DEEPSEEK_NAME),
    ),
    Syntax(
        "kimi",
        r"<\|tool_calls_section_begin\|>|<\|tool_call_begin\|>",
        "<|tool_call_end|>",
        partial(_read_named_json, name=KIMI_NAME),
    ),
    Syntax("cohere", r"<\|START_ACTION\|>", "<|END_ACTION|>", _read_json),
    Syntax("gemma4", r"<\|tool_call>", "<tool_call|>", _read_gemma),
    Syntax("phi4_mini", r"<\|tool_call\|>", "<|/tool_call|>", _read_json),
    Syntax(
        "gpt_oss",
        rf"to=functions\.(?={HARMONY_NAME.pattern})",
        "<|call|>",
        partial(_read_named_json, name=HARMONY_NAME),
    ),
)
