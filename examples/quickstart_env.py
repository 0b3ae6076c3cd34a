"""The environment of the quickstart: which of four numbers is the largest?

Row: {"messages": [...], "answer": "63"}.
"""

import re

MAX_WORDS = 5  # of a brief reply, such as "The largest number is 63."


def reward_fn(messages, answer):
    """1.0 if the reply is brief and the answer is its only number, else 0.0."""
    reply = messages[-1]["content"]
    is_right = re.findall(r"\d+", reply) == [answer]
    return float(is_right and len(reply.split()) <= MAX_WORDS)
