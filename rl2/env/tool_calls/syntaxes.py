"""How each family of models writes calls of tools: the table `SYNTAXES`.

A syntax has a mark in front of a call, and a function that reads what follows the mark.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from rl2.env.tool_calls.call import (
    DECODER,
    JSON_START,
    ToolCall,
    argument_schemas,
    read_json_calls,
    skip_space,
    to_call,
    to_typed,
)

Calls = tuple[list[ToolCall], int]  # the calls, and where their text ends
Tools = Sequence[dict]  # the schemas of the tools
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
