r"""Rewards for mathematics: whether the answer of a reply is the expected one.

The answer is a whole field, such as the content of \boxed{}: "3 or 4" is not 3. rl2.rewards.text
finds fields. A field of None, an empty one and one of absurd length are wrong answers.
"""

import importlib.util
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
from functools import cache, lru_cache

MAX_CHARACTERS = 1000  # by which a field may be longer than the answer
MAX_PROCESSES = 4  # of math-verify, in each process that calls same_maths
MAX_BYTES = 2 * 2**30  # of memory that a process of math-verify may take
CACHE_SIZE = 20_000  # verdicts of math-verify
TOLERANCE = Fraction(1, 10**6)  # of a decimal that stands for a fraction, as 0.333333 for 1/3

# (pattern, replacement), applied in this order: spellings of the same LaTeX become one.
SPELLINGS = [
    (r"\\(?:left|right|[bB]igg?)(?![a-zA-Z])", ""),
    # Spaces, dollars, per cent, degrees
    (r"(?<!\\)\\(?:[,;:! ]|(?:q?quad|displaystyle)(?![a-zA-Z]))|~", " "),
    (r"\^\{?\\circ\}?|\\degree(?![a-zA-Z])|\\?[$%]", " "),
    ("\N{MINUS SIGN}", "-"),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\(?:text|textrm|textbf|mathrm|mathbf|mbox)\{([^{}]*)\}", r"\1"),
    # A space between two digits separates: 2 1/2 is not 21/2.
    (r"\s+", " "),
    (r"(?<!\d) | (?!\d)", ""),
    (r"\{,\}", ","),
    # Braces around each argument: \frac12, \frac{1}2, \frac1{2}, \sqrt3
    (r"\\frac([^{\\\s])(?=[^\s])", r"\\frac{\1}"),
    (r"(\\frac\{[^{}]*\})([^{\\\s])", r"\1{\2}"),
    (r"\\sqrt([^{\\\[\s])", r"\\sqrt{\1}"),
    (r"\.$", ""),
]
# Digits, which may have thousands separators and decimals.
DIGITS = r"(?=\.?\d)(?:\d{1,3}(?:,\d{3})+(?!\d)|\d*)(?:\.\d*)?"
NUMBER = re.compile(rf"([+-]?{DIGITS})(?:/(\d+))?", re.ASCII)
FRACTION = re.compile(r"([+-]?)\\frac\{(\d+)\}\{(\d+)\}", re.ASCII)
# A number with signs before it, such as $ and **, and behind it words that hold no other number.
QUANTITY = re.compile(rf"[^\w.+-]*(-?{DIGITS})(?![/\d])(?!\D*\bor\b)\D*", re.ASCII)
# Text inside LaTeX that is more than a unit, and the base of a number
ALTERNATIVE = re.compile(r"\\(?:text\w*|mbox)\s*\{([^{}]*(?:\d|\bor\b)[^{}]*)\}")
BASE = re.compile(r"\d_\{?(\d+)\}?$", re.ASCII)
# A letter alone, also inside \text{}
CHOICE = re.compile(r"(?:[^\w-]*\\(?:text|math)\w*)?[^\w-]*([A-Za-z])[^\w-]*", re.ASCII)


def one_spelling(field: str) -> str:
    r"""The LaTeX of a field without spacing, units such as $ and %, and variants such as \dfrac."""
    for pattern, replacement in SPELLINGS:
        field = re.sub(pattern, replacement, field)
    return field


def number(field: str | None) -> Fraction | None:
    r"""The exact value of a field that is one number, such as -1,234.50, 7/2, \dfrac72 or 72\%."""
    if field is None or len(field) > MAX_CHARACTERS:
        return None
    text = one_spelling(field)
    fraction = FRACTION.fullmatch(text)
    match = NUMBER.fullmatch("{}{}/{}".format(*fraction.groups()) if fraction else text)
    if match is None or (match[2] and int(match[2]) == 0):
        return None
    return Fraction(match[1].replace(",", "")) / int(match[2] or 1)


