"""A calculator as a tool, for rollout.max_turns > 1.

Row: {"messages": [...], "answer": 27}. The answer is a number or its text, such as "1,234".

The model writes <calc>3*(4+5)</calc> and the next message tells it 27. The prompt should explain
this, for instance: "You may write <calc>3*(4+5)</calc> and will be given the value. When you know
the answer, reply with it alone."

Results come in a message with the role "tool". If a chat template does not have that role, rl2
sends the message with the role "user".
"""

import ast
import operator
import re
from fractions import Fraction

CALL = re.compile(r"<calc>(.*?)</calc>", re.DOTALL)
# Digits, which may have thousands separators, decimals and a minus sign. The minus of a difference
# is not a sign: 5-3 has the numbers 5 and 3.
NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?", re.ASCII)
MAX_CHARACTERS = 200  # of an expression or a number
MAX_POWER_BITS = 1024  # 9**9**9 would run for ever

OPERATORS = {  # power is apart, since it has a limit
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def interact(messages):
    """One message with a line for each call of the last turn. No call ends the conversation."""
    text, _ = split_behind_calls(messages[-1]["content"])
    calls = CALL.findall(text)
    if not calls:
        return []
    results = [calculate(expression) for expression in calls]
    return [{"role": "tool", "content": "\n".join(results)}]


def reward_fn(messages, answer):
    """1.0 if the last number in the last reply, outside of calls, equals the answer, else 0.0."""
    replies = [message["content"] for message in messages if message["role"] == "assistant"]
    text, rest = split_behind_calls(replies[-1])
    numbers = NUMBER.findall(CALL.sub("", text) + rest)
    if not numbers or len(numbers[-1]) > MAX_CHARACTERS:
        return 0.0
    return float(exact_value(numbers[-1]) == exact_value(answer))


def split_behind_calls(text):
    """The text up to the last closing tag, in which the time of CALL is linear, and the rest."""
    head, closing_tag, rest = text.rpartition("</calc>")
    return head + closing_tag, rest


def exact_value(number):
    """The exact value of a number or of its text: exact_value("1,234.5") == 1234.5."""
    return Fraction(str(number).replace(",", ""))


def calculate(expression):
    """The text of the expression's value, or of what is wrong with the expression."""
    if len(expression) > MAX_CHARACTERS:
        return f"error: the expression is longer than {MAX_CHARACTERS} characters"
    try:
        value = evaluate(ast.parse(expression.strip(), mode="eval").body)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        return str(value)
    except SyntaxError:
        return "error: not an expression"
    except (ValueError, ArithmeticError) as error:
        return f"error: {error}"


def evaluate(node):
    """The value of a syntax tree that has only numbers and operators. ValueError for any other."""
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


def power(base, exponent):
    base_bits = base.bit_length() if isinstance(base, int) else 1
    if base_bits * abs(exponent) > MAX_POWER_BITS:
        raise ValueError("the power is too large")
    if base < 0 and isinstance(exponent, float):
        raise ValueError("the root of a negative number")
    return base**exponent
