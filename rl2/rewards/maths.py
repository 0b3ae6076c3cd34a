r"""Rewards for mathematics: whether the answer of a reply is the expected one.

The answer is a whole field, such as the content of \boxed{}: "3 or 4" is not 3. rl2.rewards.text
finds fields. A field of None, an empty one and one of absurd length are wrong answers.
"""

import json
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fractions import Fraction
from functools import lru_cache
from typing import Any

from rl2.rewards.numbers import (
    DOUBTFUL,
    MAX_CHARACTERS,
    MEASURES,
    SCALE,
    number,
    unit,
    without_scale,
)
from rl2.rewards.numbers import asked_scale as asked_scale
from rl2.rewards.numbers import is_other_unit as is_other_unit
from rl2.rewards.numbers import quantity as quantity
from rl2.rewards.spelling import in_latex, in_prose, one_spelling, plain_field
from rl2.rewards.spelling import plain as plain

MAX_PROCESSES = 4  # of math-verify, in each process that calls same_maths
CPU_SECONDS = 5.0  # of a comparison
MAX_BYTES = 2 * 2**30  # of memory that a process of math-verify may take
CACHE_SIZE = 20_000  # verdicts of math-verify
TOLERANCE = Fraction(1, 10**6)  # of a decimal that stands for a fraction, as 0.333333 for 1/3

# Text inside LaTeX that is more than a unit, and the base of a number
ALTERNATIVE = re.compile(r"\\(?:text\w*|mbox)\s*\{([^{}]*(?:\d|\bor\b)[^{}]*)\}")
SHORT_SCALES = {"k", "K", "M", "B"}
TEXT = re.compile(r"\\(?:text\w*|mbox)\s*\{([^{}]*)\}")
# A text with its power, which may be a unit, a known unit, and signs that are units
POWERED = r"(?:\s*\^\s*\{?\d\}?)?"
UNIT = re.compile(
    rf"\\(?:text\w*|mbox|mathrm)\s*\{{[^{{}}]*\}}{POWERED}|\\\$|^\$(?=[\d.,]+$)"
    r"|\^\{?\s*\\circ|°|\\degree|[¢€£]"
)
KNOWN_UNIT = re.compile(
    rf"\\(?:text\w*|mbox|mathrm)\s*\{{\s*(?:(?:square|sq|cubic|cu)\.? )?"
    rf"(?:{'|'.join(filter(str.isalpha, MEASURES))})\.?\s*\}}{POWERED}"
)
# A letter after a number, which may be a unit or a variable
LETTER = re.compile(r"\d\s*[a-zA-Z]\s*$", re.ASCII)
# What math-verify leaves out, beside scales
IGNORED = re.compile(r"\\[lc]?dots|\.\.|mod|\\infty\]|\[-\\infty|(?<=\d)'")
# A side of an equation without a variable
CONSTANT = re.compile(r"(?:[^a-zA-Z]|\\(?:frac|sqrt|pi|cdot|times|div)(?![a-zA-Z]))*")
# What an equation may define: x, f(x), a_1, AP:PB
NAME = re.compile(r"[a-zA-Z]+(?:\([a-zA-Z]\)|_\{?\w+\}?|:[a-zA-Z]+)?")
# A product that math-verify takes for a sum: 9(2), (10)(3)
JUXTAPOSED = re.compile(
    r"((?<![\d._^])\d+|(?<=\d)\)|\\frac\{\d+\}\{\d+\})\s*\((?=\s*[\d\\])", re.ASCII
)
# Words before a formula, and the only ones around a word that is the answer
INTRODUCED = re.compile(r"\s*\\text\s*\{[^{}\d]*[ :]\}(.*\S.*)", re.DOTALL)
AROUND = r"(?:[\w' ]*\b(?:is|are|an?|the|facing|faces) )?{}(?: [a-z' ]+)?\.?"
LETTERED = re.compile(r"\(?([A-Z])[).:](?: [A-Za-z][a-z' ]+)*")  # (C) Plane
COLUMN = re.compile(r"\\begin\{[pb]matrix\}([^&]*)\\end\{[pb]matrix\}")
BASE = re.compile(r"\d_\{?(\d+)\}?$", re.ASCII)
# An interval or a tuple, as one_spelling has it
INTERVAL = re.compile(r"[(\[][^()\[\]]+,[^()\[\]]+[)\]]")
OR = re.compile(r"\s*(?:\\text\w*\s*\{\s*or\s*\}|\\lor|\\vee|(?<![a-zA-Z])or(?![a-zA-Z]))\s*")
# A letter alone, also inside \text{}
CHOICE = re.compile(r"(?:[^\w-]*\\(?:text|math)\w*)?[^\w-]*([A-Za-z])[^\w-]*", re.ASCII)


