"""rl2.rewards.code and envs/coding.py: right programs are right, wrong ones and forgeries wrong."""

import asyncio
import json
import textwrap
from pathlib import Path

import pytest

from rl2.rewards import code
from rl2.rewards.code import extract, judge
from rl2.rewards.sandbox import Limits, Result

SUM = "a, b = map(int, input().split())\nprint(a + b)"
CASES = {"inputs": ["1 2\n", "3 4"], "outputs": ["3\n", "7"]}


@pytest.fixture(autouse=True)
def verdicts(monkeypatch):
    """The verdicts of a test are not those of another."""
    monkeypatch.setattr(code, "_verdicts", {})
    return code._verdicts


def judge_text(program, tests):
    return judge(textwrap.dedent(program), textwrap.dedent(tests)).is_right


@pytest.mark.parametrize(
    "reply, program",
    [
        ("```python\nprint(1)\n```", "print(1)"),
        ("```\nprint(1)\n```", "print(1)"),
        ("A draft:\n```py\n1\n```\nBetter:\n```py\n2\n```\nIt prints:\n```text\n3\n```", "2"),
        ("```python\n1\n```\nIt prints:\n```\n3\n```", "1"),
        ("1. So:\n   ```python\n   if x:\n       y\n   ```", "if x:\n    y"),
        ("```python\n1\n```\n```python\ncut", "1"),
        ("```python\ncut", None),
        ("print(1)", None),
        ("", None),
    ],
)
def test_the_program_of_a_reply(reply, program):
    assert extract(reply) == program


def test_extraction_takes_linear_time():
    assert extract("```" * 300_000) is None
    assert extract("```\n" * 300_001) == ""


def test_programs_that_read_and_print():
    assert judge(SUM, CASES) == (True, "")
    wrong = judge(SUM.replace("+", "-"), CASES)
    assert wrong == (False, "test 0: it printed '-1\\n'")
    failing = judge("1 / 0", CASES)
    assert failing == (False, "test 0: failed: ZeroDivisionError: division by zero")


def test_a_function_may_have_the_name_of_a_builtin():
    cases = {"fn_name": "sum", "inputs": ["10\n15"], "outputs": ["6"]}
    program = "def sum(a, b):\n    return 1 + 5 * (a % 5 == b % 5 == 0)"
    assert judge(program, cases) == (True, "")
    assert not judge(program.replace("5 *", "4 *"), cases).is_right


def test_a_right_output_of_a_program_that_fails_is_wrong():
    assert not judge("print(3)\nraise SystemExit(1)", {"inputs": [""], "outputs": ["3"]}).is_right


def test_spaces_at_the_ends_of_lines_do_not_count(monkeypatch):
    outputs = iter(["1 \n2\n\n", " 1\n2", "1\n\n2", "1 2"])
    monkeypatch.setattr(code, "run", lambda *_, **__: [Result("succeeded", next(outputs), "")])
    verdicts = [judge(name, {"inputs": [""], "outputs": ["1\n2 \n"]}).is_right for name in "abcd"]
    assert verdicts == [True, False, False, False]


def test_calls_of_a_function_with_arguments_in_json():
    cases = {"fn_name": "pair", "inputs": ["1\n[2, null]\n", '"a\u2028"\n{"b": 1}']}
    cases["outputs"] = ["[1, [2, null]]", '["a\\u2028", {"b": 1}]']
    assert judge("def pair(x, y): return x, y", cases).is_right
    assert judge("class Solution:\n    def pair(self, x, y): return [x, y]", cases).is_right
    assert not judge("def pair(x, y): return [y, x]", cases).is_right


def test_tests_of_functions_and_classes():
    program = """
        import collections
        def count(text): return collections.Counter(text)
        def half(x):
            if x < 0: raise ValueError("negative")
            return x / 2
        class Stack:
            def __init__(self): self.items = []
            def push(self, item): self.items.append(item)
            def pop(self): return self.items.pop()
        """
    tests = """
        import math
        from solution import Stack
        assert count("aab") == {"a": 2, "b": 1}
        assert half(3) == 1.5 and math.isinf(half(math.inf))
        stack = Stack()
        stack.push((1, {2}, None, b"3", True))
        assert stack.pop() == (1, {2}, None, b"3", True)

        def check(function):
            for value in range(20):
                assert abs(function(value) - value / 2) < 1e-9

        check(half)

        def test_negative():
            try:
                half(-1)
            except ValueError as error:
                assert str(error) == "negative"
            else:
                assert False
        """
    assert judge_text(program, tests)
    assert not judge_text(program.replace("negative", "other"), tests)


