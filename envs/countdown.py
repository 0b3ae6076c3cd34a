"""Make a target of some numbers. Row: {"messages": [...], "answer": 24, "numbers": [1, 2, 3, 4]}.

The prompt should say that the expression goes within <answer></answer>, and that each number is used exactly once.
"""

import ast
import operator
import re
from fractions import Fraction

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
MAX_CHARACTERS = 200
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def evaluate(node, used):
    """The exact value of sums, differences, products and quotients of whole numbers, which are added to `used`."""
    match node:
        case ast.Constant(value=int()) if not isinstance(node.value, bool):
            used.append(node.value)
            return Fraction(node.value)
        case ast.BinOp() if type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](evaluate(node.left, used), evaluate(node.right, used))
    raise ValueError("only whole numbers and + - * / ( ) are allowed")


def reward_fn(messages, answer, numbers):
    """right: 1 if the last <answer> makes the target of all the numbers; format: 0.1 if it is an expression at all."""
    found, used, value = ANSWER.findall(messages[-1]["content"]), [], None
    wrong = {"right": 0.0, "format": 0.0}
    if not found or len(found[-1]) > MAX_CHARACTERS:
        return wrong
    try:
        value = evaluate(ast.parse(found[-1].strip(), mode="eval").body, used)
    except ZeroDivisionError:
        pass
    except (SyntaxError, ValueError):
        return wrong
    right = value == int(answer) and sorted(used) == sorted(int(n) for n in numbers)
    return {"right": float(right), "format": 0.1}