# A formula for each whole number: k\pi, k \in \mathbb{Z}
FAMILY = re.compile(
    r"(.+?)(?:\\[,; ]|\\q?quad|[\s,;(])*([a-zA-Z])\s*\\in\s*\\mathbb\s*\{?([NZQR])\}?[\s).]*"
)


def same_number(field: str | None, answer: str | float) -> bool:
    """Returns whether a field is the number of the answer.

    ValueError if the answer is not a number.
    """
    expected = number(answer) if isinstance(answer, str) else Fraction(answer)
    if expected is None:
        raise ValueError(f"the answer {answer!r} is not a number: use same_maths for it")
    value = number(field)
    return value is not None and _is_close(value, expected)


def same_choice(field: str | None, answer: str) -> bool:
    r"""Whether a field is the letter of the answer: B, (b), B. or \text{(B)}, but not "B or C"."""
    choice = CHOICE.fullmatch(field or "")
    expected = CHOICE.fullmatch(answer)
    if expected is None:
        raise ValueError(f"the answer {answer!r} is not the letter of a choice, such as B")
    return choice is not None and choice[1].upper() == expected[1].upper()


def same_maths(field: str | None, answer: str, *, asked: str = "") -> bool:
    r"""Returns whether a field of LaTeX means the same as the answer: 2(x + 1) is 2x+2.

    Equal spellings and numbers are compared here, all others by the package math-verify, which runs
    in processes of its own. A field whose comparison takes more than CPU_SECONDS or MAX_BYTES is
    wrong. Any thread and process may call this. `asked` is the scale that the question asks for
    (`asked_scale`): if it asks for a percentage, 40\% is 40.
    """
    if field is None or len(field) > len(answer) + MAX_CHARACTERS:
        return False
    stripped = number(without_scale(field, asked)) if asked else None
    if stripped is not None and stripped == number(without_scale(answer, asked)):
        return True
    field = _with_commas(field)
    if _is_other_unit(field, answer):
        return False
    if families := _families(field, answer):
        return same_maths(*families)
    value, expected = number(field), number(answer)
    if value is not None and expected is not None:
        return _is_close(value, expected)
    spelling, expected_spelling = one_spelling(field), one_spelling(answer)
    if spelling in ("", expected_spelling):
        return spelling != ""
    sides = _sides(field)
    if sides != [field] and "=" not in expected_spelling:  # math-verify would take the last one
        return all(same_maths(side, answer) for side in sides)
    return _is_same_formula(field, answer)


def _is_same_formula(field: str, answer: str) -> bool:
    """Returns the verdict of math-verify, but on what it would read in another way."""
    spelling, expected_spelling = one_spelling(field), one_spelling(answer)
    exact, approximately, decimal = spelling.partition(r"\approx")
    if approximately and approximately not in expected_spelling:
        return same_maths(exact, answer) and _rounds_to(answer, decimal)
    if _is_in_words(field, answer):
        return True
    if _is_other(spelling, expected_spelling) or _has_doubtful_text(field, answer):
        return False
    if introduced := INTRODUCED.fullmatch(field):
        return same_maths(introduced[1], answer)
    if INTERVAL.fullmatch(spelling) and (column := COLUMN.fullmatch(expected_spelling)):
        answer = f"({column[1]})".replace(r"\\", ",")
    if number(answer) is not None and LETTER.search(plain_field(field)):
        return False
    field, answer = (KNOWN_UNIT.sub(" ", in_latex(text)) for text in (field, answer))
    # It would ignore the text, as a unit: 3\text{ or 4}.
    field = ALTERNATIVE.sub(r" \1 ", JUXTAPOSED.sub(r"\1\\cdot(", field))
    return _ask_math_verify(field, answer)


