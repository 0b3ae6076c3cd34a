"""Rewards for programs in Python, which run in sandboxes (rl2/rewards/sandbox.py).

    verdict = code.judge(code.extract(reply), {"inputs": ["1 2\\n"], "outputs": ["3\\n"]})
    verdict.is_right, verdict.reason

A program never gets the expected outputs. What it prints, and what its functions return in JSON, is
compared here; Python tests run in another sandbox than the program (rl2/rewards/harness.py).
"""

import ast
import importlib.util
import json
import secrets
import textwrap
from pathlib import Path
from socket import socketpair
from typing import Any, NamedTuple

from rl2.rewards import harness
from rl2.rewards.sandbox import Limits, Program, Result, run

LANGUAGES = ("python", "py", "python3", "")  # of code blocks, the best first
HARNESS = Path(harness.__file__).read_text()
CALLS = """
import json, os, sys, types
from math import inf, nan
results = open(os.dup(1), "w")
os.dup2(2, 1)  # where the program prints
program = types.ModuleType("program")
exec(compile({program!r}, "program", "exec"), vars(program))
for arguments in {calls!r}:
    result = program.{function}(*arguments)
    text = json.dumps(result, default=lambda value: value.tolist())  # of NumPy
    print(text, file=results, flush=True)
os._exit(0)
"""


class Verdict(NamedTuple):
    """Whether a program passes all tests. If not, `reason` says why, with the first failure."""

    is_right: bool
    reason: str = ""


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


def judge(program: str, test_cases: object, limits: Limits | None = None) -> Verdict:
    """Returns whether the program passes the tests, which are one of these:

    {"inputs": [...], "outputs": [...]}: what the program reads, and what it must print. Spaces at
        the ends of lines, and empty lines at the end, do not count. Each may be a list of lines.
    {"fn_name": NAME, "inputs": [...], "outputs": [...]}: calls of a function, or of a method of
        the class Solution. An input has an argument in JSON on each line, an output is JSON. Or,
        as in APPS, an input is a list of arguments, an output a value or a list of that value;
        objects whose keys are whole numbers have numbers as keys.
    The text of Python tests, or a list of such texts: asserts, and functions test_...() without
        arguments.

    All of these may be in JSON. `limits` are those of each run. Raises ValueError or SyntaxError if
    the tests cannot be read or run nothing, OSError if the sandbox does not work, TimeoutError if a
    program ran out of time because the machine is busy.
    """
    if isinstance(test_cases, str) and test_cases.lstrip().startswith(("{", "[")):
        test_cases = json.loads(test_cases)
    if isinstance(test_cases, list):
        test_cases = _join_texts(test_cases, "a text of Python tests")
    if isinstance(test_cases, str):
        return _run_tests(program, test_cases, limits)
    if not isinstance(test_cases, dict):
        raise _unexpected("a text of Python tests, or inputs and outputs", test_cases)
    if not {"inputs", "outputs"} <= test_cases.keys():
        raise ValueError(f"test_cases: expected inputs and outputs, got {', '.join(test_cases)}")
    inputs, outputs = test_cases["inputs"], test_cases["outputs"]
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"test_cases: {len(inputs)} inputs, {len(outputs)} outputs")
    function = test_cases.get("fn_name")
    if not function:
        inputs = [_join_texts(text, "inputs of text") for text in inputs]
        outputs = [_join_texts(text, "outputs of text") for text in outputs]
        return _run_on_inputs(program, inputs, outputs, limits)
    cases = [_read_call(call, output) for call, output in zip(inputs, outputs, strict=True)]
    if "class Solution" in program:
        function = f"Solution().{function}"
    return _run_calls(program, function, cases, limits)


def _read_call(given: object, output: object) -> tuple[list, list]:
    """The arguments of a call, and the values of which it must return one."""
    if isinstance(given, list):
        accepted = [output]
        if isinstance(output, list) and len(output) == 1:
            accepted += output
        return [_with_number_keys(argument) for argument in given], accepted
    if not isinstance(given, str):
        raise _unexpected("inputs that are lists of arguments, or their JSON in lines", given)
    arguments = [_parse("inputs", line) for line in given.split("\n") if line.strip()]
    return arguments, [_parse("outputs", output)]


