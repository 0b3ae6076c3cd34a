r"""Arithmetic with a calculator as a tool, for rollout.max_turns > 1.

Row: {"messages": [...], "answer": 27}. The answer is a number or its text, such as "1,234". The
model writes it into <answer></answer> when it has called the tool as often as it likes.

A chat template with tools shows the model how to call them. The system prompt of the rows that this
file writes shows it too, for templates without tools. Their products of large numbers are too hard
for a small model's head:

    python envs/calculator.py rows 1000 train.jsonl

A model that has never called a tool earns nothing, and so learns nothing. These conversations with
calls, and with the same system prompt, teach rl2.trainer.sft the form. Their questions differ from
those of `rows` with another seed:

    python envs/calculator.py conversations 300 sft.jsonl --seed 1

One step on a CPU, with a small model in the folder MODEL:

    python -m rl2.trainer.ppo rollout.env_path=calculator data.path=examples/rows/calculator.jsonl \
        actor.model_name=MODEL trainer.max_steps=1 data.prompts_per_rollout=3 \
        data.responses_per_prompt=2 rollout.train_sampling_params.max_new_tokens=48 \
        rollout.max_turns=3
"""

import argparse
import ast
import json
import operator
import random

from rl2.rewards.maths import same_number
from rl2.rewards.text import last_tagged

MAX_CHARACTERS = 200  # of an expression
MAX_POWER_BITS = 1024  # 9**9**9 would run for ever
CALL = '<tool_call>{{"name": "calculate", "arguments": {{"expression": "{}"}}}}</tool_call>'
SYSTEM_PROMPT = (
    f"You have a calculator. To use it, write {CALL.format('3*(4+5)')} and end your turn: the next "
    "message has the value. When you know the answer, write <answer>27</answer>."
)
FORMS = ("{} * {}", "{} * {} + {}", "({} + {}) * {}", "{} * {} - {}")  # of the questions in rows

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


class make_env:
    """The tools of a trajectory."""

    def calculate(self, expression: str) -> str:
        """Calculates the value of an arithmetic expression.

        Args:
            expression: numbers with + - * / // % ** and parentheses, such as 3*(4+5)
        """
        return evaluate_text(str(expression))


def reward_fn(messages, answer):
    """1.0 if the last <answer></answer> of the last reply is the answer, else 0.0."""
    return float(same_number(extract(messages), answer))


def extract(messages):
    """Returns the text of the last <answer></answer> of the model's last turn, or None."""
    replies = [message["content"] for message in messages if message["role"] == "assistant"]
    return last_tagged(replies[-1])


def evaluate_text(expression):
    """Returns the text of the expression's value, or of what is wrong with the expression."""
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
    """Returns the value of a syntax tree that has only numbers and operators.

    ValueError for any other.
    """
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


def make_row(generator):
    """Returns a question, as a row of the trainer."""
    form = generator.choice(FORMS)
    numbers = [generator.randint(100, 9999) for _ in range(form.count("{}"))]
    expression = form.format(*numbers)
    messages = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": f"What is {expression}?"},
    ]
    return {"messages": messages, "answer": evaluate_text(expression), "expression": expression}


def make_conversation(generator):
    """Returns a question that is solved with the tool."""
    row = make_row(generator)
    replies = [
        {"role": "assistant", "content": CALL.format(row["expression"])},
        {"role": "tool", "name": "calculate", "content": row["answer"]},
        {"role": "assistant", "content": f"<answer>{row['answer']}</answer>"},
    ]
    return {"messages": row["messages"] + replies}


def main():
    parser = argparse.ArgumentParser(description="Writes arithmetic for the calculator.")
    parser.add_argument("command", choices=["rows", "conversations"])
    parser.add_argument("count", type=int)
    parser.add_argument("file", help="JSON lines")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    make = make_row if arguments.command == "rows" else make_conversation
    generator = random.Random(arguments.seed)
    with open(arguments.file, "w", encoding="utf-8") as file:
        for _ in range(arguments.count):
            file.write(json.dumps(make(generator)) + "\n")


if __name__ == "__main__":
    main()
