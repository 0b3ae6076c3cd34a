"""A calculator as a tool, for rollout.max_turns > 1. Row: {"messages": [...], "answer": 27}.

The model writes <calc>3*(4+5)</calc> and is answered with 27. The prompt should say so, for instance: "You may write
<calc>3*(4+5)</calc> and will be given the value. When you know the answer, reply with it alone."
Results come in a message with the role "tool"; where a chat template has no such role, rl2 sends them as the user's.
"""

import ast
import operator
import re
from fractions import Fraction

CALL = re.compile(r"<calc>(.*?)</calc>", re.DOTALL)
# Digits, with or without thousands commas and decimals. The minus of a difference is no sign: 5-3 has 5 and 3.
NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?", re.ASCII)
MAX_CHARACTERS = 200
MAX_BITS = 1024  # of a power: 9**9**9 would never end

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}  # and ast.Pow, below


def power(base, exponent):
    bits = base.bit_length() if isinstance(base, int) else 1
    if bits * abs(exponent) > MAX_BITS:
        raise ValueError("the power is too large")
    if base < 0 and isinstance(exponent, float):
        raise ValueError("the root of a negative number")
    return base**exponent


def evaluate(node):
    """The value of a syntax tree of numbers and operators; nothing else is evaluated."""
    match node:
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            return node.value
        case ast.UnaryOp() if type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](evaluate(node.operand))
        case ast.BinOp(op=ast.Pow()):
            return power(evaluate(node.left), evaluate(node.right))
        case ast.BinOp() if type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](evaluate(node.left), evaluate(node.right))
    raise ValueError("only numbers and + - * / // % ** ( ) are allowed")


def calculate(expression):
    """Text of the value, or of what is wrong with the expression."""
    if len(expression) > MAX_CHARACTERS:
        return f"error: the expression is longer than {MAX_CHARACTERS} characters"
    try:
        value = evaluate(ast.parse(expression.strip(), mode="eval").body)
        return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
    except SyntaxError:
        return "error: not an expression"
    except (ValueError, ArithmeticError) as error:
        return f"error: {error}"


def interact(messages):
    """One message with a line for each call of the last turn; no call ends the conversation."""
    calls = CALL.findall(messages[-1]["content"])
    return [{"role": "tool", "content": "\n".join(map(calculate, calls))}] if calls else []


def reward_fn(messages, answer):
    """1.0 if the last number of the last reply, calls aside, is the answer, else 0.0."""
    reply = [message["content"] for message in messages if message["role"] == "assistant"][-1]
    numbers = [number.replace(",", "") for number in NUMBER.findall(CALL.sub("", reply))]
    return float(bool(numbers) and Fraction(numbers[-1]) == Fraction(str(answer).replace(",", "")))
