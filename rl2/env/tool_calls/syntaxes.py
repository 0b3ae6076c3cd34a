"""How each family of models writes calls of tools: `SYNTAXES`.

A syntax has a mark in front of a call. A class for each form reads what follows the mark.
"""

import json
import re
from dataclasses import dataclass

from rl2.env.tool_calls.call import DECODER, ToolCall, to_call
from rl2.env.tool_calls.json_calls import JSON_START, read_json_calls, read_json_object, skip_space
from rl2.env.tool_calls.python_calls import read_loose_calls, read_python_calls
from rl2.env.tool_calls.schemas import Schemas, declared_types, to_typed

Calls = tuple[list[ToolCall], int]  # the calls, and where their text ends


@dataclass(frozen=True)
class Syntax:
    """How a family writes calls. `read` is that of a subclass."""

    name: str
    opening: str  # a regular expression: the mark in front of a call, or of several
    closing: str  # the mark after it, or ""
    form: str  # a call as the model should write it, for messages

    def read(self, text: str, start: int, schemas: Schemas) -> Calls:
        """Returns the calls after a mark that ends at `start`.

        Raises if there is something else.
        """
        raise NotImplementedError


class JsonSyntax(Syntax):
    """{"name": NAME, "arguments": {...}}, or a list of them."""

    def read(self, text: str, start: int, schemas: Schemas) -> Calls:
        calls, end = read_json_calls(text, start)
        return calls, _expect(text, end, self.closing)


@dataclass(frozen=True)
class NamedJsonSyntax(Syntax):
    """A name and its arguments as JSON. The closing mark must follow; others may follow it."""

    name_pattern: re.Pattern  # the name is the group that matches
    last_closing: str = ""

    def read(self, text: str, start: int, schemas: Schemas) -> Calls:
        call, end = _read_named_json(text, start, self.name_pattern)
        end = _expect(text, _skip(text, end, "```"), self.closing)
        if self.last_closing:
            end = _skip(text, end, self.last_closing)
        return [call], end


@dataclass(frozen=True)
class MarkedArgumentsSyntax(Syntax):
    """A name and arguments, each between marks and without quotes: the schema gives the types."""

    name_pattern: re.Pattern
    argument_pattern: re.Pattern  # its groups are the name and the value
    end_of_call: str  # must follow the arguments; `closing` may follow it

    def read(self, text: str, start: int, schemas: Schemas) -> Calls:
        head = _match(self.name_pattern, text, start)
        name, end = head[1].strip(), head.end()
        properties = schemas.get(name, {})
        arguments = {}
        while match := self.argument_pattern.match(text, end):
            key = match[1].strip()
            arguments[key] = to_typed(match[2], declared_types(properties.get(key)))
            end = match.end()
        call = to_call(name, arguments)
        end = _expect(text, end, self.end_of_call)
        if self.end_of_call != self.closing:
            end = _skip(text, end, self.closing)
        return [call], end


class PythonSyntax(Syntax):
    """[NAME(KEY=VALUE), ...] between marks."""

    def read(self, text: str, start: int, schemas: Schemas) -> Calls:
        end = text.find(self.closing, start)
        body = text[start:] if end < 0 else text[start:end]
        try:
            calls = read_python_calls(body)
        except SyntaxError as error:  # quotes and line breaks that are not escaped
            calls = read_loose_calls(body.strip(), error)
        return calls, len(text) if end < 0 else end + len(self.closing)


class LlamaSyntax(Syntax):
    """JSON, or calls of Python up to the next mark."""

    def read(self, text: str, start: int, schemas: Schemas) -> Calls:
        if JSON_START.match(text, start):
            return read_json_calls(text, start)
        end = text.find("<|python_tag|>", start)
        end = len(text) if end < 0 else end
        return read_python_calls(text[start:end]), end


class MistralSyntax(Syntax):
    """A list of calls, or NAME[ARGS]{...}, which may have [CALL_ID] and an id in between."""

    def read(self, text: str, start: int, schemas: Schemas) -> Calls:
        if JSON_START.match(text, start):
            return read_json_calls(text, start)
        call, end = _read_named_json(text, start, MISTRAL_NAME)
        return [call], end


class GemmaSyntax(Syntax):
    """call:NAME{KEY:VALUE}, in which <|"|> quotes texts: JSON with other quotes."""

    def read(self, text: str, start: int, schemas: Schemas) -> Calls:
        name = _match(GEMMA_NAME, text, start)
        pieces = text[name.end() :].split('<|"|>')
        as_json = []
        end = name.end()
        for number, piece in enumerate(pieces):
            if number % 2:  # between quotes
                as_json.append(json.dumps(piece))
            else:
                body, closing, _ = piece.partition("<tool_call|>")
                as_json.append(GEMMA_KEY.sub(r'\1"\2":', body))
                if closing:
                    end += len(body) + len(closing)
                    break
            end += len(piece) + len('<|"|>')
        arguments = DECODER.decode("".join(as_json))
        return [to_call(name[1], arguments)], min(end, len(text))


