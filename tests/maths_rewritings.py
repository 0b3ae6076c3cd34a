r"""Rewritings of answers in mathematics by rule: those that mean the same, and those that do not.

ANSWERS are of MATH-500.
"""

import re
from fractions import Fraction

from common import read_cases

ANSWERS = read_cases("math500_answers")
OTHER_SPELLINGS = [  # (LaTeX, what may stand in its place)
    (r"\frac", r"\dfrac"),
    (r"\frac", r"\tfrac"),
    (r"\sqrt{", r"\sqrt {"),
    (r"\pi", r"{\pi}"),
    (r"^\circ", r"^{\circ}"),
    (r"^\circ", ""),
    (r"^\circ", r"\text{ degrees}"),
    (r"\$", ""),
    (r",\!", ","),
    (r",\!", "{,}"),
    (r"\text{ cents}", ""),
    (r"\mbox{ cm}^2", ""),
    (r"\mbox{ cm}^2", r"\text{ cm}^2"),
    (r"\mbox{ inches}^2", ""),
    ("pmatrix", "bmatrix"),
    (r"x \in ", ""),
    ("^2", "^{2}"),
    (", ", ","),
    (" - ", "-"),
    ("+", " + "),
]
SEPARATOR = re.compile(r",\\! ?|,(?=\d{3}$)")  # of thousands
INTEGERS = re.compile(r"-?\d+(, ?-?\d+)+")
BRACKETS = re.compile(r"([(\[])([^()\[\]]+)([)\]])")
ROOT = re.compile(r"(\d+) ?\\sqrt\{(\d+)\}")
TEXT = re.compile(r"\\text\{(\(?\w+\)?)\}")
BASE = re.compile(r"_\{?(\d)\}?")


def rewrite(answer: str) -> tuple[set[str], set[str]]:
    """(LaTeX that means the same as the answer, LaTeX that means something else or more)."""
    same, different = rewrite_any(answer)
    value = value_of(answer)
    terms = terms_of(answer)
    others = [
        rewrite_number(value) if value is not None else None,
        rewrite_sum(answer, terms) if len(terms) > 1 else None,
        rewrite_list(answer.split(",")) if INTEGERS.fullmatch(answer) and value is None else None,
        rewrite_brackets(*match.groups()) if (match := BRACKETS.fullmatch(answer)) else None,
        rewrite_root(int(match[1]), int(match[2])) if (match := ROOT.fullmatch(answer)) else None,
        rewrite_text(match[1]) if (match := TEXT.fullmatch(answer)) else None,
        rewrite_base(answer) if BASE.search(answer) else None,
    ]
    for other in filter(None, others):
        same |= other[0]
        different |= other[1]
    return same - {answer}, different - {answer}


def rewrite_any(answer):
    same = {f" {answer} ", rf"\displaystyle {answer}", rf"\,{answer}", f"{answer}."}
    for latex, other in OTHER_SPELLINGS:
        same.add(answer.replace(latex, other))
    different = {"", "?", "1234567", "9" * 5000, r"\infty + x", r"\text{other}"}
    # Several answers at once
    different |= {
        f"{answer} or 123",
        f"123, {answer}",
        rf"{answer} \text{{ or }} 123",
        rf"{answer}\text{{ or 123}}",
        rf"123 \ne {answer}",
    }
    # Another number in the place of the last one, if it is neither an exponent nor a base
    numbers = list(re.finditer(r"(?<![_^{\d])\d+", SEPARATOR.sub("", answer)))
    if numbers:
        start, end = numbers[-1].span()
        text = SEPARATOR.sub("", answer)
        different.add(f"{text[:start]}{int(text[start:end]) + 1}{text[end:]}")
        different.add(f"{text[:start]}1{text[start:]}")
    return same, different


def value_of(answer) -> Fraction | None:
    """The value of an answer that is a number or a fraction."""
    plain = SEPARATOR.sub("", answer).removeprefix(r"\$")
    plain = re.sub(r" ?\\d?frac\{(\d+)\}\{(\d+)\}", r" \1/\2", plain)
    if mixed := re.fullmatch(r"(\d+) (\d+/\d+)", plain):
        return int(mixed[1]) + Fraction(mixed[2])
    plain = plain.replace("- ", "-").strip()
    return Fraction(plain) if re.fullmatch(r"-?\d*\.?\d+(/\d+)?", plain) else None


def frac(top, bottom) -> str:
    return rf"\frac{{{top}}}{{{bottom}}}"


