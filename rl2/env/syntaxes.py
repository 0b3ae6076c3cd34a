"""How models write calls of tools: one syntax for each family, and the reader of a turn.

A syntax has a mark in front of a call. What follows the mark is a call, or a call with an error: a
text of a model never raises here.
"""

import ast
import json
import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rl2.env.results import MAX_NESTING

# Python writes no number of more than 4,300 digits as text, and JSON is text.
MAX_DIGITS = 4000
MAX_BITS = int(MAX_DIGITS * math.log2(10))
MAX_CALLS = 100  # in a turn
MAX_NAME = 200  # characters of a tool's name
# What begins and ends a reasoning, by family: Qwen and most others, Mistral, Gemma, Kimi, Cohere,
# gpt-oss. Calls inside are no calls.
REASONING = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<|channel>thought": "<channel|>",
    "◁think▷": "◁/think▷",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "<|channel|>analysis<|message|>": "<|end|>",
}
REASONING_ENDS = frozenset(REASONING.values()) - {"<|end|>"}  # which ends other messages too
FENCED = re.compile(r"```\w*\n(.*?)(?:```|\Z)", re.DOTALL)
JSON_START = re.compile(r"[;,\s]*(?=\{|\[\s*\{)")
NO_SPACE = re.compile(r"\S")
PYTHON_START = re.compile(r"\[?[\w.]+\(")
PYTHON_NAMES = {"true": True, "false": False, "null": None}  # of JSON, inside of Python
# A call of LFM, which does not escape quotes and line breaks: the name, and then each argument up
# to the name of the next one, or to the end of the call.
LOOSE_NAME = re.compile(r"[\[,\s]*([\w.]+)\(\s*")
LOOSE_END = r"(?=\s*(?:,\s*\w+\s*=|\)\s*(?:,\s*[\w.]+\(|\]?\s*\Z)))"
LOOSE_ARGUMENT = re.compile(
    rf"""(\w+)\s*+=\s*+(?:'(.*?)'|"(.*?)"|([^\s'"].*?)(?<!\s)){LOOSE_END}\s*,?\s*""", re.DOTALL
)
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
MISTRAL_NAME = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*[\w-]*)?\s*(?:\[ARGS\])?\s*(?=\{)")
DEEPSEEK_NAME = re.compile(  # of version 3.1, or of 3 and R1
    r"\s*+(?:<｜tool▁call▁begin｜>)?(?:function<｜tool▁sep｜>([^\n<{]++)\n```(?:json)?\n"
    r"|([^\n<{]++)<｜tool▁sep｜>)"
)
KIMI_NAME = re.compile(
    r"\s*+(?:<\|tool_call_begin\|>)?\s*+(?:functions\.)?([\w.-]+?)(?::\d+)?\s*"
    r"<\|tool_call_argument_begin\|>"
)
GEMMA_NAME = re.compile(r"\s*call:([\w.-]+)(?=\{)")
GEMMA_KEY = re.compile(r"([{,]\s*)([^\s{}\[\],:\"]+)\s*:")
HARMONY_NAME = re.compile(r"([\w.-]++)(?:<\|channel\|>|<\|constrain\|>|[\s\w])*+<\|message\|>")

Schemas = dict[str, dict[str, Any]]  # of the arguments by their names, by the name of the tool


@dataclass
class ToolCall:
    """A call that the model wrote. `error` says what is wrong with its text, or is empty."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class Syntax:
    """How a family writes calls."""

    name: str
    opening: str  # a regular expression: the mark in front of a call, or of several
    closing: str  # the mark after it, or ""
    # (text, where the call begins after its mark, schemas) -> (calls, where they end)
    read: Callable[[str, int, Schemas], tuple[list[ToolCall], int]]
    form: str  # a call as the model should write it, for messages


@dataclass
class Found:
    """What a turn says: its calls, and where the text of the calls begins and ends."""

    calls: list[ToolCall]
    start: int = 0
    end: int = 0


def argument_schemas(tools: Sequence[dict]) -> Schemas:
    """The schemas of arguments by the names of tools and arguments. Malformed ones are left out."""
    schemas: Schemas = {}
    for tool in tools:
        function = tool["function"]
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, dict) else None
        schemas[function["name"]] = properties if isinstance(properties, dict) else {}
    return schemas


def find_calls(
    text: str, tools: Sequence[dict], syntaxes: Sequence[Syntax], in_reasoning: bool = False
) -> Found:
    """The calls in a turn of the model, in their order.

    They follow the marks of the syntaxes. What is wrong there is a call with an error.
    Without a mark, the whole text or what is in code fences may be calls of the tools, or anything
    else. `in_reasoning` says that the prompt has begun a reasoning.
    """
    found = find_marked_calls(text, tools, syntaxes, in_reasoning)
    return found if found.calls else Found(find_bare_calls(text, tools, in_reasoning))


def find_marked_calls(
    text: str, tools: Sequence[dict], syntaxes: Sequence[Syntax], in_reasoning: bool = False
) -> Found:
    """The calls after the marks of the syntaxes."""
    schemas = argument_schemas(tools)
    found = Found([])
    position = _end_of_reasoning(text) if in_reasoning else 0
    marks = [*map(re.escape, [*REASONING, *REASONING_ENDS]), *(s.opening for s in syntaxes)]
    any_mark = re.compile("|".join(marks))
    while mark := any_mark.search(text, position):
        if mark[0] in REASONING_ENDS:  # it had no beginning, so all before it is reasoning
            found, position = Found([]), mark.end()
            continue
        if mark[0] in REASONING:
            end = text.find(REASONING[mark[0]], mark.end())
            position = len(text) if end < 0 else end + len(REASONING[mark[0]])
            continue
        if len(found.calls) == MAX_CALLS:
            error = f"a turn may have {MAX_CALLS} calls, those after them are not made"
            found.calls.append(ToolCall("", error=error))
            break
        calls, position = _read_at(text, mark.start(), schemas, syntaxes)
        if not found.calls:
            found.start = mark.start()
        found.calls += calls[: MAX_CALLS - len(found.calls)]
        found.end = position
    return found


def find_bare_calls(text: str, tools: Sequence[dict], in_reasoning: bool = False) -> list[ToolCall]:
    """The calls of tools that are the whole text, or are in code fences."""
    names = {tool["function"]["name"] for tool in tools}
    # A call of the whole text may have the marks of a reasoning in its arguments.
    calls = [] if in_reasoning else _read_bare_calls_of(names, text)
    if not calls:
        said = _without_reasoning(text, in_reasoning)
        for part in [said, *FENCED.findall(said)]:
            calls += _read_bare_calls_of(names, part)
    return calls[:MAX_CALLS]


def to_call(name: Any, arguments: Any) -> ToolCall:
    """The call, with its arguments as plain JSON by name. ValueError if they are something else."""
    name = str(name or "")
    if not 0 < len(name) <= MAX_NAME:
        raise ValueError(f"the name of the tool has {len(name)} characters")
    if isinstance(arguments, str):
        arguments = DECODER.decode(arguments)
    if not isinstance(arguments, dict | None):
        raise ValueError("expected the arguments as an object, by name")
    return ToolCall(_to_plain(name), _to_plain(arguments or {}))


def _read_at(
    text: str, start: int, schemas: Schemas, syntaxes: Sequence[Syntax]
) -> tuple[list[ToolCall], int]:
    """The calls after the mark at `start`, by the first of the syntaxes that can read them."""
    errors = []
    for syntax in syntaxes:
        mark = re.compile(syntax.opening).match(text, start)
        if mark is None:
            continue
        try:
            return syntax.read(text, mark.end(), schemas)
        except Exception as error:  # the text is the model's: no text may end the run
            errors.append((syntax, mark, _describe(error)))
    # The first syntax that has this mark explains itself.
    syntax, mark, reason = errors[0]
    call = ToolCall("", error=f"the call cannot be read: {reason}. Write {syntax.form}")
    return [call], _end_of_unreadable(text, syntax, mark.end())


def _describe(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError | SyntaxError):
        return error.msg  # without the place in the text
    if isinstance(error, RecursionError | MemoryError):
        return "it is nested too deep"
    return str(error)


def _end_of_unreadable(text: str, syntax: Syntax, start: int) -> int:
    """Where a call ends that cannot be read: after its mark, or before the next call."""
    closing = text.find(syntax.closing, start) if syntax.closing else -1
    if closing >= 0:
        return closing + len(syntax.closing)
    if syntax.closing:
        return len(text)
    following = re.compile(syntax.opening).search(text, start)
    return following.start() if following else len(text)


def _end_of_reasoning(text: str) -> int:
    """Where the reasoning ends with which a text begins."""
    ends = [(text.find(mark), mark) for mark in REASONING.values() if mark in text]
    return min(place + len(mark) for place, mark in ends) if ends else len(text)


def _without_reasoning(text: str, in_reasoning: bool) -> str:
    if in_reasoning:
        text = text[_end_of_reasoning(text) :]
    for opening, closing in REASONING.items():
        pieces = text.split(opening)
        text = pieces[0] + "".join(piece.partition(closing)[2] for piece in pieces[1:])
        if closing in REASONING_ENDS:
            text = text.rpartition(closing)[2]
    return text


def _read_bare_calls_of(names: set[str], text: str) -> list[ToolCall]:
    """The calls of the tools if a text has nothing but calls, and none otherwise."""
    try:
        found = _read_bare(text.strip())
    except Exception:  # any other text
        return []
    return [call for call in found if call.name in names]


def _read_bare(text: str) -> list[ToolCall]:
    """The calls of a text that has nothing else. Raises if it is another text."""
    if JSON_START.match(text):
        calls, end = _read_json_calls(text, 0)
        if _skip_space(text, end) == len(text):
            return calls
    if PYTHON_START.match(text):
        return _read_python_calls(text)
    raise ValueError("this is no call")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def _to_plain(value: Any, levels: int = MAX_NESTING) -> Any:
    """A copy of a value. ValueError if JSON has no such value, or no tool could use it."""
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


def _read_json_calls(text: str, start: int) -> tuple[list[ToolCall], int]:
    """The calls in JSON values, one after another, each a call or a list of calls."""
    calls: list[ToolCall] = []
    place = JSON_START.match(text, start)
    position = place.end() if place else _skip_space(text, start)
    while place or not calls:
        value, position = DECODER.raw_decode(text, position)
        calls += map(_from_json, value if isinstance(value, list) else [value])
        if not calls:
            raise ValueError("the list has no call")
        place = JSON_START.match(text, position)
        position = place.end() if place else position
    return calls, position


def _skip_space(text: str, start: int) -> int:
    """The place of the next character that is no space, or the end."""
    place = NO_SPACE.search(text, start)
    return place.start() if place else len(text)


def _from_json(value: Any) -> ToolCall:
    """The call in an object: OpenAI's, with its field `function`, or what is in there."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict):
        raise ValueError("expected an object with the name and the arguments")
    arguments = value.get("arguments", value.get("parameters"))
    return to_call(value.get("name", value.get("tool_name")), arguments)


def _read_json_object(text: str, start: int) -> tuple[Any, int]:
    return DECODER.raw_decode(text, _skip_space(text, start))


def _expect(text: str, start: int, closing: str) -> int:
    """Where the mark ends that has to follow. It may be missing at the end of the turn."""
    start = _skip_space(text, start)
    if text.startswith(closing, start):
        return start + len(closing)
    if start == len(text):
        return start
    raise ValueError(f"expected {closing} instead of {text[start : start + 20]!r}")


def _skip(text: str, start: int, closing: str) -> int:
    """Where the mark ends if it follows."""
    after = _skip_space(text, start)
    return after + len(closing) if text.startswith(closing, after) else start


def _match(pattern: re.Pattern, text: str, start: int) -> re.Match:
    """The match of what every call begins with."""
    match = pattern.match(text, start)
    if match is None:
        raise ValueError(f"expected the name of a tool instead of {text[start : start + 20]!r}")
    return match


def _read_json(
    text: str, start: int, schemas: Schemas, closing: str = ""
) -> tuple[list[ToolCall], int]:
    calls, end = _read_json_calls(text, start)
    return calls, _expect(text, end, closing) if closing else end


def _read_named_json(
    text: str, start: int, schemas: Schemas, name: re.Pattern, closings: Sequence[str]
) -> tuple[list[ToolCall], int]:
    """A name, and its arguments as JSON. The first mark must follow, the others may."""
    head = _match(name, text, start)
    arguments, end = _read_json_object(text, head.end())
    call = to_call(next(filter(None, head.groups())).strip(), arguments)
    if closings:
        end = _expect(text, _skip(text, end, "```"), closings[0])
    for closing in closings[1:]:
        end = _skip(text, end, closing)
    return [call], end


def _read_mistral(text: str, start: int, schemas: Schemas) -> tuple[list[ToolCall], int]:
    """A list of calls, or name[ARGS]{...}, which may have [CALL_ID] and an id in between."""
    if JSON_START.match(text, start):
        return _read_json(text, start, schemas)
    return _read_named_json(text, start, schemas, MISTRAL_NAME, [])


def _read_llama(text: str, start: int, schemas: Schemas) -> tuple[list[ToolCall], int]:
    """JSON, or calls of Python up to the next mark."""
    if JSON_START.match(text, start):
        return _read_json(text, start, schemas)
    end = text.find("<|python_tag|>", start)
    end = len(text) if end < 0 else end
    return _read_python_calls(text[start:end]), end


def _read_xml(text: str, start: int, schemas: Schemas) -> tuple[list[ToolCall], int]:
    """Of Qwen3-Coder, Qwen3.5 and Nemotron 3."""
    name = _match(XML_NAME, text, start)
    call, end = _read_arguments(text, name, XML_ARGUMENT, schemas)
    end = _expect(text, end, "</function>")
    return [call], _skip(text, end, "</tool_call>")


def _read_glm(text: str, start: int, schemas: Schemas) -> tuple[list[ToolCall], int]:
    name = _match(GLM_NAME, text, start)
    call, end = _read_arguments(text, name, GLM_ARGUMENT, schemas)
    return [call], _expect(text, end, "</tool_call>")


def _read_arguments(
    text: str, name: re.Match, argument: re.Pattern, schemas: Schemas
) -> tuple[ToolCall, int]:
    """The arguments that are marked one by one after the name. The schema gives their types."""
    properties = schemas.get(name[1].strip(), {})
    arguments = {}
    end = name.end()
    while match := argument.match(text, end):
        key = match[1].strip()
        arguments[key] = _to_typed(match[2], _declared_types(properties.get(key)))
        end = match.end()
    return to_call(name[1].strip(), arguments), end


def _declared_types(schema: Any) -> set[str]:
    """The types that a schema of JSON allows; none if it does not say."""
    if not isinstance(schema, dict):
        return set()
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else {*(declared or [])}
    for choice in [*(schema.get("anyOf") or []), *(schema.get("oneOf") or [])]:
        types |= _declared_types(choice)
    return types | {"null"} if schema.get("nullable") else types


def _to_typed(text: str, types: set[str]) -> Any:
    """The value of an argument that is written without quotes: a text, or JSON.

    "5" is a number where the schema says so, a text where it says that, and a number where the
    schema says nothing. Python's True, False and None are read too.
    """
    if types == {"string"}:
        return text
    plain = text.strip()
    lowered = {"True": "true", "False": "false", "None": "null"}.get(plain, plain)
    try:
        value = DECODER.decode(lowered)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, str):  # texts are written without quotes, so these are its own
        return text
    return value if not types or _json_types(value) & types else text


