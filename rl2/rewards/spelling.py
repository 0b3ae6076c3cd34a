"""Spellings: texts that look alike or mean the same become one text, in named steps."""

import re
import unicodedata

# Characters. What is not listed here stays as it is, and no grammar below takes it: right-to-left
# marks, for instance, show 27 as 72.
INVISIBLE = "\u00ad\u200b\u200c\u200d\u2060\ufeff\ufe0f"
MINUS_SIGNS = "\u2010\u2011\u2012\u2013\u2212\ufe63"
SPACES = "\u00a0\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
FULLWIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
VULGAR_FRACTIONS = "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
CHARACTERS: dict[int, int | str | None] = {
    **FULLWIDTH,
    **dict.fromkeys(map(ord, INVISIBLE)),
    **dict.fromkeys(map(ord, MINUS_SIGNS), "-"),
    **dict.fromkeys(map(ord, SPACES), " "),
    ord("\u2044"): "/",
    ord("\u2019"): "'",
    ord("\N{DEGREE SIGN}"): r"^\circ ",
}
for character in VULGAR_FRACTIONS:
    top, bottom = unicodedata.normalize("NFKC", character).split("\u2044")
    CHARACTERS[ord(character)] = rf"\frac{{{top}}}{{{bottom}}}"
# Thousands that a thin or a fixed space separates: 1 234 567. A common space may separate numbers
# in prose; in a field it does not, but for the mixed number 1 234/567.
SPACED_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d/])", re.ASCII)
THIN = rf"(?:[{SPACES}]|\{{?\\[,;: !]\}}?)"
THOUSANDS = re.compile(rf"(?<![\d.,])\d{{1,3}}(?:{THIN}\d{{3}})+(?![\d/])", re.ASCII)
UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
    "fifteen sixteen seventeen eighteen nineteen"
).split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
NUMERALS = {word: value for value, word in enumerate(UNITS)}
NUMERALS |= {word: 10 * value for value, word in enumerate(TENS, 2)}
BELOW_100 = (
    rf"(?:(?:{'|'.join(TENS)})(?:[- ](?:{'|'.join(UNITS[1:10])})\b)?|(?:{'|'.join(UNITS)})\b)"
)
BELOW_1000 = rf"(?:{BELOW_100} hundred(?: (?:and )?{BELOW_100})?|{BELOW_100})"
# A number in words: seventy-one thousand two hundred and five
SPELLED = re.compile(
    rf"(?<![\w\\-]){BELOW_1000}(?: thousand(?: (?:and )?{BELOW_1000})?)?(?![\w-])", re.IGNORECASE
)

