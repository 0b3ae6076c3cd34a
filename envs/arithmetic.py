"""Questions with one number as the answer. Row: {"messages": [...], "answer": 7}, the answer a number or its text."""

import re
from fractions import Fraction

# Digits, with or without thousands commas and decimals. The minus of a difference is no sign: 5-3 has 5 and 3.
NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?", re.ASCII)


def reward_fn(messages, answer):
    """1.0 if the last number of the reply is the answer, else 0.0."""
    numbers = [number.replace(",", "") for number in NUMBER.findall(messages[-1]["content"])]
    return float(bool(numbers) and Fraction(numbers[-1]) == Fraction(str(answer).replace(",", "")))