def _json_types(value: Any) -> set[str]:
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    if isinstance(value, float):
        return {"number", *(["integer"] if value.is_integer() else [])}
    return {"array" if isinstance(value, list) else "object"}


def _read_gemma(text: str, start: int, schemas: Schemas) -> tuple[list[ToolCall], int]:
    """call:name{key:value}, in which <|"|> quotes texts: JSON with other quotes."""
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


def _read_marked_python(
    text: str, start: int, schemas: Schemas, closing: str
) -> tuple[list[ToolCall], int]:
    """Calls of Python between marks."""
    end = text.find(closing, start)
    body = text[start:] if end < 0 else text[start:end]
    try:
        calls = _read_python_calls(body)
    except SyntaxError as error:  # quotes and line breaks that are not escaped
        calls = _read_loose_calls(body.strip(), error)
    return calls, len(text) if end < 0 else end + len(closing)


def _read_python_calls(text: str) -> list[ToolCall]:
    """Calls of Python, in a list or one in each line."""
    calls: list[ToolCall] = []
    for expression in _parse_python(text):
        nodes = expression.elts if isinstance(expression, ast.List) else [expression]
        calls += map(_from_python, nodes)
    if not calls:
        raise ValueError("the list has no call")
    return calls


def _from_python(node: ast.expr) -> ToolCall:
    """The call f(x=1), or f.call(x=1) as Llama writes it."""
    if not isinstance(node, ast.Call) or node.args or not all(k.arg for k in node.keywords):
        raise ValueError("expected calls with arguments by name")
    name = ast.unparse(node.func).removesuffix(".call")
    return to_call(name, {str(k.arg): _python_value(k.value) for k in node.keywords})