ROOTS = [
    (r"√\s*(\d+|[a-zA-Z])", r"\\sqrt{\1}"),
    (r"√\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"√\s*(?=\{)", r"\\sqrt"),
    (r"\\\\\s*\[[\d.]*(?:pt|em|ex|mm|cm)\]", r"\\\\"),  # the height of a row
    (r"(?<![a-z])\{([,:])\}", r"\1"),
    (r"(?<=\d),(?=(?:\d{3},)*\d{3}\})", ""),  # thousands in an argument: \frac{20,000}{3}
    (r"\\big(cup|cap)(?![a-zA-Z])", r"\\\1"),
    (r"\\lbrace(?![a-zA-Z])", r"\\{"),
    (r"\\rbrace(?![a-zA-Z])", r"\\}"),
    (r"\\langle(?![a-zA-Z])", "("),
    (r"\\rangle(?![a-zA-Z])", ")"),
    # {x | x > 2}, and ]2, 3[
    (r"^\s*\\\{\s*[a-zA-Z]\s*(?:\\in\s*\\mathbb\s*\{?R\}?)?\s*(?:\\mid|[|:])(.*)\\\}\s*$", r"\1"),
    (r"(?<!\\)\](?=[^\[\]]*,[^\[\]]*[\[\]]\s*$)", "("),
    (r"(?<!\\)\[\s*$", ")"),
    (r"\\backslash(?![a-zA-Z])", r"\\setminus"),
]
COMMANDS: dict[str, int | str | None] = {
    "π": r"\pi ",
    "∞": r"\infty ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∅": r"\emptyset ",
    "∈": r"\in ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≠": r"\ne ",
    "×": r"\times ",
    "·": r"\cdot ",
    "÷": r"\div ",
    "±": r"\pm ",
}
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
POWER = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")

# (pattern, replacement), applied in this order: spellings of the same LaTeX become one.
SPELLINGS = [
    (r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])", ""),
    (r"^\s*\\text\{\s*(?:[Aa]n?|[Tt]he)\s+(?=[a-z]{3})", r"\\text{"),
    (r"\\text\{\s*(?:there (?:is|are) )?[Nn]o (?:real )?solutions?\.?\s*\}", r"\\emptyset"),
    (r"^\s*[Nn]o (?:real )?solutions?\s*$", r"\\emptyset"),
    (r"^\s*(?:\\text\{)?\s*[Aa]ll real numbers\s*\}?\s*$", r"\\mathbb{R}"),
    # Spaces, delimiters of formulas, dollars, degrees
    (r"(?<!\\)\\(?:[,;:! ]|(?:q?quad|displaystyle)(?![a-zA-Z]))|~", " "),
    (r"(?<!\\)\\[()\[\]]|\\?\$", " "),
    (r"\^(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))|\\degree(?![a-zA-Z])", " "),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\(?:text|textrm|textbf|textit|mathrm|mathbf|boldsymbol|mbox)\s*\{([^{}]*)\}", r"\1"),
    (r"\\neq(?![a-zA-Z])", r"\\ne"),
    (r"\\(?:boxed|fbox)\s*\{([^{}]*)\}", r" \1 "),
    (r"\\(?:leqslant|leq)(?![a-zA-Z])", r"\\le"),
    (r"\\(?:geqslant|geq)(?![a-zA-Z])", r"\\ge"),
    (r"\\varnothing(?![a-zA-Z])|\\\{\s*\\\}", r"\\emptyset"),
    (r"\\%|(?:(?<=\d)|(?<=[\s}]))per ?cent(?![a-z])", "%"),
    # A space between two digits separates: 2 1/2 is not 21/2.
    (r"\s+", " "),
    (r"(?<!\d) | (?!\d)", ""),
    # Lists and ratios in words: 3, 5, and 7; 3 to 2
    (r"(?<=[\d)}]),?and(?=[-\d(\\])", ","),
    (r"(?<=\d)to(?=\d)", ":"),
    (r"(?<=\d)[aA]\.?[mM]\.?$", "am"),
    (r"(?<=\d)[pP]\.?[mM]\.?$", "pm"),
    (r"^([a-zA-Z])\\in\\\{([^{}]*)\\\}$", r"\1=\2"),
    # Braces around each argument: \frac12, \frac{1}2, \frac1{2}, \sqrt3
    (r"\\frac([^{\\\s])(?=[^\s])", r"\\frac{\1}"),
    (r"(\\frac\{[^{}]*\})([^{\\\s])", r"\1{\2}"),
    (r"\\sqrt([^{\\\[\s])", r"\\sqrt{\1}"),
    (r"\.$", ""),
    # Bases: (12)_{(5)}, 12 in base 5
    (r"\(?(\d+)\)?\s*\(?(?:in)?(?:_|base)\{?\(?(\d+)\)?\}?\)?$", r"\1_{\2}"),
]

THAT_IS = r"(?:(?:which|that) is|i\.e\.|equals|is equal to),? "
# (pattern, replacement), applied in this order: Markdown and LaTeX become prose.
# They differ from those above: a space stays, and a field in parentheses is its content.
PROSE_SPELLINGS = [
    (r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}", r" \1 "),
    # Fractions, with a space in mixed numbers: 7\frac{1}{2}
    (r"\\[dtc]?frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
    (r"(\d)\s*\\[dtc]?frac\{(\d+)\}\{(\d+)\}", r"\1 \2/\3"),
    (r"\\[dtc]?frac\{(\d+)\}\{(\d+)\}", r"\1/\2"),
    (r"\\(?:boxed|fbox)\s*\{([^{}]*)\}", r" \1 "),
    (r"\^\{?\\circ\}?", " degrees "),
    (r"\{,\}", ","),
    (r"\\!", ""),
    (r"\\([$%])", r"\1"),
    (r"\\[()\[\],;: ]|\*\*|__|`", " "),
    (r"^\s*\*([^*]*)\*\s*$", r"\1"),
    # Dollars around a formula, not those before an amount
    (r"\$\s*(\$?[^$]*)\$(?!\s*\d)", r" \1 "),
    (r"(\d) ?per ?cent(?![a-z])", r"\1%"),
    (r"(\d)k(?!\w)", r"\1 thousand"),
    (r"\$?(\d+) dollars?,? (?:and )?(\d\d) cents?", r"$\1.\2"),
    (r"\$?(\d+) dollars?,? (?:and )?(\d) cents?", r"$\1.0\2"),
    (rf"\({THAT_IS}", "("),
    (rf",? {THAT_IS}", "= "),
    (r"^ ?(?:negative|minus) (?=\d)", "-"),
    (r"^([^']*\d)' ?(?=\d|$)", r"\1 feet "),
    (r'^([^"]*\d)"$', r"\1 inches"),
    (r"\s+", " "),
    (r"(\w) (?=\^)", r"\1"),
    # All of it in parentheses or quotation marks
    (r"^ ?\(([^()]*)\) ?$", r"\1"),
    (r"^ ?[\"'“]([^\"'”]*)[\"'”] ?$", r"\1"),
    (r"^ ?_([^_]*)_ ?$", r"\1"),
]


def plain(text: str) -> str:
    r"""A text without invisible characters, with one minus sign, ASCII digits and common spaces.

    Fractions such as one half become \frac{1}{2}, and a degree sign becomes ^\circ.
    """
    text = THOUSANDS.sub(lambda match: re.sub(THIN, ",", match[0]), text.translate(FULLWIDTH))
    return text.translate(CHARACTERS)


def plain_field(field: str) -> str:
    """The same of a field that is one answer: 12 500 and number words become numbers too."""
    field = SPACED_THOUSANDS.sub(lambda match: match[0].replace(" ", ","), plain(field))
    return SPELLED.sub(_in_digits, field)


def _in_digits(match: re.Match) -> str:
    """Returns 71205 for seventy-one thousand two hundred and five."""
    total = value = 0
    for word in re.findall("[a-z]+", match[0].lower()):
        value = value * 100 if word == "hundred" else value + NUMERALS.get(word, 0)
        if word == "thousand":
            total, value = value * 1000, 0
    return str(total + value)


def in_latex(field: str) -> str:
    """Returns a plain field, with commands for symbols of Unicode such as the root and infinity."""
    field = POWER.sub(lambda match: f"^{{{match[0].translate(SUPERSCRIPTS)}}}", plain_field(field))
    for pattern, replacement in ROOTS:
        field = re.sub(pattern, replacement, field)
    return field.translate(str.maketrans(COMMANDS))


def one_spelling(field: str) -> str:
    r"""The LaTeX of a field without spacing, dollar signs, degrees and variants such as \dfrac."""
    field = in_latex(field)
    for pattern, replacement in SPELLINGS:
        field = re.sub(pattern, replacement, field)
    return field


def in_prose(field: str) -> str:
    """Returns the prose of a field in Markdown or LaTeX."""
    text = plain_field(field)
    for pattern, replacement in PROSE_SPELLINGS:
        text = re.sub(pattern, replacement, text)
    return text.strip()