def test_a_function_of_the_program_is_no_test():
    assert judge("def test_equal(x, y): return x == y", "assert test_equal(1, 1)").is_right


def test_tests_that_call_nothing_prove_nothing():
    verdict = judge("def f(): pass", "def check(candidate):\n    assert candidate() is None")
    assert not verdict.is_right and "the tests call nothing" in verdict.reason


TESTS = 'assert f(1) == "expected"\nassert f(2) == "other"'
FORGERIES = {
    "it ends": """
        import os
        print("2 passed")
        os._exit(0)
        """,
    "it ends in a call": """
        import os
        def f(x): os._exit(0)
        """,
    "it raises SystemExit by name": """
        class SystemExit(Exception): pass
        def f(x): raise SystemExit(0)
        """,
    "an object that equals everything": """
        class Equal:
            def __eq__(self, other): return True
        def f(x): return Equal()
        """,
    "a text that equals everything": """
        class Equal(str):
            def __eq__(self, other): return True
            __hash__ = str.__hash__
        def f(x): return Equal("x")
        """,
    "changed builtins and modules": """
        import ast, builtins, pickle, sys, unittest
        builtins.AssertionError = builtins.Exception
        ast.parse = lambda *_: None
        sys.exit = lambda *_: None
        builtins.exec = builtins.compile = lambda *_: None
        def f(x): return True
        """,
    "a message that calls functions": """
        import os, pickle, socket
        class Call:
            def __reduce__(self): return os._exit, (0,)
        def f(x):
            for descriptor in range(3, 20):
                try:
                    os.write(descriptor, pickle.dumps((Call(), None)))
                except OSError:
                    pass
        """,
    "it looks for what is expected": """
        import gc, os, sys
        def f(x):
            texts = [text for text in gc.get_objects() if isinstance(text, str)]
            for file in [sys.argv[0], __import__("__main__").__file__]:
                texts += open(file).read().split('"')
            for folder, _, files in os.walk("/tmp"):
                texts += files
            answer = ["expect" + "ed", "oth" + "er"][x - 1]
            return answer if answer in texts else "nothing"
        """,
}


@pytest.mark.parametrize("name", FORGERIES)
def test_forgeries_are_wrong_and_the_next_program_is_right(name):
    assert not judge_text(FORGERIES[name], TESTS)


def test_the_next_program_is_right():
    """After all forgeries, with the same tests."""
    assert judge("def f(x): return {1: 'expected', 2: 'other'}[x]", TESTS).is_right


def test_verdicts_are_kept_but_not_those_of_programs_that_ran_out_of_time(monkeypatch):
    results = [Result("timed out", "", ""), Result("succeeded", "3", "")]
    runs = []

    def run(program, limits):
        runs.append(program)
        return [results[len(runs) - 1]]

    monkeypatch.setattr(code, "run", run)
    cases = {"inputs": ["1 2"], "outputs": ["3"]}
    assert [judge(SUM, cases).is_right for _ in range(3)] == [False, True, True]
    assert len(runs) == 2
    with pytest.raises(IndexError):  # other limits, another verdict
        judge(SUM, cases, Limits(cpu_seconds=1))


@pytest.mark.parametrize("cases", [{"inputs": [], "outputs": []}, {"inputs": [""], "outputs": []}])
def test_test_cases_that_do_not_fit_are_an_error(cases):
    with pytest.raises(ValueError, match="test_cases: . inputs, 0 outputs"):
        judge(SUM, cases)


def test_tests_that_are_no_python_are_an_error():
    with pytest.raises(SyntaxError):
        judge(SUM, "assert f(1) == ")


def test_test_cases_may_be_in_json():
    assert judge(SUM, json.dumps(CASES)).is_right
    assert not judge("def f(x): return x", '["assert f(1) == 1", "assert f(1) == 2"]').is_right


def test_the_ready_made_env(capsys):
    from rl2.env.load import load_env

    env = load_env(str(Path(__file__).parents[1] / "envs/coding.py"))
    assert "programs run in sandboxes of strength" in capsys.readouterr().out

    def score(reply):
        messages = [{"role": "user", "content": ""}, {"role": "assistant", "content": reply}]
        return asyncio.run(env.score(messages, {"test_cases": CASES}))

    assert score(f"```python\n{SUM}\n```") == {"right": 1.0, "format": 0.1}
    assert score("```python\nprint(3)\n```") == {"right": 0.0, "format": 0.1}
    assert score("The answer is 3.") == {"right": 0.0, "format": 0.0}
    env.close()
