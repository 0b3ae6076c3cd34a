"""`python -m rl2 env`: each planted fault is found by its line, and the shipped envs have none."""

import re

import pytest
from common import ROOT, read_cases, run_main, write_jsonl
from test_ready_envs import PACKAGES

from rl2.env.gold import FORMS
from rl2.tools import env as command
from rl2.tools.exploits import make_cases

CASES = read_cases("env_command")
ROWS = [
    {"messages": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": str(a + b)}
    for a, b in ((17, 25), (110, 233), (400, 58))
]
# The last <answer></answer> must be the answer.
RIGHT = """
import re
def field(messages):
    found = re.findall(r"<answer>(.*?)</answer>", messages[-1]["content"], re.DOTALL)
    return found[-1].strip() if found else "?"
def is_right(messages, answer):
    found = re.findall(r"<answer>(.*?)</answer>", messages[-1]["content"], re.DOTALL)
    return float(bool(found) and found[-1].strip() == answer)
"""


@pytest.fixture
def try_env(capsys):
    """Calls the command. Returns its exit status, what it prints, and what it prints on stderr."""

    def try_it(*arguments):
        status = run_main(command.main, *arguments)
        printed = capsys.readouterr()
        assert "Traceback" not in printed.out + printed.err, printed
        return status, printed.out, printed.err

    return try_it


@pytest.fixture
def try_code(tmp_path, try_env):
    """Tries an env file with this code on three rows."""

    def try_it(code, *arguments, rows=ROWS):
        (tmp_path / "env.py").write_text(RIGHT + code)
        write_jsonl(tmp_path / "rows.jsonl", rows)
        return try_env(tmp_path / "env.py", f"data.path={tmp_path}/rows.jsonl", *arguments)

    return try_it


def problems(out):
    return [line for line in out.splitlines() if line.startswith("PROBLEM: ")]


@pytest.mark.parametrize("name", CASES["faults"])
def test_a_planted_fault_is_found(name, try_code):
    case = CASES["faults"][name]
    expected = case["expected"]
    status, out, _ = try_code(case["code"], *case.get("arguments", []))
    assert status == 1 and any(x.startswith(f"PROBLEM: {expected}") for x in problems(out)), out
    kind = expected.partition(":")[0]
    assert out.count("    to do: ") == len(problems(out)) and case.get("advice", "") in out
    if kind not in ("exploit", "nothing teaches"):  # which several lines may tell
        assert all(line.startswith(f"PROBLEM: {kind}") for line in problems(out)), out


def test_the_env_files_of_the_docs_have_no_fault(tmp_path, try_env):
    """The README's first one, and reward_fn of docs/rewards.md."""
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    for page in ("README.md", "docs/rewards.md"):
        blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
        [first, *_] = [block for block in blocks if "def reward_fn" in block]
        (tmp_path / "env.py").write_text(first)
        words = ["rollout.max_turns=2"] if "interact" in first else []
        words.append(f"data.path={tmp_path}/rows.jsonl")
        status, out, _ = try_env(tmp_path / "env.py", *words)
        assert status == 0 and not problems(out), (page, out)


PLAYED = {  # name -> further keys of a shipped env that runs here
    "arithmetic": [],
    "boxed": [],
    "calculator": ["rollout.max_turns=3"],
    "coding": [],
    "countdown": [],
    "gsm8k": [],
    "maths_steps": ["rollout.max_turns=5"],
    "reasoning": [],
    "search": ["rollout.max_turns=3"],
}


@pytest.mark.parametrize("name", PLAYED)
def test_a_shipped_env_has_no_fault(name, monkeypatch, try_env):
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name], reason="the env needs it")
    monkeypatch.chdir(ROOT)
    status, out, _ = try_env(name, f"data.path=examples/rows/{name}.jsonl", *PLAYED[name])
    assert status == 0 and not problems(out), out


@pytest.mark.parametrize("name", CASES["fine"])
def test_an_env_without_fault_passes(name, try_code):
    case = CASES["fine"][name]
    status, out, _ = try_code(case["code"], *case.get("arguments", []))
    assert status == 0 and "1.000" in out and not problems(out), out


def test_each_reply_is_tried_once():
    """Two equal ones would share the object of an environment."""
    cases = make_cases(ROWS, FORMS)
    assert len(cases) == len(set(cases)) > 300


@pytest.mark.parametrize("name", CASES["untried"])
def test_what_cannot_be_tried_is_told(name, try_code):
    case = CASES["untried"][name]
    status, out, _ = try_code(case["code"])
    assert status == 2 and case["expected"] in out and not problems(out), out


def test_rows_without_an_answer(try_code):
    code = 'def reward_fn(messages, goal): return float(messages[-1]["content"] == goal)'
    row = {"messages": "What is 1 + 1?", "goal": "two"}
    status, out, _ = try_code(code, rows=[row])
    assert status == 0 and "gold answer" not in out, out


def test_a_mistake_of_the_user_is_told_in_words(tmp_path, monkeypatch, try_env):
    (tmp_path / "env.py").write_text("def reward_fn(:\n")
    monkeypatch.chdir(ROOT)
    code = ([tmp_path / "env.py", "data.path=examples/rows/gsm8k.jsonl"], "invalid syntax")
    rows = (["boxed", "data.path=lost.jsonl"], "- data.path: lost.jsonl: no such file")
    for words, expected in ((["data.pth=x"], "did you mean data.path"), code, rows):
        status, _, err = try_env(*words)
        assert status == 2 and expected in err and "problem" in err, err