def quantity(field: str | None) -> Fraction | None:
    """The number of a field in prose, such as $72.50 or 72 apples. None if it has several."""
    match = QUANTITY.fullmatch(field) if field else None
    return number(match[1] if match else field)


def same_number(field: str | None, answer: str | float) -> bool:
    """Whether a field is the number of the answer. ValueError if the answer is no number."""
    expected = number(answer) if isinstance(answer, str) else Fraction(answer)
    if expected is None:
        raise ValueError(f"the answer {answer!r} is no number; same_maths compares other answers")
    value = number(field)
    return value is not None and _is_close(value, expected)


def same_choice(field: str | None, answer: str) -> bool:
    r"""Whether a field is the letter of the answer: B, (b), B. or \text{(B)}, but not "B or C"."""
    choice = CHOICE.fullmatch(field or "")
    expected = CHOICE.fullmatch(answer)
    if expected is None:
        raise ValueError(f"the answer {answer!r} is no letter of a choice, such as B")
    return choice is not None and choice[1].upper() == expected[1].upper()


def same_maths(field: str | None, answer: str, cpu_seconds: float = 1.0) -> bool:
    r"""Whether a field of LaTeX means the same as the answer: 2(x + 1) is 2x+2.

    Equal spellings and numbers are compared here, all others by the package math-verify, which runs
    in processes of its own. A field whose comparison takes more than `cpu_seconds` or MAX_BYTES is
    wrong. Any thread and process may call this. ModuleNotFoundError without math-verify.
    """
    _check_math_verify()
    if field is None or len(field) > len(answer) + MAX_CHARACTERS:
        return False
    value, expected = number(field), number(answer)
    if value is not None and expected is not None:
        return _is_close(value, expected)
    spelling, expected_spelling = one_spelling(field), one_spelling(answer)
    if spelling in ("", expected_spelling):
        return spelling != ""
    if any(base not in BASE.findall(expected_spelling) for base in BASE.findall(spelling)):
        return False  # math-verify ignores the bases of numbers
    # It would ignore the text, as a unit: 3\text{ or 4}.
    field = ALTERNATIVE.sub(r" \1 ", field)
    return _ask_math_verify(json.dumps([field, answer, cpu_seconds]))


def _is_close(value: Fraction, expected: Fraction) -> bool:
    """Whether two numbers agree: a decimal with six digits may stand for a fraction."""
    return abs(value - expected) <= TOLERANCE * min(Fraction(1), abs(expected))


@cache
def _check_math_verify() -> None:
    """Raises ModuleNotFoundError, at the first call already, if math-verify is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise ModuleNotFoundError("same_maths needs math-verify: pip install 'rl2[rewards]'")


@lru_cache(CACHE_SIZE)
def _ask_math_verify(request: str) -> bool:
    """The verdict on a request: the field, the answer and cpu_seconds as a line of JSON.

    Equal requests are asked once.
    """
    return _pool(os.getpid()).submit(_ask_process, request).result()


@cache
def _pool(pid: int) -> ThreadPoolExecutor:
    """The threads that own the processes. A fork of this process has no threads: it makes others.

    A thread of the environment may be interrupted at any time, one of these may not.
    """
    return ThreadPoolExecutor(MAX_PROCESSES, thread_name_prefix="math-verify")


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
    """A process that runs serve(). It ends when this process does, since its stdin ends then."""
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
    from latex2sympy2_extended import NormalizationConfig, normalize_latex
    from math_verify import verify
    from math_verify.parser import parse_latex_cached

    # The field is parsed as a whole. math_verify.parse would look for an answer in it.
    config = NormalizationConfig(
        units=True,
        malformed_operators=True,
        nits=True,
        boxed="none",
    )
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
        field, answer, cpu_seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        try:
            expected = parse_latex_cached(normalize_latex(answer, config))
            value = parse_latex_cached(normalize_latex(field, config))
            verdict = verify(expected, value, timeout_seconds=None)
        except Exception:  # LaTeX that the parser does not know, or more memory than allowed
            verdict = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(bool(verdict)), file=verdicts)
