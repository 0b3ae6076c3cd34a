r"""Countdown: make a target from given numbers with + - * / and parentheses.

Row: {"messages": [...], "answer": 24, "numbers": [1, 2, 3, 4]}. The answer is the target,
which alone earns nothing; the start warns of it.

The prompt should say that the expression goes into <answer></answer>, and that each number must be
used exactly once. One step on a CPU, with a small model in the folder MODEL:

    python -m rl2.trainer.ppo rollout.env_path=countdown data.path=examples/rows/countdown.jsonl \
        actor.model_name=MODEL trainer.max_steps=1 data.prompts_per_rollout=3 \
        data.responses_per_prompt=2 rollout.train_sampling_params.max_new_tokens=32
"""

import ast
import operator
from fractions import Fraction

from rl2.rewards.text import last_tagged

MAX_CHARACTERS = 200  # of an expression
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def reward_fn(messages, answer, numbers):
    """Two reward parts for the last <answer></answer> of the reply.

    right: 1.0 if its expression equals the target and uses each number exactly once, else 0.0.
    format: 0.1 if it is an expression of whole numbers, else 0.0.
    """
    no_expression = {"right": 0.0, "format": 0.0}
    expression = extract(messages)
    if expression is None:
        return no_expression
    used_numbers = []
    try:
        tree = ast.parse(expression, mode="eval").body
        value = evaluate(tree, used_numbers)
    except ZeroDivisionError:
        value = None
    except (SyntaxError, ValueError):
        return no_expression
    is_right = value == int(answer) and sorted(used_numbers) == sorted(map(int, numbers))
    return {"right": float(is_right), "format": 0.1}


def extract(messages):
    """Returns the text of the last <answer></answer> of the reply, or None."""
    field = last_tagged(messages[-1]["content"])
    return None if field is None or len(field) > MAX_CHARACTERS else field


def evaluate(node, used_numbers):
    """Returns the exact value of a syntax tree. Its numbers are appended to `used_numbers`.

    ValueError if it has anything but whole numbers and the four operators.
    """
    match node:
        case ast.Constant(value=int()) if not isinstance(node.value, bool):
            used_numbers.append(node.value)
            return Fraction(node.value)
        case ast.BinOp() if type(node.op) in OPERATORS:
            left = evaluate(node.left, used_numbers)
            right = evaluate(node.right, used_numbers)
            return OPERATORS[type(node.op)](left, right)
    raise ValueError("only whole numbers and + - * / ( ) are allowed")
