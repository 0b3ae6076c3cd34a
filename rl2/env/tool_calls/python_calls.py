"""Calls that are written as calls of Python functions."""

import ast
import re
import warnings
from typing import Any

from rl2.env.tool_calls.call import ToolCall, to_call

PYTHON_NAMES = {"true": True, "false": False, "null": None}  # of JSON, inside of Python
# A call of LFM, which does not escape quotes and line breaks: the name, and then each argument up
# to the name of the next one, or to the end of the call.
LOOSE_NAME = re.compile(r"[\[,\s]*([\w.]+)\(\s*")
LOOSE_END = r"(?=\s*(?:,\s*\w+\s*=|\)\s*(?:,\s*[\w.]+\(|\]?\s*\Z)))"
LOOSE_ARGUMENT = re.compile(
    rf"""(\w+)\s*+=\s*+(?:'(.*?)'|"(.*?)"|([^\s'"].*?)(?<!\s)){LOOSE_END}\s*,?\s*""", re.DOTALL
)


def read_python_calls(text: str) -> list[ToolCall]:
    """Calls of Python, in a list or one in each line."""
    calls: list[ToolCall] = []
    for expression in _parse_python(text):
        nodes = expression.elts if isinstance(expression, ast.List) else [expression]
        calls += map(_from_python, nodes)
    if not calls:
        raise ValueError("the list has no call")
    return calls


def _from_python(node: ast.expr) -> ToolCall:
    """Returns the call f(x=1)."""
    if not isinstance(node, ast.Call) or node.args or not all(k.arg for k in node.keywords):
        raise ValueError("expected calls with arguments by name")
    return to_call(
        ast.unparse(node.func), {str(k.arg): _python_value(k.value) for k in node.keywords}
    )


class _JsonConstants(ast.NodeTransformer):
    """Puts Python's constants in place of those of JSON."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(PYTHON_NAMES[node.id]) if node.id in PYTHON_NAMES else node


def _python_value(node: ast.expr) -> Any:
    """Returns the value of a literal, in which constants may be written as in JSON."""
    try:
        return ast.literal_eval(_JsonConstants().visit(node))
    except ValueError:
        # Python's own text has the address of an object. The model reads this one, and a run that
        # is repeated must have the same bits.
        raise ValueError(f"expected a literal instead of {ast.unparse(node)[:20]!r}") from None


def _parse_python(text: str) -> list[ast.expr]:
    """Returns the expressions in a text. ValueError if it has other statements."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes that Python does not know
        statements = ast.parse(text.strip()).body
    expressions = [s.value for s in statements if isinstance(s, ast.Expr)]
    if len(expressions) < len(statements):
        raise ValueError("expected calls with arguments by name")
    return expressions


def read_loose_calls(text: str, error: SyntaxError) -> list[ToolCall]:
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