class _JsonConstants(ast.NodeTransformer):
    """Puts Python's constants in place of those of JSON."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(PYTHON_NAMES[node.id]) if node.id in PYTHON_NAMES else node


def _python_value(node: ast.expr) -> Any:
    """The value of a literal, in which constants may be written as in JSON."""
    return ast.literal_eval(_JsonConstants().visit(node))


def _parse_python(text: str) -> list[ast.expr]:
    """The expressions in a text. ValueError if it has other statements."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes that Python does not know
        statements = ast.parse(text.strip()).body
    expressions = [s.value for s in statements if isinstance(s, ast.Expr)]
    if len(expressions) < len(statements):
        raise ValueError("expected calls with arguments by name")
    return expressions


def _read_loose_calls(text: str, error: SyntaxError) -> list[ToolCall]:
    """Calls of Python whose texts are not escaped. Raises `error` where that does not help."""
    calls = []
    position = 0
    while name := LOOSE_NAME.match(text, position):
        position = name.end()
        arguments: dict[str, Any] = {}
        while argument := LOOSE_ARGUMENT.match(text, position):
            key, single, double, other = argument.groups()
            quoted = double if single is None else single
            if quoted is None:
                quoted = _python_value(_parse_python(other)[0])
            arguments[key] = quoted
            position = argument.end()
        if not text.startswith(")", position):
            raise error
        position += 1
        calls.append(to_call(name[1], arguments))
    if not calls or text[position:].strip() not in ("", "]"):
        raise error
    return calls


