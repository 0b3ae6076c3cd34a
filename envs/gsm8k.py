"""Word problems whose answer is a number behind ####, as GSM8K writes it. Row: {"messages": [...], "answer": "72"}.

The prompt should say so, for instance: "Reason step by step, then write the number after ####."
"""

import re
from fractions import Fraction

# What may stand around the number: $72, 72%, 72 apples. Digits come with or without thousands commas and decimals.
NUMBER = re.compile(r"[^\d\w-]*(-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?)", re.ASCII)


def reward_fn(messages, answer):
    """right: 1 if the number behind the last #### is the answer; format: 0.1 if a number is there at all."""
    _, marker, told = messages[-1]["content"].rpartition("####")
    found = NUMBER.match(told) if marker else None
    if not found:
        return {"right": 0.0, "format": 0.0}
    right = Fraction(found[1].replace(",", "")) == Fraction(str(answer).replace(",", ""))
    return {"right": float(right), "format": 0.1}
