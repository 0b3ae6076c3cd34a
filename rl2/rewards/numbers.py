"""The number that a field holds, alone (`number`) or in prose (`quantity`), as an exact Fraction.

In doubt there is none. What may be beside a number is listed here, so that a sign or a word that
nobody has thought of makes the field wrong, not right.
"""

import ast
import json
import operator
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

from rl2.rewards.spelling import in_prose, one_spelling, plain_field

MAX_CHARACTERS = 1000  # by which a field may be longer than the answer
MAX_UNIT_WORDS = 8

# Words that multiply. In the plural (thousands of apples) they say no number.
SCALES = {
    "%": Fraction(1, 100),
    "dozen": Fraction(12),
    "hundred": Fraction(100),
    "thousand": Fraction(10**3),
    "million": Fraction(10**6),
    "billion": Fraction(10**9),
    "trillion": Fraction(10**12),
}
SCALE = re.compile("|".join(SCALES), re.IGNORECASE)
ASKED = re.compile(
    r"\b(?:what|how many)(?: is)?(?: the)? (percent|dozen|hundred|thousand|million|billion)"
    r"|\bas an? (percent)|(percent)age chance|(?<!\d )(percent)(?:age)?\b[^.?]*\?\s*$",
    re.IGNORECASE,
)
# Digits, which may have thousands separators and decimals.
DIGITS = r"(?=\.?\d)(?:\d{1,3}(?:,\d{3})+(?!\d)|\d*)(?:\.\d*)?"
SIMPLE_FRACTION = re.compile(r"\\frac\{(\d+)\}\{(\d+)\}", re.ASCII)
NUMBER = re.compile(
    rf"([+-]?)(?:(\d+) (?=\d+/))?({DIGITS})(?:/(\d+))?({SCALE.pattern})?",
    re.ASCII | re.IGNORECASE,
)
REPEATING = re.compile(r"([+-]?)(\d*)\.(\d*)\\(?:overline|bar|dot)(?:\{(\d+)\}|(\d))(%?)", re.ASCII)

# A field in prose: words, a number, words.
PROSE = re.compile(
    rf"(?P<before>[^\d\\]*?)"
    rf"(?P<sign>(?<![\w),.])[+-]?)(?P<currency>(?:US)?[$€£¥])? ?(?P<minus>-?)"
    rf"(?P<number>(?:\d+ (?=\d+/\d))?{DIGITS}(?:/\d+)?)"
    rf"(?P<scale> ?(?:{SCALE.pattern})(?![a-z]))?(?P<after>.*)",
    re.ASCII | re.IGNORECASE,
)
WORD = re.compile(r"[^\W\d_]+(?:['-][^\W\d_]+)*'?(?:\^?[23²³](?!\w))?|\S")
VARIABLE = re.compile(r"(?:^|\s)[a-z]\s*=\s*$", re.IGNORECASE)
WORDS: dict[str, Any] = json.loads(Path(__file__).with_name("words.json").read_text("utf-8"))
# Words, and nothing else, that may introduce a number: not "at least", "half of" or "minus".
BEFORE = set(WORDS["before"])
# Words after a number that make it another number, or put it in doubt.
DOUBTFUL = {
    *WORDS["numbers"],
    *WORDS["parts"],
    *WORDS["operations"],
    *WORDS["doubts"],
}
EQUALS = re.compile(r"(?<![<>!=])=(?!=)")
WITH_SUM = re.compile(r"([^(]+)\(([\d\s.,$+*/-]+)\)\.?")  # 5 apples (2 + 3)
SCIENTIFIC = re.compile(r"(\d+(?:\.\d+)?) ?(?:\\times|×|\*) ?10\^\{?(\d)(?:\}|(?!\d))", re.ASCII)
VARIABLE_ALONE = re.compile(r"\W*(?:[a-z]|[a-z ]*(?:is|total|answer)):?\W*", re.IGNORECASE)
FORMULA = re.compile(r"[\d\s.+*/()-]{1,100}", re.ASCII)
OPERATORS: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
# Each spelling of a measure -> (dimension, unit)
MEASURES = {
    word: (dimension, names[0])
    for dimension, measures in WORDS["measures"].items()
    for names in map(str.split, measures)
    for word in names
}
MEASURE = re.compile(
    r"(?:(square|sq|cubic|cu)\b\.? ?)?([$€£¢]|(?<![a-z'])[a-z]+)"
    r"(?:(?: per | an |/) ?(?:1 )?(h|hour|second|s|minute)s?\b)?\.?\s*\^?([23²³]?)"
)
SPEED = re.compile(
    r"speed|fast|rate|pace|mph|km/h|per (?:hour|minute|second)|an hour", re.IGNORECASE
)
# Letters that are units: after a space, and after the digits, where m may be millions.
LETTER_UNITS, GLUED_UNITS = set("ghlmsCFLW"), set("ghlsL")


