"""Rewards for programs in Python, which run in sandboxes (rl2/rewards/sandbox.py).

    verdict = code.judge(code.extract(reply), {"inputs": ["1 2\\n"], "outputs": ["3\\n"]})
    verdict.is_right, verdict.reason

A program never gets the expected outputs. Those of programs that read and print are compared here;
tests that call functions run in another sandbox than the program (rl2/rewards/remote.py).
"""

import ast
import hashlib
import json
import textwrap
from pathlib import Path
from socket import socketpair
from typing import Any, NamedTuple

from rl2.rewards.sandbox import Limits, Program, Result, run

LANGUAGES = ("python", "py", "python3", "")  # of code blocks, the best first
MAX_VERDICTS = 100_000  # that are kept
REMOTE = Path(__file__).with_name("remote.py").read_text()
CALLS = """
import json
import solution
for arguments, expected in json.loads({cases!r}):
    result = json.loads(json.dumps(solution.{function}(*arguments)))
    assert result == expected, (arguments, expected)
"""


class Verdict(NamedTuple):
    """Whether a program passes all tests. If not, `reason` says why, with the first failure."""

    is_right: bool
    reason: str = ""


_verdicts: dict[bytes, Verdict] = {}  # by a hash of the program and its tests


def extract(text: str) -> str | None:
    """The last code block of a reply in Python, or else the last without a language, or None."""
    blocks: dict[str, str] = {}
    lines: list[str] = []
    language = None
    for line in text.split("\n"):
        if not line.lstrip().startswith("```"):
            lines.append(line)
        elif language is None:
            language = line.strip().strip("`").lower()
            lines = []
        else:
            blocks[language] = textwrap.dedent("\n".join(lines))
            language = None
    return next((blocks[language] for language in LANGUAGES if language in blocks), None)


def judge(program: str, test_cases: Any, limits: Limits | None = None) -> Verdict:
    """Whether the program passes the tests, which are one of these:

    {"inputs": [...], "outputs": [...]}: what the program reads, and what it must print. Spaces at
        the ends of lines, and empty lines at the end, do not count.
    {"fn_name": NAME, "inputs": [...], "outputs": [...]}: calls of a function, or of a method of
        the class Solution. An input has an argument in JSON on each line, an output is JSON.
    The text of Python tests, or a list of such texts: asserts, or functions test_*().

    All of these may be in JSON. `limits` are those of each run. Raises ValueError or SyntaxError if
    the tests cannot be read, OSError if the sandbox does not work. Verdicts are kept, except those
    of programs that ran out of time.
    """
    key = hashlib.sha256(json.dumps([program, test_cases, str(limits)]).encode()).digest()
    if key in _verdicts:
        return _verdicts[key]
    verdict = _judge(program, test_cases, limits)
    if "timed out" not in verdict.reason:
        if len(_verdicts) >= MAX_VERDICTS:
            _verdicts.clear()
        _verdicts[key] = verdict
    return verdict


def _judge(program: str, test_cases: Any, limits: Limits | None) -> Verdict:
    if isinstance(test_cases, str) and test_cases.startswith(("{", "[")):
        test_cases = json.loads(test_cases)
    if isinstance(test_cases, list):
        test_cases = "\n".join(test_cases)
    if isinstance(test_cases, str):
        return _run_tests(program, test_cases, limits)
    inputs, outputs = test_cases["inputs"], test_cases["outputs"]
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"test_cases: {len(inputs)} inputs, {len(outputs)} outputs")
    if not test_cases.get("fn_name"):
        return _run_on_inputs(program, inputs, outputs, limits)
    cases = [
        [[json.loads(line) for line in text.split("\n") if line.strip()], json.loads(output)]
        for text, output in zip(inputs, outputs, strict=True)
    ]
    function = test_cases["fn_name"]
    if "class Solution" in program:
        function = f"Solution().{function}"
    return _run_tests(program, CALLS.format(cases=json.dumps(cases), function=function), limits)


def _run_on_inputs(
    program: str, inputs: list[str], outputs: list[str], limits: Limits | None
) -> Verdict:
    for i, (text, output) in enumerate(zip(inputs, outputs, strict=True)):
        [result] = run(Program(program, text.encode()), limits=limits)
        if result.status != "succeeded":
            return Verdict(False, f"test {i}: {_describe(result)}")
        if _lines(result.stdout) != _lines(output):
            return Verdict(False, f"test {i}: it printed {result.stdout[:200]!r}")
    return Verdict(True)


def _run_tests(program: str, tests: str, limits: Limits | None) -> Verdict:
    ast.parse(tests)  # an error of the tests is none of the program
    server_end, client_end = socketpair()
    server = Program(f"{REMOTE}\nserve({program!r})", server_end)
    client = Program(f"{REMOTE}\ncheck({tests!r})", client_end)
    served, checked = run(server, client, limits=limits)
    if checked.status == "succeeded":
        return Verdict(True)
    return Verdict(False, f"the tests {_describe(checked)}; the program {_describe(served)}")


def _describe(result: Result) -> str:
    last_line = result.stderr.strip().rpartition("\n")[2]
    return f"{result.status}: {last_line[:200]}"


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