def _rounds_to(answer: str, decimal: str) -> bool:
    """Returns whether a decimal is the rounded answer."""
    rounded = re.fullmatch(r"-?\d+(?:\.(\d+))?", decimal.replace(",", ""))
    if rounded is None:
        return False
    return _ask_math_verify(str(float(rounded[0])), answer, len(rounded[1] or ""))


def _with_commas(field: str) -> str:
    """Returns (2,3] for (2;3], but 11;111 as it is: its comma would be one of thousands."""
    field = plain_field(field)
    replaced = field if "," in field else re.sub(r"(?<!\\);", ", ", field)
    return field if number(replaced) is not None else replaced


def _families(field: str, answer: str) -> tuple[str, str] | None:
    r"""Returns both formulas, with one letter, of n\pi, n\in\mathbb{Z} and k\pi, k\in\mathbb{Z}."""
    found, expected = FAMILY.fullmatch(in_latex(field)), FAMILY.fullmatch(in_latex(answer))
    if found is None or expected is None or found[3] != expected[3]:
        return None
    return re.sub(rf"(?<![a-zA-Z]){found[2]}(?![a-zA-Z])", expected[2], found[1]), expected[1]


def _is_other_unit(field: str, answer: str) -> bool:
    """Returns whether both have a unit that is known, and not the same one."""
    found, expected = (unit(" ".join(UNIT.findall(in_latex(text)))) for text in (field, answer))
    return found is not None and expected is not None and found != expected


def _is_other(spelling: str, expected: str) -> bool:
    """Returns whether a field has what math-verify ignores, and the answer has not."""
    if any(base not in BASE.findall(expected) for base in BASE.findall(spelling)):
        return True
    if spelling.count(":") > 1 and spelling.count(":") != expected.count(":"):  # 3:4:1
        return True
    if INTERVAL.fullmatch(expected) and re.search(r"^\\\{|\\pm", spelling):
        return True
    if INTERVAL.fullmatch(expected) and INTERVAL.fullmatch(spelling):
        if spelling[0] + spelling[-1] != expected[0] + expected[-1]:  # [2,1] is no tuple
            return True
    is_formula = not set(spelling).isdisjoint("0123456789")
    if (
        is_formula
        and set(spelling) != set(expected)
        and set(spelling.lower()) == set(expected.lower())
    ):
        return True  # 3r^2 for 3R^2
    return any(
        pattern.findall(spelling.lower()) != pattern.findall(expected.lower())
        for pattern in (SCALE, IGNORED)
    )


def _has_doubtful_text(field: str, answer: str) -> bool:
    r"""Whether text in LaTeX makes the field another one, or none: 5\text{ squared}, 5\text{k}."""
    words = set(re.findall(r"[a-zA-Z]+", " ".join(TEXT.findall(field))))
    if words & SHORT_SCALES:
        return True
    doubtful = {word.lower() for word in words} & DOUBTFUL - {"and", "or"}
    return bool(doubtful - set(re.findall(r"[a-z]+", answer.lower())))


def _is_in_words(field: str, answer: str) -> bool:
    """Returns whether a field says a word or a choice: Navin would win, (C) Plane."""
    text, expected = in_prose(field), in_prose(answer).strip("() .")
    doubtful = DOUBTFUL - {"most", "least"}
    if not expected.isalpha() or not doubtful.isdisjoint(re.findall("[a-z]+", text.lower())):
        return False
    if choice := LETTERED.fullmatch(text):
        return choice[1] == expected
    return bool(re.fullmatch(AROUND.format(expected), text))


def _sides(field: str) -> list[str]:
    """Returns the sides of x=2+3=5 that must be the answer: the last one, and 2+3.

    Several equations are one side.
    """
    *before, last = field.split("=")
    if "," in field and number(last) is None:
        return [field]
    spellings = [one_spelling(side) for side in before]
    constants = [side for side in spellings if CONSTANT.fullmatch(side)]
    names = [side for side in spellings if NAME.fullmatch(side)]
    are_all = len(constants) + len(names) == len(before)
    return constants + [last] if constants or are_all else [field]


def _is_close(value: Fraction, expected: Fraction) -> bool:
    """Returns whether two numbers agree: a decimal with six digits may stand for a fraction."""
    return abs(value - expected) <= TOLERANCE * min(Fraction(1), abs(expected))