def number(field: str | None) -> Fraction | None:
    r"""The exact value of a field that is one number, such as -1,234.50, 7/2, 2\frac12 or 72\%.

    72\% is 72/100, and 3 million is 3000000.
    """
    if field is None or len(field) > MAX_CHARACTERS:
        return None
    text = one_spelling(field)
    if repeating := REPEATING.fullmatch(text):
        return _repeating_decimal(*repeating.groups())
    match = NUMBER.fullmatch(SIMPLE_FRACTION.sub(_plain_fraction, text))
    if match is None:
        return None
    sign, whole, digits, bottom, scale = match.groups()
    if bottom and (int(bottom) == 0 or (whole and int(digits) >= int(bottom))):
        return None
    value = Fraction(digits.replace(",", "")) / int(bottom or 1) + int(whole or 0)
    value *= SCALES[scale.lower()] if scale else 1
    return -value if sign == "-" else value


def _plain_fraction(match: re.Match) -> str:
    r"""3/4 for \frac{3}{4}, and a space before it if it follows a whole number."""
    is_mixed = match.string[: match.start()][-1:].isdigit()
    return f"{' ' * is_mixed}{match[1]}/{match[2]}"


def _repeating_decimal(
    sign: str, whole: str, digits: str, period: str | None, one_digit: str | None, percent: str
) -> Fraction:
    """Returns the value of whole.digits, after which the period repeats without end."""
    period = period or one_digit or ""
    value = Fraction(f"{whole or 0}.{digits or 0}")
    value += Fraction(int(period), (10 ** len(period) - 1) * 10 ** len(digits))
    value *= SCALES["%"] if percent else 1
    return -value if sign == "-" else value


def quantity(field: str | None, asked: str = "") -> Fraction | None:
    """Returns the number of a field in prose: $72.50, 72 apples, x = 72, The answer is 72.

    None if it has several, or if words or signs around it may make it another one. `asked` is the
    scale that the question asks for (`asked_scale`): 7 dozen is 7 if it asks for dozens, else 84.
    """
    if field is None or len(field) > MAX_CHARACTERS:
        return None
    *sides, last = EQUALS.split(in_prose(field))
    if not sides and (match := WITH_SUM.fullmatch(last)):
        last, sides = match[1], [match[2]]
    value = _one_quantity(without_scale(last, asked))
    if value is None or not sides:
        return value
    if _are_equal(sides, _one_quantity(last)) or _are_equal(sides, value):
        return value
    # Not an equation of numbers: "The answer is x = 72"
    return _one_quantity(without_scale(field, asked))


def _are_equal(sides: list[str], value: Fraction | None) -> bool:
    """Returns whether every side before the last one is arithmetic with this value: 9 * $2."""
    if VARIABLE_ALONE.fullmatch(sides[0]):
        sides = sides[1:]
    return bool(sides) and all(arithmetic(side) == value for side in sides)