def _read_named_json(text: str, start: int, pattern: re.Pattern) -> tuple[ToolCall, int]:
    """Returns a call of a name and its arguments as JSON, and where the arguments end."""
    head = _match(pattern, text, start)
    arguments, end = read_json_object(text, head.end())
    name = next(filter(None, head.groups()))
    return to_call(name.strip(), arguments), end


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


def _skip(text: str, start: int, closing: str) -> int:
    """Returns where the mark ends if it follows."""
    after = skip_space(text, start)
    return after + len(closing) if text.startswith(closing, after) else start


MISTRAL_NAME = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]*)?\s*(?:\[ARGS\])?\s*(?=\{)")
GEMMA_NAME = re.compile(r"\s*call:([\w.-]+)(?=\{)")
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

HERMES = JsonSyntax(
    name="hermes",
    opening="<tool_call>",
    closing="</tool_call>",
    form='<tool_call>{"name": "NAME", "arguments": {"KEY": VALUE}}</tool_call>',
)
QWEN3_CODER = MarkedArgumentsSyntax(  # also of Qwen3.5 and Nemotron 3
    name="qwen3_coder",
    opening="<tool_call>|(?=<function=)",
    closing="</tool_call>",
    form="<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>",
    name_pattern=XML_NAME,
    argument_pattern=XML_ARGUMENT,
    end_of_call="</function>",
)
GLM = MarkedArgumentsSyntax(
    name="glm",
    opening="<tool_call>",
    closing="</tool_call>",
    form="<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>",
    name_pattern=GLM_NAME,
    argument_pattern=GLM_ARGUMENT,
    end_of_call="</tool_call>",
)
LLAMA = LlamaSyntax(
    name="llama",
    opening=r"<\|python_tag\|>",
    closing="",
    form='{"name": "NAME", "parameters": {"KEY": VALUE}}',
)
MISTRAL = MistralSyntax(
    name="mistral",
    opening=r"\[TOOL_CALLS\]",
    closing="",
    form='[TOOL_CALLS]NAME[ARGS]{"KEY": VALUE}',
)
DEEPSEEK = NamedJsonSyntax(
    name="deepseek",
    opening="<｜tool▁calls?▁begin｜>",
    closing="<｜tool▁call▁end｜>",
    form='<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{"KEY": VALUE}<｜tool▁call▁end｜>',
    name_pattern=DEEPSEEK_NAME,
    last_closing="<｜tool▁calls▁end｜>",
)
KIMI = NamedJsonSyntax(
    name="kimi",
    opening=r"<\|tool_calls_section_begin\|>|<\|tool_call_begin\|>",
    closing="<|tool_call_end|>",
    form='<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{"KEY": VALUE}'
    "<|tool_call_end|>",
    name_pattern=KIMI_NAME,
    last_closing="<|tool_calls_section_end|>",
)
COHERE = JsonSyntax(
    name="cohere",
    opening=r"<\|START_ACTION\|>",
    closing="<|END_ACTION|>",
    form='<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "NAME", "parameters": '
    '{"KEY": VALUE}}]<|END_ACTION|>',
)
GEMMA4 = GemmaSyntax(
    name="gemma4",
    opening=r"<\|tool_call>",
    closing="<tool_call|>",
    form='<|tool_call>call:NAME{KEY:<|"|>VALUE<|"|>}<tool_call|>',
)
LFM2 = PythonSyntax(
    name="lfm2",
    opening=r"<\|tool_call_start\|>",
    closing="<|tool_call_end|>",
    form="<|tool_call_start|>[NAME(KEY=VALUE)]<|tool_call_end|>",
)
OLMO3 = PythonSyntax(
    name="olmo3",
    opening="<function_calls>",
    closing="</function_calls>",
    form="<function_calls>NAME(KEY=VALUE)</function_calls>",
)
PHI4_MINI = JsonSyntax(
    name="phi4_mini",
    opening=r"<\|tool_call\|>",
    closing="<|/tool_call|>",
    form='<|tool_call|>[{"name": "NAME", "arguments": {"KEY": VALUE}}]<|/tool_call|>',
)
GPT_OSS = NamedJsonSyntax(
    name="gpt_oss",
    opening=rf"to=functions\.(?={HARMONY_NAME.pattern})",
    closing="<|call|>",
    form='to=functions.NAME<|channel|>commentary json<|message|>{"KEY": VALUE}<|call|>',
    name_pattern=HARMONY_NAME,
)
# Syntaxes with one mark are tried in this order; the first of them explains a mistake.
SYNTAXES = (
    HERMES,
    QWEN3_CODER,
    GLM,
    LLAMA,
    MISTRAL,
    DEEPSEEK,
    KIMI,
    COHERE,
    GEMMA4,
    LFM2,
    OLMO3,
    PHI4_MINI,
    GPT_OSS,
)
