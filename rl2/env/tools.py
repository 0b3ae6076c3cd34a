"""Tools: the documented methods of an environment's object, and the calls that a model writes."""

import ast
import inspect
import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

from transformers.utils import get_json_schema

from rl2.env.contract import METHOD, METHODS, TOOL
from rl2.env.results import raising_env_error

# What stands before a call, with the call itself: of Qwen and Hermes, of Llama and of Mistral.
MARKED = re.compile(
    r"<tool_call>(.*?)(?:</tool_call>|\Z)"
    r"|(?:<\|python_tag\|>|\[TOOL_CALLS\])(.*?)(?=<\|python_tag\|>|\[TOOL_CALLS\]|\Z)",
    re.DOTALL,
)
JSON_START = re.compile(r"\[?\s*\{")
PYTHON_START = re.compile(r"\[?[\w.]+\(")
FENCED = re.compile(r"```\w*\n(.*?)(?:```|\Z)", re.DOTALL)
DECODER = json.JSONDecoder()
# Of json and ast; and of a value that has not the shape of a call.
UNREADABLE = (ValueError, SyntaxError, RecursionError, MemoryError, AttributeError, LookupError)


@dataclass
class ToolCall:
    """A call that the model wrote. `error` says what is wrong with its text, or is empty."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def object_functions(make_env: Callable) -> dict[str, Callable]:
    """The methods of the objects that `make_env` makes, by the names of their calls.

    A function is called once to see what it makes. EnvError if that fails; ValueError if the
    objects have neither step nor a tool.
    """
    kind = make_env
    if not inspect.isclass(kind):
        with raising_env_error("make_env"):
            kind = type(make_env())
    functions: dict[str, Callable] = {}
    for name, function in inspect.getmembers(kind, inspect.isfunction):
        if name in METHODS:
            functions[METHOD + name] = MethodType(function, kind)
        elif name[0] != "_" and function.__doc__:
            functions[TOOL + name] = MethodType(function, kind)
    if METHOD + "step" not in functions and not list_tools(functions):
        raise ValueError(
            "make_env: expected a method step(message), or public methods with docstrings as tools"
        )
    return functions


def list_tools(functions: dict[str, Callable]) -> list[dict]:
    """The schemas of the tools among the functions. ValueError names the tool that has none."""
    schemas = []
    for name, function in functions.items():
        if name.startswith(TOOL):
            try:
                schemas.append(get_json_schema(function))
            except Exception as error:  # transformers has classes of its own for types and texts
                raise ValueError(
                    f"make_env: the method {function.__name__} has a docstring, so it is a tool, "
                    f"but {error} If it is no tool, let its name begin with _"
                ) from error
    return schemas


def find_calls(text: str, names: Collection[str]) -> list[ToolCall]:
    """The calls in a turn of the model, in their order. `names` are those of the tools.

    They stand behind the marks of Qwen and Hermes, Llama or Mistral. What is wrong there is a call
    with an error. Without a mark, the whole text or what is in code fences may be calls of tools,
    or anything else.
    """
    marked = [one or other for one, other in MARKED.findall(text)]
    calls = []
    for part in marked or [text, *FENCED.findall(text)]:
        try:
            found_calls = _read_calls(part.strip())
        except UNREADABLE as error:
            found_calls = [ToolCall("", error=f"the call cannot be read: {error}")]
        calls += [call for call in found_calls if marked or call.name in names]
    return calls


def text_before_calls(text: str) -> str:
    """What a turn with calls says in front of them; nothing if no mark stands before them."""
    mark = MARKED.search(text)
    return text[: mark.start()].strip() if mark else ""


def _read_calls(text: str) -> list[ToolCall]:
    """The calls of a text that has nothing else. One of UNREADABLE if it is another text."""
    name, mark, arguments = text.partition("[ARGS]")  # of Mistral: name[ARGS]{...}
    if mark:
        return [ToolCall(name.strip(), _to_arguments(arguments))]
    if JSON_START.match(text):
        return _from_json(text)
    if not PYTHON_START.match(text):
        raise ValueError('expected {"name": ..., "arguments": {...}}')
    expression = ast.parse(text, mode="eval").body
    nodes = expression.elts if isinstance(expression, ast.List) else [expression]
    return [_from_python(node) for node in nodes]


def _from_json(text: str) -> list[ToolCall]:
    """The calls in JSON values, one behind another, each a call or a list of calls."""
    calls = []
    while text:
        value, end = DECODER.raw_decode(text)
        for call in value if isinstance(value, list) else [value]:
            arguments = call.get("arguments", call.get("parameters", {}))
            calls.append(ToolCall(str(call["name"]), _to_arguments(arguments)))
        text = text[end:].lstrip("; \t\r\n")
    return calls


def _to_arguments(arguments: Any) -> dict[str, Any]:
    """Arguments by name, which may be JSON inside JSON."""
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("expected the arguments as an object, by name")
    return arguments


def _from_python(node: ast.expr) -> ToolCall:
    """The call f(x=1), or f.call(x=1) as Llama writes it."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("expected calls with arguments by name")
    name = ast.unparse(node.func).removesuffix(".call")
    return ToolCall(name, {str(k.arg): ast.literal_eval(k.value) for k in node.keywords})