def arithmetic(text: str) -> Fraction | None:
    """Returns the value of a sum or product of numbers, which may have units, or None."""
    text = re.sub(r"\\(?:times|cdot)|[×·]|(?<=[\d%)])\s*x(?=\s*[$\d(])", "*", text)
    text = re.sub(r"\\div|÷", "/", text)
    text = re.sub(r"(?<=\d),(?=\d{3})|[$€£]|\b[a-z]{2,}\b", "", in_prose(text), flags=re.IGNORECASE)
    if not FORMULA.fullmatch(text.replace("%", "/100")):
        return None
    try:
        return _value(ast.parse(text.replace("%", "/100").strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> Fraction | None:
    """Returns the exact value of an expression of + - * /, or None."""
    if isinstance(node, ast.Constant):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp):
        value = _value(node.operand)
        return None if value is None else -value
    if not isinstance(node, ast.BinOp) or type(node.op) not in OPERATORS:
        return None
    left, right = _value(node.left), _value(node.right)
    return None if left is None or right is None else OPERATORS[type(node.op)](left, right)


def unit(text: str) -> tuple[str, str, str] | None:
    """Returns (dimension, unit, power) of the first measure in a text, such as (length, cm, 2)."""
    return next(units(text), None)


def units(text: str) -> Iterator[tuple[str, str, str]]:
    """Yields (dimension, unit, power) of the measures in a text: cm^2, square miles, $, mph."""
    text = re.sub(r"[{}\\]", "", in_prose(text)).lower()
    text = re.sub(r"kmph|kph", "km per hour", text)
    text = text.replace("mph", "miles per hour")
    for square, word, over, power in MEASURE.findall(text):
        dimension, name = MEASURES.get(word, ("", ""))
        if dimension == "length" and over:
            dimension = "speed"
            name += " per " + over
        power = power or {"sq": "2", "cu": "3"}.get(square[:2], "")
        if dimension and (word != "in" or power):  # else the preposition
            yield dimension, name, power


def is_other_unit(field: str, messages: list[dict]) -> bool:
    """Returns whether a field has another unit than the question: cents where it has dollars only.

    A speed answers only a question for one.
    """
    field = re.sub(r"^.*=", "", field)
    question = next((m["content"] for m in reversed(messages) if m["role"] == "user"), "")
    found = unit(field)
    if found is None or not isinstance(question, str):
        return False
    asked = set(units(question))
    if found[0] == "speed" and not SPEED.search(re.split(r"[.!]\s", question.strip())[-1]):
        return True
    names = {name for dimension, name, _ in asked if dimension == found[0]}
    if found[0] == "length":  # 60 mph asks for miles
        names |= {name.split()[0] for dimension, name, _ in asked if dimension == "speed"}
    return bool(names) and found[1] not in names


def _one_quantity(field: str) -> Fraction | None:
    """Returns the number of a field without an equation."""
    text = SCIENTIFIC.sub(lambda match: f"{Decimal(f'{match[1]}e{match[2]}'):f}", in_prose(field))
    match = PROSE.fullmatch(text)
    if match is None or ".." in text or (match["sign"] and match["minus"]):
        return None
    if not _introduces(match["before"]) or not _is_unit(match["after"], bool(match["currency"])):
        return None
    sign = match["sign"] or match["minus"]
    return number(f"{sign}{match['number']}{match['scale'] or ''}")


def _introduces(text: str) -> bool:
    """Whether words before a number say that it is the answer: "So x =", "The answer is"."""
    words = WORD.findall(VARIABLE.sub(" ", text).lower())
    return all(word in BEFORE for word in words) and words.count("=") <= 1


def _is_unit(text: str, is_money: bool) -> bool:
    """Returns whether words after a number say what it counts: apples, cm^2, dollars per hour."""
    words = WORD.findall(text)
    if not words or words == ["."]:
        return True
    if words[0] in (".", "!") or words[-1] in ("/", "a") or len(words) > 2 * MAX_UNIT_WORDS:
        return False
    if words.count("(") != words.count(")"):
        return False
    letters = LETTER_UNITS if text[0] == " " else GLUED_UNITS
    return all(_is_unit_word(word, set() if is_money else letters) for word in words)


def _is_unit_word(word: str, letters: set[str]) -> bool:
    """Returns whether a word may be of a unit. A single letter must be one of `letters`."""
    if word in set("./()!€£¥a"):  # $18 a day
        return True
    base = word.rstrip("^23²³'")
    if len(base) == 1:
        return base in letters
    parts = base.lower().split("-")
    return base[:1].isalpha() and not {base.lower(), *parts} & DOUBTFUL


def asked_scale(messages: list[dict]) -> str:
    """Returns what the last question asks for: % for a percentage, dozen, thousand, ..., or ""."""
    questions = [message["content"] for message in messages if message["role"] == "user"]
    found = ASKED.search(questions[-1]) if questions and isinstance(questions[-1], str) else None
    scale = next(filter(None, found.groups())).lower() if found else ""
    return "%" if scale == "percent" else scale


def without_scale(field: str, scale: str) -> str:
    """Returns a field without the scale that the question asks for."""
    if not scale:
        return field
    pattern = r"\\?%|per ?cent" if scale == "%" else rf"{scale}s?"
    return re.sub(rf"(?:{pattern})(?![a-z])", "", plain_field(field), flags=re.IGNORECASE)
