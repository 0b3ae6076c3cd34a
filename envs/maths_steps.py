r"""Arithmetic one step at a time, for rollout.max_turns > 1. The prompt has worked examples.

Row: {"messages": [...], "expression": "(3 + 4) * (10 - 2)"}.

In each turn the model writes the expression with one operation done, such as 7 * (10 - 2), in the
last line of its turn. A right step earns its part of 1.0: the operations that it has done, of those
in the row. All right steps together earn 1.0, in as many turns as the model likes. A wrong step
earns nothing and is told what is wrong. The conversation ends when the number is found; then
`solved` is 1.0. Choose rollout.max_turns above the number of operations.

This file writes rows with two worked examples and 2 to 4 operations:

    python envs/maths_steps.py 1000 train.jsonl

One step of training on a CPU, with a small model in the folder MODEL:

    python -m rl2.trainer.ppo rollout.env_path=maths_steps actor.model_name=MODEL \
        data.path=examples/rows/maths_steps.jsonl trainer.max_steps=1 data.prompts_per_rollout=3 \
        data.responses_per_prompt=2 rollout.train_sampling_params.max_new_tokens=16 \
        rollout.max_turns=5
"""

import argparse
import ast
import json
import operator
import random

MAX_CHARACTERS = 200  # of a step
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
SYSTEM_PROMPT = (
    "Calculate step by step. In each turn write the expression with one operation done, and "
    "nothing else, until it is a number."
)
EXAMPLES = (
    ("(2 + 3) * 4", "5 * 4", "20"),
    ("9 - 2 * (1 + 3)", "9 - 2 * 4", "9 - 8", "1"),
)
GO_ON = "Right. Next step."


def interact(messages, expression, turn):
    """Checks the last step. Its reward is the operations that it has done, of all."""
    *earlier, reply = read_replies(messages, turn)
    now = follow(expression, earlier)
    fault = find_fault(now, reply)
    if fault:
        return [{"role": "user", "content": f"Wrong: {fault} The expression is still {now}"}]
    left = count_operations(reply)
    reward = (count_operations(now) - left) / count_operations(expression)
    message = {"role": "user", "content": GO_ON}
    return {"messages": [message] if left else [], "reward": reward, "done": left == 0}


def reward_fn(messages, expression, turn):
    """solved: 1.0 if the steps have led to the number, else 0.0."""
    last = follow(expression, read_replies(messages, turn))
    return {"solved": float(count_operations(last) == 0)}


def read_replies(messages, turn):
    """Returns the last lines of the model's turns.

    Earlier messages of the assistant are examples.
    """
    replies = [message["content"] for message in messages if message["role"] == "assistant"]
    return [reply.strip().rpartition("\n")[2].strip() for reply in replies[-turn:]]


def follow(expression, steps):
    """Returns the expression after the right ones of these steps."""
    for step in steps:
        if not find_fault(expression, step):
            expression = step
    return expression


def find_fault(expression, step):
    """Returns what is wrong with a step from the expression, or an empty text."""
    if len(step) > MAX_CHARACTERS:
        return f"the step is longer than {MAX_CHARACTERS} characters."
    try:
        value, num_operations = evaluate(parse(step))
    except (SyntaxError, ValueError):
        return "this is not an expression of whole numbers with + - * ( )."
    expected, num_before = evaluate(parse(expression))
    if value != expected:
        return "the value has changed."
    if num_operations >= num_before:
        return "no operation is done."
    return ""


def count_operations(expression):
    return evaluate(parse(expression))[1]


def parse(text):
    return ast.parse(text, mode="eval").body


def evaluate(node):
    """(the value, the number of operations) of a syntax tree. ValueError for anything else."""
    match node:
        case ast.Constant(value=int()) if not isinstance(node.value, bool):
            return node.value, 0
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant()):
            return -evaluate(node.operand)[0], 0
        case ast.BinOp() if type(node.op) in OPERATORS:
            left, num_left = evaluate(node.left)
            right, num_right = evaluate(node.right)
            return OPERATORS[type(node.op)](left, right), num_left + num_right + 1
    raise ValueError("only whole numbers and + - * ( ) are allowed")


def make_row(generator):
    """Returns an expression of 2 to 4 operations, after the worked examples."""
    expression = str(generator.randint(2, 20))
    num_operations = generator.randint(2, 4)
    for number in range(num_operations):
        sign = generator.choice("+-*")
        other = generator.randint(2, 20 if sign != "*" else 9)
        inner = f"({expression})" if number and generator.random() < 0.5 else expression
        pair = [inner, str(other)]
        generator.shuffle(pair)
        expression = f" {sign} ".join(pair)
    messages = [{"role": "system", "content": SYSTEM_PROMPT}]
    for question, *steps in EXAMPLES:
        messages.append({"role": "user", "content": question})
        for step in steps:
            messages += [
                {"role": "assistant", "content": step},
                {"role": "user", "content": GO_ON},
            ]
        messages.pop()  # there is no step after the number
    messages.append({"role": "user", "content": expression})
    return {"messages": messages, "expression": expression}


def main():
    parser = argparse.ArgumentParser(description="Writes expressions, with worked examples.")
    parser.add_argument("count", type=int)
    parser.add_argument("file", help="JSON lines")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    generator = random.Random(arguments.seed)
    with open(arguments.file, "w", encoding="utf-8") as file:
        for _ in range(arguments.count):
            file.write(json.dumps(make_row(generator)) + "\n")


if __name__ == "__main__":
    main()
