"""The environment of the quickstart: which of four numbers is the largest?

Row: {"messages": [...], "answer": "63"}.
"""

import re


def reward_fn(messages, answer):
    """1.0 if the last number of the reply is the answer, else 0.0."""
    numbers = re.findall(r"\d+", messages[-1]["content"])
    return float(numbers[-1:] == [answer])