HERMES = Syntax(
    "hermes",
    "<tool_call>",
    "</tool_call>",
    partial(_read_json, closing="</tool_call>"),
    '<tool_call>{"name": "NAME", "arguments": {"KEY": VALUE}}</tool_call>',
)
LLAMA = Syntax(
    "llama",
    r"<\|python_tag\|>",
    "",
    _read_llama,
    '{"name": "NAME", "parameters": {"KEY": VALUE}}',
)
SYNTAXES = (
    HERMES,
    Syntax(
        "qwen3_coder",
        "<tool_call>|(?=<function=)",
        "</tool_call>",
        _read_xml,
        "<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>",
    ),
    Syntax(
        "glm",
        "<tool_call>",
        "</tool_call>",
        _read_glm,
        "<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>",
    ),
    LLAMA,
    Syntax(
        "mistral",
        r"\[TOOL_CALLS\]",
        "",
        _read_mistral,
        '[TOOL_CALLS]NAME[ARGS]{"KEY": VALUE}',
    ),
    Syntax(
        "deepseek",
        "<｜tool▁calls?▁begin｜>",
        "<｜tool▁call▁end｜>",
        partial(
            _read_named_json,
            name=DEEPSEEK_NAME,
            closings=("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
        ),
        '<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{"KEY": VALUE}<｜tool▁call▁end｜>',
    ),
    Syntax(
        "kimi",
        r"<\|tool_calls_section_begin\|>|<\|tool_call_begin\|>",
        "<|tool_call_end|>",
        partial(
            _read_named_json,
            name=KIMI_NAME,
            closings=("<|tool_call_end|>", "<|tool_calls_section_end|>"),
        ),
        '<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{"KEY": VALUE}'
        "<|tool_call_end|>",
    ),
    Syntax(
        "cohere",
        r"<\|START_ACTION\|>",
        "<|END_ACTION|>",
        partial(_read_json, closing="<|END_ACTION|>"),
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "NAME", "parameters": '
        '{"KEY": VALUE}}]<|END_ACTION|>',
    ),
    Syntax(
        "gemma4",
        r"<\|tool_call>",
        "<tool_call|>",
        _read_gemma,
        '<|tool_call>call:NAME{KEY:<|"|>VALUE<|"|>}<tool_call|>',
    ),
    Syntax(
        "lfm2",
        r"<\|tool_call_start\|>",
        "<|tool_call_end|>",
        partial(_read_marked_python, closing="<|tool_call_end|>"),
        "<|tool_call_start|>[NAME(KEY=VALUE)]<|tool_call_end|>",
    ),
    Syntax(
        "olmo3",
        "<function_calls>",
        "</function_calls>",
        partial(_read_marked_python, closing="</function_calls>"),
        "<function_calls>NAME(KEY=VALUE)</function_calls>",
    ),
    Syntax(
        "phi4_mini",
        r"<\|tool_call\|>",
        "<|/tool_call|>",
        partial(_read_json, closing="<|/tool_call|>"),
        '<|tool_call|>[{"name": "NAME", "arguments": {"KEY": VALUE}}]<|/tool_call|>',
    ),
    Syntax(
        "gpt_oss",
        rf"to=functions\.(?={HARMONY_NAME.pattern})",
        "<|call|>",
        partial(_read_named_json, name=HARMONY_NAME, closings=("<|call|>",)),
        'to=functions.NAME<|channel|>commentary json<|message|>{"KEY": VALUE}<|call|>',
    ),
)
