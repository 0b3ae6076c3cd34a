"""The trial at the start plays the gold answers of rows, and names rows where they earn nothing."""

import json

import pytest
from common import pack_rows
from env_helpers import load_text

from rl2.env import load as env_load
from rl2.env.load import load_env

PROMPT = [{"role": "user", "content": "1+1="}]
APPS = {  # as codeparrot/apps, with the columns renamed
    "messages": PROMPT,
    "solutions": json.dumps(["def add(a, b): return a + b", "add = lambda a, b: a + b"]),
    "test_cases": json.dumps({"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]]}),
    "starter_code": "",
}
PRINTS = {  # as TACO: solutions and input_output are lists and objects in some of its files
    "messages": PROMPT,
    "solutions": ["print 3", "print(sum(map(int, input().split())))"],
    "test_cases": {"inputs": ["1 2\n"], "outputs": ["3\n"]},
}


def preflight(env, rows, max_turns=1):
    return env_load.preflight(env, {"data.path": pack_rows(rows)}, max_turns)


def answers(*values):
    return [{"messages": PROMPT, "answer": value} for value in values]


RIGHT = {  # ready-made env -> rows whose gold answer it rewards
    "gsm8k": answers("2", 3, "1 + 1 = <<1+1=2>>2\n#### 2"),
    "think_answer": answers("Paris", 4.0, "42"),
    "coding": [APPS, PRINTS],
}
WRONG = {  # ready-made env -> a row whose gold answer earns no more than a wrong one
    "gsm8k": answers("31415926")[0],
    "coding": {**APPS, "solutions": json.dumps(["def add(a, b): return a - b"])},
    "think_answer": answers("<answer>4</answer>")[0],
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_row_whose_gold_answer_earns_too_little_is_named(name):
    env = load_env(name)
    right = RIGHT[name]
    assert preflight(env, right) == []
    [warning] = preflight(env, [*right, WRONG[name]])
    assert f"the data, row {len(right) + 1}" in warning and "row 1" not in warning
    [warning] = preflight(env, [WRONG[name]] * 2)
    assert "the data, row 1" in warning
    env.close()


def test_a_gold_answer_that_fails_is_refused_with_the_row(tmp_path):
    text = """
        def reward_fn(messages, answer):
            reply = messages[-1]["content"]
            return float(reply == "#### 2") if answer == 2 or reply != "#### x" else 1 / 0
    """
    with pytest.raises(ValueError, match="(?s)the data, row 2: .*'#### x'.*ZeroDivisionError"):
        preflight(load_text(tmp_path, text), answers(2, "x"))


@pytest.mark.parametrize(
    "text",
    [
        "def reward_fn(messages, answer=None): return 0.0",  # it judges without the answer
        "def reward_fn(messages, solution): return 0.0",  # the row lacks it in a test above
        "def reward_fn(messages): return len(messages[-1]['content'])",
        "def group_reward_fn(trajectories): return [0.0 for _ in trajectories]",
        "def run(row, base_url): return 1.0",
    ],
)
def test_rows_of_which_no_answer_is_judged_are_not_tried(tmp_path, text):
    rows = [row | {"solution": {"steps": 3}} for row in answers("2", '{"a": 1}')]
    env = load_text(tmp_path, text)
    max_turns = 2 if "def run" in text else 1
    assert not [warning for warning in preflight(env, rows, max_turns) if "gold" in warning]


@pytest.mark.parametrize(
    ("more", "max_turns"),
    [
        ("def interact(messages): return []", 2),
        ("class make_env:\n    def step(self, message): return {'done': True}", 1),
    ],
)
def test_what_follows_the_first_reply_may_earn_more(tmp_path, more, max_turns):
    """So nothing is said if no gold answer earns more than a wrong one."""
    text = f"def reward_fn(messages, answer): return 0.0\n{more}"
    assert preflight(load_text(tmp_path, text), answers("2"), max_turns) == []


def test_a_column_called_solution_has_gold_answers(tmp_path):
    text = "def reward_fn(messages, solution): return solution in messages[-1]['content']"
    rows = [{"messages": PROMPT, "solution": f"${i}$"} for i in range(2)]
    assert preflight(load_text(tmp_path, text), rows) == []
