r"""Mathematics whose answer stands in \boxed{}.

Row: {"messages": [...], "answer": "\\frac{\\pi}{2}"}. The answer is LaTeX.

Two answers are the same if one of these is equal:
- their LaTeX, apart from spacing and from spellings such as \dfrac12 for \frac{1}{2};
- their numbers: \frac{1}{2} is 0.5;
- all entries of their tuples, intervals, lists or sets, where those of lists and sets may come in
  any order.
No algebra is done: 2x + 1 and 1 + 2x differ. For algebra, call math_verify's parse and verify here.
"""

import re
from fractions import Fraction

BOX = "\\boxed{"
MAX_CHARACTERS = 4000  # of an answer; Python reads no more than 4,300 digits
# (pattern, replacement), applied in this order: answers that mean the same become the same text.
REPLACEMENTS = [
    # Sizes of brackets, and spaces
    (
        r"\\(?:left|right|big|Big|bigg|Bigg)(?![a-zA-Z])"
        r"|\\[,;:! ]|\\(?:quad|qquad|displaystyle)(?![a-zA-Z])|~",
        "",
    ),
    # Other names of the same command
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\(?:text|mathrm|textbf|mathbf|mbox)\{([^{}]*)\}", r"\1"),
    # Units: degrees, per cent, dollars
    (r"\^\{?\\circ\}?|\\degree|\\%|%|\\\$|\$", ""),
    (r"\\leq(?![a-zA-Z])", r"\\le"),
    (r"\\geq(?![a-zA-Z])", r"\\ge"),
    (r"\\neq(?![a-zA-Z])", r"\\ne"),
    (r"\s+", ""),
    # Braces around each argument: \frac12, \frac{1}2, \frac1{2}, \sqrt3
    (r"\\frac([^{\\])([^{\\])", r"\\frac{\1}{\2}"),
    (r"\\frac\{([^{}]*)\}([^{\\])", r"\\frac{\1}{\2}"),
    (r"\\frac([^{\\])\{", r"\\frac{\1}{"),
    (r"\\sqrt([^{\\\[])", r"\\sqrt{\1}"),
    # Thousands separators: 1{,}234 and 1,234
    (r"\{,\}", ","),
    (r"(?<=\d),(?=\d{3}(?!\d))", ""),
    # The name of the unknown, as in x=3, and a full stop at the end
    (r"^[a-zA-Z]=(?=.)", ""),
    (r"\.$", ""),
]
BRACKETS = {"(": ")", "[": "]", "\\{": "\\}"}
UNORDERED = ("\\{\\}", "")  # the brackets of a set, and those of a list of all solutions


def reward_fn(messages, answer):
    r"""1.0 if the last \boxed{} of the reply holds the answer, else 0.0."""
    content = last_boxed(messages[-1]["content"])
    if content is None or len(content) > MAX_CHARACTERS:
        return 0.0
    return float(is_same(content, str(answer)))


def extract(messages):
    r"""The content of the last \boxed{} of the reply: a number, or LaTeX without spellings."""
    content = last_boxed(messages[-1]["content"])
    if content is None or len(content) > MAX_CHARACTERS:
        return None
    content = normalise(content)
    number = to_number(content)
    return content if number is None else str(number)


def last_boxed(text):
    r"""The content of the last \boxed{...} in the text, or None if there is none that closes."""
    start = text.rfind(BOX)
    if start < 0:
        return None
    start += len(BOX)
    depth = 1
    for i in range(start, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[start:i]
    return None


def is_same(left, right):
    """Whether two answers in LaTeX are the same."""
    left, right = normalise(left), normalise(right)
    if left == right:
        return True
    left_number, right_number = to_number(left), to_number(right)
    if left_number is not None and right_number is not None:
        return left_number == right_number
    left_brackets, left_entries = split_entries(left)
    right_brackets, right_entries = split_entries(right)
    if left_brackets != right_brackets or len(left_entries) != len(right_entries):
        return False
    if left_entries == [left]:  # there was nothing to split
        return False
    if left_brackets in UNORDERED:
        left_entries, right_entries = sorted(left_entries), sorted(right_entries)
    return all(map(is_same, left_entries, right_entries))


def normalise(answer):
    for pattern, replacement in REPLACEMENTS:
        answer = re.sub(pattern, replacement, answer)
    return answer


def to_number(answer):
    r"""The exact value of 3, -0.5, 7/2 or \frac{7}{2}. None for anything else."""
    fraction = re.fullmatch(r"(-?)\\frac\{(-?\d+)\}\{(-?\d+)\}", answer)
    quotient = re.fullmatch(r"(-?\d+)/(\d+)", answer)
    try:
        if fraction:
            sign = -1 if fraction[1] else 1
            return sign * Fraction(int(fraction[2]), int(fraction[3]))
        if quotient:
            return Fraction(int(quotient[1]), int(quotient[2]))
    except ZeroDivisionError:
        return None
    if re.fullmatch(r"-?(?:\d+(?:\.\d*)?|\.\d+)", answer):
        return Fraction(answer)
    return None


def split_entries(answer):
    """(brackets, entries) of a tuple, an interval, a set, or a list without brackets.

    A comma inside inner brackets separates nothing. `brackets` are the outer ones, such as "[)".
    """
    opening = find_opening(answer)
    closing = answer[-len(opening) :] if opening else ""
    entries = [""]
    depth = 0
    for character in answer[len(opening) : len(answer) - len(closing)]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            entries.append("")
        else:
            entries[-1] += character
    return opening + closing, entries


def find_opening(answer):
    """The bracket that opens the whole answer, or "". An interval may close by another kind."""
    for opening, closing in BRACKETS.items():
        if answer.startswith(opening) and answer.endswith((closing, ")", "]")):
            return opening
    return ""
