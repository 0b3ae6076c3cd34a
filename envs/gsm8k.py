"""Word problems whose answer is a number behind ####, as in the solutions of GSM8K.

Row: {"messages": [...], "answer": "72"}. The answer is a number, its text, or a solution that ends
in "#### 72", as the data set has it.

The prompt should ask for it, for instance: "Reason step by step, then write the number after ####."
"""

import re
from fractions import Fraction

# The number may have signs before it and text behind it: $72, 72%, 72 apples. Its digits may have
# thousands separators and decimals.
NUMBER = re.compile(r"[^\d\w-]*(-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?)", re.ASCII)
MAX_CHARACTERS = 1000  # of a number; Python reads no more than 4,300 digits


def reward_fn(messages, answer):
    """Two reward parts for the text behind the last #### of the reply.

    right: 1.0 if its number is the answer, else 0.0.
    format: 0.1 if it has a number, else 0.0.
    """
    number = extract(messages)
    if number is None:
        return {"right": 0.0, "format": 0.0}
    expected = str(answer).rpartition("####")[2].strip()
    is_right = exact_value(number) == exact_value(expected)
    return {"right": float(is_right), "format": 0.1}


def extract(messages):
    """The exact number behind the last #### of the reply as a text, or None."""
    _, marker, conclusion = messages[-1]["content"].rpartition("####")
    number = NUMBER.match(conclusion)
    if not marker or not number or len(number[1]) > MAX_CHARACTERS:
        return None
    return str(exact_value(number[1]))


def exact_value(number):
    """The exact value of a number or of its text: exact_value("1,234.5") == 1234.5."""
    return Fraction(str(number).replace(",", ""))
