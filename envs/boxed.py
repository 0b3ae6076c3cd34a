r"""Mathematics whose answer is in \boxed{}. Row: {"messages": [...], "answer": "\\frac{\\pi}{2}"}.

Two answers are the same if their LaTeX is, spacing and the many ways to write a fraction aside, or their numbers, or all
entries of their tuples and sets. 2x + 1 and 1 + 2x are not: for algebra, call math_verify's parse and verify here.
"""

import re
from fractions import Fraction

SPELLING = [
    (
        r"\\(?:left|right|big|Big|bigg|Bigg)(?![a-zA-Z])|\\[,;:! ]|\\(?:quad|qquad|displaystyle)(?![a-zA-Z])|~",
        "",
    ),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\(?:text|mathrm|textbf|mathbf|mbox)\{([^{}]*)\}", r"\1"),
    (r"\^\{?\\circ\}?|\\degree|\\%|%|\\\$|\$", ""),
    (r"\\leq(?![a-zA-Z])", r"\\le"),
    (r"\\geq(?![a-zA-Z])", r"\\ge"),
    (r"\\neq(?![a-zA-Z])", r"\\ne"),
    (r"\s+", ""),
    (r"\\frac([^{\\])([^{\\])", r"\\frac{\1}{\2}"),
    (r"\\frac\{([^{}]*)\}([^{\\])", r"\\frac{\1}{\2}"),
    (r"\\frac([^{\\])\{", r"\\frac{\1}{"),
    (r"\\sqrt([^{\\\[])", r"\\sqrt{\1}"),
    (r"\{,\}", ","),
    (r"(?<=\d),(?=\d{3}(?!\d))", ""),  # thousands
    (r"^[a-zA-Z]=(?=.)", ""),  # x = 3
    (r"\.$", ""),
]
PAIRS = {"(": ")", "[": "]", "\\{": "\\}"}


def boxed(text):
    r"""What is in the last \boxed{...} of the text, or None."""
    start = text.rfind("\\boxed{")
    depth, begin = 0, start + len("\\boxed{")
    for i in range(begin - 1, len(text)) if start >= 0 else []:
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[begin:i]
    return None


def spell(answer):
    for pattern, plain in SPELLING:
        answer = re.sub(pattern, plain, answer)
    return answer


def number(answer):
    """The value of 3, -0.5, 7/2 or \\frac{7}{2}, else None."""
    found = re.fullmatch(r"(-?)\\frac\{(-?\d+)\}\{(-?\d+)\}|(-?\d+)/(\d+)", answer)
    try:
        if found:
            top, bottom = (found[2], found[3]) if found[2] else (found[4], found[5])
            return (-1 if found[1] else 1) * Fraction(int(top), int(bottom))
        return Fraction(answer) if re.fullmatch(r"-?(?:\d+\.?\d*|\.\d+)", answer) else None
    except ZeroDivisionError:
        return None


def entries(answer):
    """(bracket, entries) of a tuple, interval or set; commas within braces or brackets separate nothing."""
    opening = next(
        (o for o, c in PAIRS.items() if answer.startswith(o) and answer.endswith((c, ")", "]"))), ""
    )
    closing = answer[-len(opening) :] if opening else ""
    found, depth = [""], 0
    for letter in answer[len(opening) : len(answer) - len(closing)]:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return opening + closing, found


def same(one, other):
    one, other = spell(one), spell(other)
    if one == other:
        return True
    if None not in (values := (number(one), number(other))):
        return values[0] == values[1]
    (brackets, parts), (other_brackets, other_parts) = entries(one), entries(other)
    if brackets != other_brackets or len(parts) != len(other_parts) or parts == [one]:
        return False
    if brackets in ("\\{\\}", ""):  # a set, or all solutions: in any order
        parts, other_parts = sorted(parts), sorted(other_parts)
    return all(map(same, parts, other_parts))


def reward_fn(messages, answer):
    r"""1.0 if what the last \boxed{} of the reply holds is the answer, else 0.0."""
    told = boxed(messages[-1]["content"])
    return float(told is not None and same(told, str(answer)))
