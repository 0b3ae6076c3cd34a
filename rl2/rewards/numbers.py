"""The number that a field holds, alone (`number`) or in prose (`quantity`), as an exact Fraction.

In doubt there is none. A second number beside it, a sign that is not listed here
and a word that may change it put it in doubt.
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
# Words beside a number that make it another number, or put it in doubt.
DOUBTFUL = set(WORDS["numbers"] + WORDS["parts"] + WORDS["operations"] + WORDS["doubts"])
EQUALS = re.compile(r"(?<![<>!=])=(?!=)")
WITH_SUM = re.compile(r"([^(]+)\(([^()]*\d[^()]*)\)\.?")  # 5 apples (2 + 3), 60 minutes (1 hour)
SCIENTIFIC = re.compile(
    r"(\d+(?:\.\d+)?) ?(?:\\times|\\cdot|×|\*) ?10\^\{?(-?\d{1,2})(?:\}|(?!\d))", re.ASCII
)
VARIABLE_ALONE = re.compile(r"\W*(?:[a-z]|[a-z ]*(?:is|total|answer)):?\W*", re.IGNORECASE)
FORMULA = re.compile(r"[\d\s.+*/()-]{1,100}", re.ASCII)
OPERATORS: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def _read_measures() -> tuple[dict[str, tuple[str, str]], dict[str, Fraction]]:
    """(the dimension and unit of each spelling of a measure, the sizes of units)."""
    units: dict[str, tuple[str, str]] = {}
    sizes: dict[str, Fraction] = {}
    for dimension, measures in WORDS["measures"].items():
        for names, size in measures.items():
            spellings = names.split()
            units |= dict.fromkeys(spellings, (dimension, spellings[0]))
            if size:
                sizes[spellings[0]] = Fraction(size)
    return units, sizes


MEASURES, SIZES = _read_measures()
AMOUNT = re.compile(r"([$€£]?)(\d[\d,]*(?:\.\d+)?) ?([a-z]*|¢)(?:,? and |,? |$)", re.IGNORECASE)
MEASURE = re.compile(
    r"(?:(square|sq|cubic|cu)\b\.? ?)?([$€£¢]|(?<![a-z'])[a-z]+)"
    r"(?:(?: per | an |/) ?(?:1 )?(h|hour|second|s|minute)s?\b)?\.?\s*\^?([23²³]?)"
)
POWERS = str.maketrans("²³", "23")
SPEED = re.compile(
    r"speed|fast|rate|pace|mph|km/h|per (?:hour|minute|second)|an hour", re.IGNORECASE
)
# Questions for one dimension
DIMENSIONS = {
    "money": re.compile(
        r"\bhow much (?:money|(?:do|does|did|will) .*(?:cost|pay|earn))", re.IGNORECASE
    ),
    "length": re.compile(r"\bhow (?:far|tall|high|wide|deep)\b", re.IGNORECASE),
}
HOW_MANY = re.compile(r"\bhow many\b([^?.]*)", re.IGNORECASE)
IN_UNITS = re.compile(
    r"\bin ((?:square |cubic )?(?:[a-z]+s|feet)(?: (?:per|an) \w+)?)\b", re.IGNORECASE
)
MENTIONED = re.compile(r"[a-z]{3,}|(?<=\d)[a-z]+|(?<=\d )(?!in\b)[a-z]+|[$€£¢]")
# Words after which a measure is not what a number counts: 21 eggs a week
PREPOSITION = re.compile(
    r"\b(?:per|an?|each|every|last|this|in|for|from|on|at|by|is|does|did|do)\b|/"
)
# What a rate is per, in full or as in "monthly"
PERIOD = re.compile(
    r"(?:\b(?:per|an?|each|every)|/) ?(hour|day|week|month|year)\b|\b(hour|dai|week|month|year)ly\b"
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
    text = SCIENTIFIC.sub(_in_full, SIMPLE_FRACTION.sub(_plain_fraction, text))
    match = NUMBER.fullmatch(text)
    if match is None:
        return None
    sign, whole, digits, bottom, scale = match.groups()
    if bottom and (int(bottom) == 0 or (whole and int(digits) >= int(bottom))):
        return None
    value = Fraction(digits.replace(",", "")) / int(bottom or 1) + int(whole or 0)
    value *= SCALES[scale.lower()] if scale else 1
    return -value if sign == "-" else value


def _in_full(match: re.Match) -> str:
    """Returns 0.00067 for 6.7 times 10^-4."""
    return f"{Decimal(f'{match[1]}e{match[2]}'):f}"


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
    sizes = [_size(side) for side in sides + [last]]
    if None not in sizes and len(set(sizes)) == 1:
        return value
    # Not an equation of numbers: "The answer is x = 72"
    return _one_quantity(without_scale(field, asked))


def _are_equal(sides: list[str], value: Fraction | None) -> bool:
    """Returns whether every side before the last one is arithmetic with this value: 9 * $2."""
    if VARIABLE_ALONE.fullmatch(sides[0]):
        sides = sides[1:]
    return bool(sides) and all(arithmetic(side) == value for side in sides)


def _size(text: str) -> tuple[str, Fraction] | None:
    """Returns the dimension of 2 hours and 40 minutes, and its size, or None."""
    text = re.sub(r"[^$€£\d]*", "", text, count=1).strip(" .")
    dimensions = set()
    total = Fraction(0)
    for sign, amount, word in AMOUNT.findall(text):
        dimension, name = MEASURES.get(sign or word.lower(), ("", ""))
        if name not in SIZES:
            return None
        dimensions.add(dimension)
        total += SIZES[name] * Fraction(amount.replace(",", ""))
    if AMOUNT.sub("", text) or len(dimensions) != 1:
        return None
    return dimensions.pop(), total


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
        return -value if value is not None and isinstance(node.op, ast.USub) else value
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
            name += " per " + MEASURES[over][1]
        power = power.translate(POWERS) or {"sq": "2", "cu": "3"}.get(square[:2], "")
        if dimension and (word != "in" or power):  # else the preposition
            yield dimension, name, power


def is_other_unit(field: str, messages: list[dict]) -> bool:
    """Returns whether the unit after the number of a field is not one that the question asks for.

    "How many cents" and "in cents" ask for cents, "how many apples" for none, and any other
    question for the units that it has, if it has any.
    """
    question = next((m["content"] for m in reversed(messages) if m["role"] == "user"), "")
    field = re.sub(r"\\frac\{.*?\}\{.*?\}|\\pi|\\sqrt\{.*?\}", "1", field)
    match = PROSE.fullmatch(in_prose(field.rpartition("=")[2]))
    if match is None or not isinstance(question, str):
        return False
    last_sentence = re.split(r"[.!]\s", question.strip())[-1]
    asked_periods = _periods(last_sentence)
    if asked_periods and not asked_periods >= _periods(match["after"]):
        return True
    found = _counted(match["currency"] or match["after"])
    if found is None:
        return False
    counts = HOW_MANY.findall(last_sentence)
    texts = counts + IN_UNITS.findall(last_sentence)
    asked = list(filter(None, map(_counted, texts)))
    if counts or asked:
        return not any(found[1] == name and found[2] in ("", power) for _, name, power in asked)
    if found[0] == "speed" and not SPEED.search(last_sentence):
        return True
    if any(d != found[0] and asks.search(last_sentence) for d, asks in DIMENSIONS.items()):
        return True
    question = question.replace(r"\circ", " degrees ")
    words = MENTIONED.findall(re.sub(r"\b(?:m|k|km)ph\b", "mile km hour", question.lower()))
    mentioned = {MEASURES[word] for word in words if word in MEASURES}
    names = {name for dimension, name in mentioned if dimension in (found[0], "length", "time")}
    if found[0] in ("money", "time") and all(dimension != found[0] for dimension, _ in mentioned):
        return False
    return bool(mentioned) and not names.issuperset(found[1].split(" per "))


def _periods(text: str) -> set[str]:
    """Returns the periods of the rates in a text: month for "per month" and for "monthly"."""
    found = {long or short for long, short in PERIOD.findall(text.lower())}
    return {"day" if period == "dai" else period for period in found}


def _counted(text: str) -> tuple[str, str, str] | None:
    """Returns the measure among the words with which a text begins: miles in "more miles a day"."""
    return unit(text) if unit(" ".join(PREPOSITION.split(text)[0].split()[:4])) else None


def _one_quantity(field: str) -> Fraction | None:
    """Returns the number of a field without an equation."""
    text = SCIENTIFIC.sub(_in_full, in_prose(field))
    match = PROSE.fullmatch(text)
    if match is None or ".." in text or (match["sign"] and match["minus"]):
        return None
    if not _introduces(match["before"]) or not _is_unit(match["after"], bool(match["currency"])):
        return None
    sign = match["sign"] or match["minus"]
    return number(f"{sign}{match['number']}{match['scale'] or ''}")


def _introduces(text: str) -> bool:
    """Whether words before a number leave it as it is: "So x =", "Tom has", but not "at least"."""
    words = WORD.findall(VARIABLE.sub(" ", text).lower())
    if words in (["a"], ["i"]) or words.count("=") > 1:
        return False
    for word in words:
        is_word = word.replace("'", "").isalpha() and len(word) > 1
        if word not in ("i", "a", ",", ":", "=") and not (is_word and not _is_doubtful(word)):
            return False
    return True


def _is_unit(text: str, is_money: bool) -> bool:
    """Returns whether words after a number say what it counts: apples, cm^2, dollars per hour."""
    words = WORD.findall(text)
    if not words or words in (["."], ['"']):  # 12" are inches
        return True
    if words[0] in (".", "!") or words[-1] in ("/", "a") or len(words) > 2 * MAX_UNIT_WORDS:
        return False
    if words.count("(") != words.count(")"):
        return False
    letters = LETTER_UNITS if text[0] == " " else GLUED_UNITS
    return all(_is_unit_word(word, set() if is_money else letters) for word in words)


def _is_unit_word(word: str, letters: set[str]) -> bool:
    """Returns whether a word may be of a unit. A single letter must be one of `letters`."""
    if word in set("./()!€£¥¢a"):  # $18 a day
        return True
    base = word.rstrip("^23²³'")
    if len(base) == 1:
        return base in letters
    return base[:1].isalpha() and not _is_doubtful(base)


def _is_doubtful(word: str) -> bool:
    """Whether a word makes a number another one or puts it in doubt: half, isn't, one-third."""
    parts = {word.lower()}.union(word.lower().split("-"))
    return word.lower().endswith("n't") or bool(parts & DOUBTFUL)


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
