"""rl2.rewards: what is found in a reply, how answers are compared, and that it withstands a policy
that writes anything."""

import contextlib
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from itertools import compress
from pathlib import Path

import maths_forms
import psutil
import pytest
from common import read_cases, read_jsonl, run

from rl2.rewards import maths
from rl2.rewards.maths import number, quantity, same_choice, same_maths, same_number
from rl2.rewards.text import (
    BOXED_PROMPT,
    THINK_ANSWER_PROMPT,
    is_think_answer,
    last_boxed,
    last_tagged,
    length_fraction,
    same_text,
)
from rl2.user_files import import_env_file

CASES = read_cases("rewards")


@pytest.fixture(scope="module", autouse=True)
def two_processes():
    """Fewer processes of math-verify, whose start takes seconds, for all tests of this file."""
    maths._pool(os.getpid()).shutdown()
    maths._pools.clear()
    earlier = math_verify_processes()  # of another file
    for process in earlier:
        process.kill()
    psutil.wait_procs(earlier, timeout=60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(maths, "MAX_PROCESSES", 2)
        yield
    maths._pools.clear()


def cases_of(*functions):
    """(function, arguments, result) of each case."""
    for function in functions:
        for *arguments, result in CASES[function.__name__]:
            yield function, arguments, result


FOUND = [*cases_of(last_boxed, last_tagged, is_think_answer)]
FOUND += [
    (last_tagged, [text.replace("answer", "move"), "move"], content)
    for text, content in CASES["last_tagged"]
]
COMPARED = [*cases_of(same_text, same_number, same_choice, same_maths)]


@pytest.mark.parametrize("function, arguments, expected", FOUND + COMPARED)
def test_what_is_found_in_a_reply_and_how_it_is_compared(function, arguments, expected):
    result = function(*arguments)
    assert result == expected and type(result) is type(expected)


def test_a_reward_of_length_grows_up_to_the_limit():
    assert [length_fraction(n, 8) for n in (0, 2, 8, 20)] == [0, 0.25, 1, 1]
    with pytest.raises(ValueError, match="max_tokens=0: expected at least 1"):
        length_fraction(1, 0)


@pytest.mark.parametrize("function, arguments, expected", [*cases_of(number, quantity)])
def test_numbers_are_exact(function, arguments, expected):
    assert function(*arguments) == (None if expected is None else Fraction(expected))


def test_a_reply_as_the_prompts_describe_it_is_read():
    """The prompts name the forms that the functions find."""
    assert "<think> the reasoning </think> <answer> the answer </answer>" in THINK_ANSWER_PROMPT
    reply = THINK_ANSWER_PROMPT.rpartition(": ")[2]
    assert is_think_answer(reply) and last_tagged(reply) == "the answer"
    assert last_boxed(BOXED_PROMPT) == ""


def test_an_answer_of_the_wrong_kind_is_an_error():
    with pytest.raises(ValueError, match=r"the answer 'x\+1' is not a number: use same_maths"):
        same_number("3", "x+1")
    with pytest.raises(ValueError, match="the answer '12' is not the letter"):
        same_choice("B", "12")


def find_errors(cases):
    """(the wrong forms that are accepted, the right ones that are denied) of some cases.

    A case is (name of a ready-made environment, question, reply, answer, whether it is right).
    """
    reward_fns = {env: import_env_file(env).reward_fn for env in {case[0] for case in cases}}

    def is_error(case):
        env, question, reply, answer, is_right = case
        asked = {"role": "user", "content": question}
        reward = reward_fns[env]([asked, {"role": "assistant", "content": reply}], answer)
        return ((reward["right"] if isinstance(reward, dict) else reward) == 1.0) != is_right

    with ThreadPoolExecutor(8) as threads:
        errors = [*compress(cases, threads.map(is_error, cases))]
    accepted, denied = ([c for c in errors if c[-1] is kind] for kind in (False, True))
    print(f"accepted {len(accepted)} wrong forms and denied {len(denied)} right ones")
    return accepted, denied


@pytest.mark.parametrize(
    "name, cases, most_denied",
    [
        ("gsm8k", maths_forms.gsm8k_cases(), 32),
        ("boxed", maths_forms.boxed_cases(), 4),
    ],
)
def test_no_wrong_form_is_accepted_and_few_right_ones_are_denied(name, cases, most_denied):
    """Of gsm8k: 2,997 wrong and 1,166 right forms; of boxed: 1,522 and 926."""
    cases = [(name, "How much is it?", *case) for case in sorted(set(cases))]
    accepted, denied = find_errors(cases)
    assert not accepted
    assert len(denied) <= most_denied, denied


@pytest.mark.parametrize(
    "name, half, most_accepted, most_denied",
    [
        ("maths_held_out", "A", 0, 0.04),
        pytest.param("maths_held_out", "B", 2, 0.04, marks=pytest.mark.nightly),
        ("maths_held_out_2", "A", 0, 0.04),
        pytest.param("maths_held_out_2", "B", 1, 0.04, marks=pytest.mark.nightly),
        ("maths_replies", "A", 0, 0.04),
        pytest.param("maths_held_out_3", "B", 8, 0.08, marks=pytest.mark.nightly),
        pytest.param("maths_replies", "B", 0, 0.04, marks=pytest.mark.nightly),
    ],
)
def test_verdicts_on_forms_that_were_written_before_the_checker(
    name, half, most_accepted, most_denied
):
    """The second set has been read since. The third one, of longer sentences, is only counted.

    The last set has whole replies, and half B of it is only counted, too.
    """
    cases = []
    for entry in read_jsonl(Path(__file__).parent / "cases" / f"{name}.jsonl"):
        if entry["half"] == half:
            form = "#### FIELD" if entry["env"] == "gsm8k" else r"So it is \boxed{FIELD}."
            form = "FIELD" if name == "maths_replies" else form
            forms = maths_forms.in_form(form, [entry | {"answer": entry["gold"]}])
            cases += [(entry["env"], entry["question"], *each) for each in forms]
    accepted, denied = find_errors(cases)
    assert len(accepted) <= most_accepted
    assert len(denied) <= most_denied * sum(is_right for *_, is_right in cases)


@pytest.mark.parametrize("question, answer, field, is_right", CASES["asked"])
def test_a_quantity_is_what_the_question_asks_for(question, answer, field, is_right):
    messages = [{"role": "user", "content": question}]
    messages.append({"role": "assistant", "content": f"#### {field}"})
    assert import_env_file("gsm8k").reward_fn(messages, answer)["right"] == is_right


@pytest.mark.parametrize("name", ["arithmetic", "calculator", "countdown", "reasoning"])
def test_what_is_only_thought_is_no_answer(name):
    messages = [{"role": "user", "content": "1 + 1?"}]
    for thought in ("<think>{}</think>\nWell.", "{}</think>\nWell.", "<think>{}"):
        reply = thought.format("<answer>2</answer>")
        extract = import_env_file(name).extract
        assert extract([*messages, {"role": "assistant", "content": reply}]) is None


ABSURD = {
    "digits": "9" * 5000,
    "long sum": "1+" * 40_000 + "1",
    "tower of powers": "9^{9^{9^{9}}}",
    "open brackets": "(" * 900,
    "roots": r"\sqrt{" * 150 + "2" + "}" * 150,
    "polynomial": "(x+y+z+w)^{300}",
    "unclosed": r"\frac{1}{",
    "spaces": " " * 900,
}


def test_absurd_answers_are_wrong_and_do_not_fail(monkeypatch):
    """A comparison without end is ended with its process, also while it computes in C, where no
    signal handler of Python would run. The next one is right."""
    for i, (name, answer) in enumerate(ABSURD.items()):
        with monkeypatch.context() as patch:
            patch.setattr(maths, "CPU_SECONDS", 0.2)
            assert same_maths(answer, "x^2+7") is False, name
        assert same_maths(f"7+{i}+x^2", f"x^2+{7 + i}") is True, name


def math_verify_processes() -> list[psutil.Process]:
    """The processes of math-verify that this process has started."""
    processes = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # a child of another test that has just ended
            if "maths.serve()" in " ".join(child.cmdline()):
                processes.append(child)
    return processes


def test_equal_requests_are_asked_once():
    assert same_maths("y+3x", "3x+y")
    misses = maths._ask_math_verify.cache_info().misses
    assert same_maths("y+3x", "3x+y")
    assert maths._ask_math_verify.cache_info().misses == misses


def test_forks_signals_and_the_end_of_the_process_that_asks():
    """A fork has processes of its own, and a timer and SIGALRM of the caller stay its own. The
    processes end with the one that started them, here by a kill.
    """
    code = """
import os, signal, psutil
from rl2.rewards.maths import same_maths
handler = lambda *_: None
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 3600)
assert same_maths("y+x", "x+y")
assert signal.getsignal(signal.SIGALRM) is handler
assert 3000 < signal.getitimer(signal.ITIMER_REAL)[0] <= 3600
child = os.fork()
if child == 0:
    os._exit(0 if same_maths("z+x", "x+z") and not same_maths("z", "x+z") else 3)
assert os.waitpid(child, 0)[1] == 0
print(*[child.pid for child in psutil.Process().children()], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = run("-c", code, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    [pid] = map(int, done.stdout.split())
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    "function",
    [
        last_boxed,
        last_tagged,
        is_think_answer,
        number,
        quantity,
        lambda text: same_choice(text, "B"),
        lambda text: same_text(text, "B"),
    ],
)
@pytest.mark.parametrize(
    "token",
    ["\\boxed{", "<answer>", "</answer>", "<think>", "1", ",", "1,111", "{", "\\", " ", "$", "or "],
)
def test_a_reply_of_one_repeated_token_is_read_in_linear_time(function, token):
    """Policies that collapse write such replies."""
    start = time.process_time()
    for end in ("", "x}", "</answer>", "7"):
        function(token * 20_000 + end)
    assert time.process_time() - start < 10


def test_a_process_that_was_killed_is_replaced():
    assert same_maths("y+x", "x+y")
    processes = math_verify_processes()
    assert 1 <= len(processes) <= maths.MAX_PROCESSES
    for process in processes:
        process.kill()
    psutil.wait_procs(processes, timeout=60)
    assert same_maths("y+2x", "2x+y")