def rewrite_number(value: Fraction):
    top, bottom, sign = abs(value.numerator), value.denominator, "-" if value < 0 else ""
    same = {
        f"${value}$",
        rf"\({value}\)",
        f"x = {value}",
        rf"\text{{{value}}}",
        rf"\mathbf{{{value}}}",
        f"{{{value}}}",
        f"{value} + 0",
        f"{sign}{top}/{bottom}",
        frac(f"{sign}{top}", bottom),
    }
    same |= {sign + frac(k * top, k * bottom) for k in (1, 2, 7)}
    decimals = f"{float(value):.9f}"
    if bottom == 1:
        separated = f"{int(value):,}"
        same |= {separated, separated.replace(",", "{,}"), separated.replace(",", r",\!")}
        same |= {f"{value}.0", f"{value - 1} + 1", rf"\${value}"}
        same |= {rf"{value} \text{{ units}}", rf"{sign}\sqrt{{{top**2}}}"}
    else:
        same.add(decimals)
    if top > bottom > 1:
        same.add(f"{sign}{top // bottom}{frac(top % bottom, bottom)}")
    different = {
        rf"{value}\%" if value else "1",
        str(value + 1),
        str(-value - 1),
        f"{float(value) + 0.01:.5f}",
        f"{value + 1}, {value}",
        f"{value} + x",
        f"x > {value}",
        f"({value})^2 + 1",
        rf"\sqrt{{{value + 2}}} + {top}",
        rf"{value} \cup {value + 1}",
        f"({value}, {value + 1})",
        f"{value}..{value + 1}",
        f"{top + 1} not {value}" if value else "1",  # math-verify multiplies: 1 not 0 is 0
    }
    return same, different


def terms_of(answer) -> list[str]:
    """The signed terms of a sum without brackets: +x^2 and -3 of x^2 - 3."""
    compact = answer.replace(" ", "")
    if not re.fullmatch(r"(?:[\w+^-]|\\sqrt\{?\d+\}?|\\pi)+", compact) or BASE.search(compact):
        return []
    return re.findall(r"[+-][^+-]+", compact if compact[0] == "-" else f"+{compact}")


def rewrite_sum(answer, terms):
    changed_sign = terms[-1].translate(str.maketrans("+-", "-+"))
    turned = "".join(terms[::-1])
    rotated = "".join([*terms[1:], terms[0]])
    same = {turned, rotated, f"({turned})", f"{answer} + 1 - 1", frac(f"2({answer})", 2)}
    return same, {"".join(terms[:-1]), "".join([*terms[:-1], changed_sign]), f"2({answer})"}


def rewrite_list(entries):
    """The solutions of an equation, in any order."""
    entries = [entry.strip() for entry in entries]
    turned, rotated = entries[::-1], entries[1:] + entries[:1]
    same = {", ".join(turned), ",".join(rotated), r"\{" + ",".join(entries) + r"\}"}
    same |= {" and ".join(entries), " or ".join(turned), r"\text{ and }".join(entries)}
    different = {entries[0], ", ".join(entries[1:]), ", ".join([*entries, "99"])}
    return same, different


def rewrite_brackets(opening, inside, closing):
    """A point or an interval."""
    entries = inside.split(",")
    same = {
        rf"\left{opening}{inside}\right{closing}",
        opening + inside.replace(",", " , ") + closing,
        rf"\big{opening}{inside}\big{closing}",
    }
    different = {
        f"{opening}{','.join(entries[::-1])}{closing}",
        f"{opening}{','.join(entries[:-1])}{closing}",
        f"{opening}{inside}, 99{closing}",
        entries[0],
    }
    if "[" in opening or "]" in closing or "infty" in inside:
        different.add(f"{opening}{inside}{closing}".translate(str.maketrans("([])", "[()]")))
    return same, different


def rewrite_root(factor, radicand):
    same = {
        rf"\sqrt{{{factor**2 * radicand}}}",
        rf"\sqrt{{{radicand}}} \cdot {factor}",
        rf"{factor}\times\sqrt{{{radicand}}}",
        rf"{factor}({radicand})^{{1/2}}",
        frac(factor * radicand, rf"\sqrt{{{radicand}}}"),
    }
    return same, {rf"\sqrt{{{factor * radicand}}}", str(factor), rf"{radicand}\sqrt{{{factor}}}"}


def rewrite_text(text):
    same = {text, rf"\textbf{{{text}}}", rf"\mathrm{{{text}}}", rf"\text{{{text} }}"}
    different = {f"not {text}", f"{text} or other", rf"\text{{{text}, other}}", text * 2}
    return same, different


def rewrite_base(answer):
    """A number with its base: 52_8."""
    digits, base = BASE.sub("", answer), int(BASE.search(answer)[1])
    return {f"{digits}_{{{base}}}", f"{digits}_{base}", digits}, {f"{digits}_{{{base + 1}}}"}
