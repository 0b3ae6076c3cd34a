"""rl2.rewards.code: right programs are right, wrong ones and forgeries wrong."""

import json
import re
import sys
from types import ModuleType

import pytest
from common import read_cases

from rl2.rewards import code
from rl2.rewards.code import extract, judge
from rl2.rewards.sandbox import Result

CASE_TEXTS = read_cases("code_rewards")
SUM = "a, b = map(int, input().split())\nprint(a + b)"
CASES = {"fn_name": "", "inputs": [["1 2", "x"], "3 4\n"], "outputs": [["3"], "7\n"]}


@pytest.mark.parametrize("reply, program", CASE_TEXTS["the_program_of_a_reply"])
def test_the_program_of_a_reply(reply, program):
    assert extract(reply) == program


def test_extraction_takes_linear_time():
    assert extract("```" * 300_000) is None
    assert extract("```\n" * 300_001) == ""


def test_programs_that_read_and_print():
    assert judge(SUM, CASES) == (True, "")
    wrong = judge(SUM.replace("+", "-"), CASES)
    assert wrong == (False, "test 0: it printed '-1\\n'")
    failing = judge("print(3)\n1 / 0", CASES)  # after the right output
    assert failing == (False, "test 0: failed: ZeroDivisionError: division by zero")


def test_spaces_at_the_ends_of_lines_do_not_count(monkeypatch):
    outputs = iter(["1 \n2\n\n", " 1\n2", "1\n\n2", "1 2"])
    monkeypatch.setattr(code, "run", lambda *_, **__: [Result("succeeded", next(outputs), "")])
    verdicts = [judge(name, {"inputs": [""], "outputs": ["1\n2 \n"]}).is_right for name in "abcd"]
    assert verdicts == [True, False, False, False]


def test_calls_of_a_function_with_arguments_in_json():
    """The function may have the name of a builtin one."""
    cases = {"fn_name": "sum", "inputs": ["1\n[2, null]\n", '"a\u2028"\n{"b": 1}']}
    cases["outputs"] = ["[1, [2, null]]", '["a\\u2028", {"b": 1}]']
    assert judge("def sum(x, y): return x, y", cases).is_right
    assert judge("class Solution:\n    def sum(self, x, y): return [x, y]", cases).is_right
    assert not judge("def sum(x, y): return [y, x]", cases).is_right


def test_calls_of_a_function_with_lists_of_arguments():
    """As in `input_output` of APPS and TACO: an output is a value or a list of one value.

    Results may be such as JSON does not have.
    """
    program, calls = CASE_TEXTS["calls"]["program"], CASE_TEXTS["calls"]["calls"]
    for number in (None, 0, len(calls) - 1):  # whose result is wrong
        outputs = [7 if i == number else output for i, (_, output) in enumerate(calls)]
        cases = {"fn_name": "f", "inputs": [given for given, _ in calls], "outputs": outputs}
        assert judge(program, cases).is_right is (number is None), number


@pytest.mark.parametrize("tests, message", CASE_TEXTS["tests_that_cannot_judge_are_an_error"])
def test_tests_that_cannot_judge_are_an_error(tests, message):
    with pytest.raises(ValueError, match=message):
        judge("def f(x): return x", tests)


JUDGED = CASE_TEXTS["judged"]


@pytest.mark.parametrize("name", JUDGED)
def test_right_programs_pass_and_wrong_ones_do_not(name):
    tests = JUDGED[name]["tests"]
    if "right" in JUDGED[name]:
        assert judge(JUDGED[name]["right"], tests) == (True, "")
    for program in JUDGED[name].get("wrong", []):
        assert not judge(program, tests).is_right


@pytest.mark.parametrize("text", CASE_TEXTS["exits"])
def test_an_exit_is_no_pass(text):
    """In the tests, in a call, and at the end of the program."""
    right = "def f(x): return x"
    assert not judge(right, f"assert f(1) == 1\n{text}\nassert f(1) == 1").is_right
    assert not judge(f"def f(x):\n    {text}", "assert f(1) == 1").is_right
    assert not judge(f"{right}\n{text}", "assert f(1) == 1").is_right


def test_results_that_plain_python_accepts_and_denies(monkeypatch):
    cases = read_cases("code_forms")
    right = wrong = cases["program"]
    tests = cases["tests"] + "passed = []\n"
    for i, (result, test, wrong_result) in enumerate(cases["forms"]):
        right += f"def f{i}(): return {result}\n"
        wrong += f"def f{i}(): return {wrong_result}\n"
        test = re.sub(r"\bf\(\)", f"f{i}()", test)
        tests += f"try:\n    if {test}: passed.append({i})\nexcept Exception: pass\n"
    everything = f"{{*range({len(cases['forms'])})}}"
    all_pass = tests + f"failed = {everything} - {{*passed}}\nassert not failed, failed"
    none_pass = tests + "assert not passed, passed"
    for program, text in ((right, all_pass), (wrong, none_pass)):
        solution = ModuleType("solution")
        exec(program, vars(solution))
        monkeypatch.setitem(sys.modules, "solution", solution)
        exec(text, {"__name__": "tests"})
        assert judge(program, text) == (True, "")


@pytest.mark.parametrize("result, test, named", read_cases("code_forms")["not_supported"])
def test_the_reason_names_what_the_tests_cannot_compare(result, test, named):
    program = f"{read_cases('code_forms')['program']}\ndef f(): return {result}"
    verdict = judge(program, f"from solution import *\nassert {test}")
    assert not verdict.is_right and named in verdict.reason


@pytest.mark.parametrize("starved", ["program", "tests"])
def test_a_machine_that_is_too_busy_is_no_fault_of_the_program(starved, monkeypatch):
    results = {
        "program": [Result("starved", "", ""), Result("failed", "", "the program has ended")],
        "tests": [Result("timed out", "", ""), Result("starved", "", "")],
    }[starved]
    monkeypatch.setattr(code, "run", lambda *programs, limits: results[-len(programs) :])
    with pytest.raises(TimeoutError, match="too busy"):
        judge("def f(): return 1", "assert f() == 1")
    results[1] = Result("failed", "", "AssertionError")
    assert not judge("def f(): return 1", "assert f() == 1").is_right
    results[1] = Result("starved", "3", "")
    for cases in (CASES, {"fn_name": "f", "inputs": ["1"], "outputs": ["1"]}):
        with pytest.raises(TimeoutError, match="too busy"):
            judge(SUM, cases)


TESTS = 'assert f(1) == "expected"\nassert f(2) == "other"'
FORGERIES = CASE_TEXTS["forgeries"]


@pytest.mark.parametrize("name", [*FORGERIES, None])
def test_forgeries_are_wrong_and_the_next_program_is_right(name):
    right = "def f(x): return {1: 'expected', 2: 'other'}[x]"
    assert judge(FORGERIES.get(name, right), TESTS).is_right is (name is None)


def test_tests_that_are_no_python_are_an_error():
    with pytest.raises(SyntaxError):
        judge(SUM, "assert f(1) == ")


def test_test_cases_may_be_in_json():
    assert judge(SUM, "\n" + json.dumps(CASES)).is_right