@lru_cache(CACHE_SIZE)
def _ask_math_verify(field: str, answer: str, decimals: int | None = None) -> bool:
    """Returns the verdict on a field, of numbers with `decimals` places if given.

    Equal requests are asked once.
    """
    request = json.dumps([field, answer, CPU_SECONDS, decimals])
    return _pool(os.getpid()).submit(_ask_process, request).result()


_pools: dict[int, ThreadPoolExecutor] = {}  # by the process that made them


def _pool(pid: int) -> ThreadPoolExecutor:
    """The threads that own the processes. A fork of this process has no threads: it makes others.

    A thread of the environment may be interrupted at any time, one of these may not. Of pools that
    several first calls make at once one is kept; an unused one has no threads.
    """
    pool = _pools.get(pid)
    return pool or _pools.setdefault(
        pid, ThreadPoolExecutor(MAX_PROCESSES, thread_name_prefix="math-verify")
    )


_owner = threading.local()  # .process: the process of a thread of the pool


def _ask_process(request: str) -> bool:
    """Asks the process of this thread. A process that ends without a verdict denies the request."""
    process = getattr(_owner, "process", None)
    if process is None or process.poll() is not None:
        process = _owner.process = _start_process()
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(request + "\n")
    process.stdin.flush()
    verdict = process.stdout.readline()
    if not verdict:
        process.wait()
    return verdict == "true\n"


def _start_process() -> subprocess.Popen[str]:
    """Returns a process that runs serve().

    It ends when this process does, since its stdin ends then.
    """
    path = f"import sys; sys.path[:] = {list(map(str, sys.path))}"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{path}; from rl2.rewards import maths; maths.serve()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        raise RuntimeError(f"math-verify cannot be started, exit status {process.wait()}")
    return process


def serve() -> None:
    """What a process of math-verify does: a line with a verdict for each request on stdin.

    math-verify's own time limit works in the main thread only. Here the kernel ends the process
    when it has used its time, also in code that never returns to Python. The time is that of the
    processor, so that verdicts do not depend on how busy the machine is.
    """
    from math_verify import verify

    logging.disable()
    verdicts = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    with suppress(OSError, ValueError):  # not every system has this limit
        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    print("ready", file=verdicts)
    # From here on, what the parser prints is neither a verdict nor a message of the run.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.dup2(nowhere, sys.stderr.fileno())
    for line in sys.stdin:
        field, answer, cpu_seconds, decimals = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        try:
            expected, value = _parsed(answer), _parsed(field)
            options = {} if decimals is None else {"float_rounding": decimals}
            options |= {"allow_set_relation_comp": True}  # x > 2 is (2, infinity)
            verdict = verify(expected, value, timeout_seconds=None, **options)
        except Exception:  # LaTeX that the parser does not know, or more memory than allowed
            verdict = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(bool(verdict)), file=verdicts)


def _parsed(latex: str) -> Any:
    """Returns what math-verify reads in a whole field: math_verify.parse would look for an answer.

    Inequalities are one set: with "or" between them their union, else the intersection.
    """
    from latex2sympy2_extended import NormalizationConfig, normalize_latex
    from math_verify.grader import unwrap_fcs
    from math_verify.parser import parse_latex_cached
    from sympy import And, Ne, Or
    from sympy.core.relational import GreaterThan, LessThan, StrictGreaterThan, StrictLessThan

    inequalities = And | Ne | GreaterThan | LessThan | StrictGreaterThan | StrictLessThan

    def parse(text: str) -> Any:
        config = NormalizationConfig(units=True, malformed_operators=True, nits=True, boxed="none")
        return parse_latex_cached(normalize_latex(text, config))

    whole = parse(latex)
    alternatives = []
    for text in OR.split(latex):
        value = whole if text == latex else parse(text)
        parts = getattr(value, "args", ()) if "," in text or "and" in text else (value,)
        if not parts or not all(isinstance(part, inequalities) for part in parts):
            return whole
        alternatives.append(And(*parts))
    if isinstance(whole, inequalities) and len(alternatives) == 1:
        return whole
    return unwrap_fcs(Or(*alternatives)).as_set()
