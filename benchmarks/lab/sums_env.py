"""An environment for sums and differences of one-digit numbers.

Row: {"messages": [...], "answer": "-4"}.
"""

import re

NUMBER = re.compile(r"-?\d+")


def reward_fn(messages, answer):
    """Two reward parts for the last number of the reply.

    right: 1.0 if it is the answer, else 0.0.
    sign: 0.1 if it is negative where the answer is and not elsewhere, else 0.0. The model finds the
    negative answers by it: at first it hardly ever writes one, and never the right one.
    """
    numbers = NUMBER.findall(messages[-1]["content"])
    if not numbers:
        return {"right": 0.0, "sign": 0.0}
    has_right_sign = numbers[-1].startswith("-") == answer.startswith("-")
    return {"right": float(numbers[-1] == answer), "sign": 0.1 * has_right_sign}
