"""The environment: what a reply earns. `rl2 env env.py data.path=train.jsonl` tries it."""

import re


def reward_fn(messages, answer):
    """Returns the reward of a conversation that has ended.

    `messages` is the conversation, a list of {"role": ..., "content": ...}; the last one is the
    model's reply. `answer` is the column of that name of the row. For another column, add a
    parameter with its name.

    The reward is a number, or a dict of named numbers, which are added up and logged one by one.
    """
    reply = messages[-1]["content"]
    numbers = re.findall(r"-?\d+", reply)
    # The last number counts. If any number did, a list of guesses would be right.
    right = float(numbers[-1:] == [answer])
    # A small part for what you want besides. A wrong reply must not earn it.
    short = 0.1 * right * (len(reply) < 100)
    return {"right": right, "short": short}