def _with_number_keys(argument: object) -> object:
    """An argument as it was before JSON, which has no other keys than texts."""
    if not isinstance(argument, dict):
        return argument
    try:
        return {int(key): value for key, value in argument.items()}
    except ValueError:
        return argument


def _parse(name: str, text: Any) -> object:
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        raise _unexpected(f"{name} in JSON, as there is fn_name", text) from None


def _join_texts(given: object, expected: str) -> str:
    """A text, or the texts of a list in lines. ValueError for anything else."""
    texts: list = given if isinstance(given, list) else [given]
    for text in texts:
        if not isinstance(text, str):
            raise _unexpected(expected, text)
    return "\n".join(texts)


def _unexpected(expected: str, value: object) -> ValueError:
    return ValueError(f"test_cases: expected {expected}, got {value!r:.100}")


def _run_on_inputs(
    program: str, inputs: list[str], outputs: list[str], limits: Limits | None
) -> Verdict:
    for i, (text, output) in enumerate(zip(inputs, outputs, strict=True)):
        [result] = run(Program(program, text.encode()), limits=limits)
        _check_time(result)
        if result.status != "succeeded":
            return Verdict(False, f"test {i}: {_describe(result)}")
        if _lines(result.stdout) != _lines(output):
            return Verdict(False, f"test {i}: it printed {result.stdout[:200]!r}")
    return Verdict(True)


def _run_calls(
    program: str, function: str, cases: list[tuple[list, list]], limits: Limits | None
) -> Verdict:
    calls = [arguments for arguments, _ in cases]
    text = CALLS.format(program=program, function=function, calls=calls)
    [result] = run(Program(text), limits=limits)
    _check_time(result)
    lines = result.stdout.splitlines()
    for i, (line, (_, accepted)) in enumerate(zip(lines, cases, strict=False)):
        try:
            is_right = json.loads(line) in accepted
        except (ValueError, RecursionError):
            is_right = False
        if not is_right:
            return Verdict(False, f"test {i}: it returned {line:.200}")
    if len(lines) != len(cases) or result.status != "succeeded":
        return Verdict(False, f"test {len(lines)}: {_describe(result)}")
    return Verdict(True)


def _run_tests(program: str, tests: str, limits: Limits | None) -> Verdict:
    for node in ast.walk(ast.parse(tests)):  # an error of the tests is none of the program
        if isinstance(node, ast.Import):
            for alias in node.names:
                _check_import(alias.name)
        elif isinstance(node, ast.ImportFrom):
            _check_import(node.module or "")
        elif isinstance(node, ast.ClassDef) and "TestCase" in " ".join(
            map(ast.unparse, node.bases)
        ):
            raise ValueError(
                f"the tests have the class {node.name}, and classes of unittest do not run here: "
                "write asserts, or functions test_...() without arguments"
            )
    token = secrets.token_hex()
    server_end, client_end = socketpair()
    server = Program(f"{HARNESS}\nserve({program!r})", server_end)
    client = Program(f"{HARNESS}\ncheck({tests!r}, {token!r})", client_end)
    served, checked = run(server, client, limits=limits)
    _, has_passed, problem = checked.stdout.rpartition(token)
    if checked.status == "succeeded" and has_passed and problem:
        raise ValueError(problem)
    if checked.status == "succeeded" and has_passed:
        return Verdict(True)
    if checked.status == "succeeded":
        return Verdict(False, "the tests exited before they had all passed, as by sys.exit(0)")
    if checked.status != "failed" or checked.stderr.endswith(harness.PROGRAM_ENDED):
        _check_time(served)
        _check_time(checked)
    return Verdict(False, f"the tests {_describe(checked)}; the program {_describe(served)}")


def _check_time(result: Result) -> None:
    """Raises TimeoutError if the machine, and not the program, is to blame for the time."""
    if result.status == "starved":
        raise TimeoutError(
            "this machine is too busy to judge programs: one waited for a core for more than half "
            "of the time in which it had to end. Raise wall_seconds of rl2.rewards.sandbox.Limits, "
            "or run fewer other programs on the machine"
        )


def _check_import(module: str) -> None:
    package = module.partition(".")[0]
    if package not in ("solution", "__main__") and importlib.util.find_spec(package) is None:
        raise ValueError(f"the tests import {package}, which is not installed")


def _describe(result: Result) -> str:
    last_line = result.stderr.strip().rpartition("\n")[2]
    return f"{result.status}: {last_line[:200]}"


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]
