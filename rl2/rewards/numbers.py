"""The number that a field holds, alone (`number`) or in prose (`quantity`), as an exact Fraction.

In doubt there is none. What may be beside a number is listed here, so that a sign or a word that
nobody has thought of makes the field wrong, not right.
"""

import json
import re
from fractions import Fraction
from pathlib import Path

from rl2.rewards.spelling import in_prose, one_spelling, plain

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
    r"|\bas an? (percent)|(percent)age chance",
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
WORDS: dict[str, list[str]] = json.loads(Path(__file__).with_name("words.json").read_text("utf-8"))
# Words, and nothing else, that may introduce a number: not "at least", "half of" or "minus".
BEFORE = set(WORDS["before"])
# Words after a number that make it another number, or put it in doubt.
DOUBTFUL = {
    *WORDS["numbers"],
    *WORDS["parts"],
    *WORDS["operations"],
    *WORDS["doubts"],
}
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
    text = in_prose(without_scale(field, asked))
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
    return re.sub(rf"(?:{pattern})(?![a-z])", "", plain(field), flags=re.IGNORECASE)
