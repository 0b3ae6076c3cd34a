"""Env files that work, that cannot work and that misbehave."""

import asyncio
import copy
import json
import logging
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from common import pack_rows, read_cases, run
from env_helpers import ENVS, MESSAGES, call, env_of, failure
from env_helpers import load_text as load
from faulty_env import nest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl2.env import load as env_load
from rl2.env.contract import EnvError, EnvFailures
from rl2.env.load import load_env, play_reply
from rl2.user_files import find_env_file

CASES = read_cases("env_files")
ROW = {
    "messages": [{"role": "user", "content": "1+1="}],
    "answer": 2,
    "level": "easy",
    "tags": ["a"],
}


def preflight(env, row_sets, max_turns, is_partial=False):
    """The same of rows in lists."""
    row_sets = {key: pack_rows(rows) for key, rows in row_sets.items()}
    return env_load.preflight(env, row_sets, max_turns, is_partial)


@pytest.mark.parametrize("prefix", ["", "async "])
def test_reward_fn_gets_copies_by_the_names_it_asks_for(tmp_path, prefix):
    text = """def reward_fn(answer, messages, level, seed=7, *, tags):
        seen = answer, messages[-1]["content"], level, seed, tags.pop()
        messages[0]["content"] = ""
        messages.clear()
        return {"seen": float(seen == (2, "2", "easy", 7, "a"))}"""
    messages, row = copy.deepcopy(MESSAGES), copy.deepcopy(ROW)
    env = load(tmp_path, prefix + text)
    assert asyncio.run(env.score(messages, row)) == {"seen": 1.0}
    assert (messages, row) == (MESSAGES, ROW)


NUMBERS = st.booleans() | st.integers(-(2**64), 2**64) | st.floats(-3e38, 3e38)
NUMBERS |= st.floats(-6e4, 6e4, width=16).map(np.float16) | NUMBERS.map(np.array)
SCALARS = NUMBERS | st.floats(-65504, 65504, width=32).map(np.float32) | st.booleans().map(np.bool_)
SCALARS |= st.builds(
    lambda x, dtype: torch.tensor(x, dtype=dtype, requires_grad=dtype.is_floating_point),
    st.integers(-100, 100),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]),
)
WRONG = st.none() | st.text() | st.lists(NUMBERS, min_size=1).map(np.array)
WRONG |= st.sampled_from([float("nan"), np.float32("inf"), -(10**400), 1e39, np.array(np.nan), 1j])


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(st.text(), SCALARS, min_size=1) | SCALARS)
def test_rewards_are_finite_numbers(value):
    parts = call(env_of(lambda messages: value))
    expected = value if isinstance(value, dict) else {"reward": value}
    assert parts == {name: float(number) for name, number in expected.items()}
    assert all(type(part) is float for part in parts.values())


@settings(deadline=None, max_examples=50)
@given(
    WRONG
    | st.lists(NUMBERS)
    | st.dictionaries(st.text(), WRONG)
    | st.dictionaries(st.integers(), NUMBERS)
)
def test_other_rewards_are_an_env_error(value):
    assert str(failure(env_of(lambda messages: value))).startswith("reward_fn: expected")


@pytest.mark.parametrize("prefix", ["", "async "])
@pytest.mark.parametrize(
    "raised",
    ["KeyError", "KeyboardInterrupt", "SystemExit", "GeneratorExit", "CancelledError", "Own"],
)
def test_failure_carries_the_users_traceback_and_nothing_of_ours(tmp_path, prefix, raised):
    """Whatever is raised: none ends the run, or is waited for until the call is late."""
    env = load(
        tmp_path,
        f"""
        from asyncio import CancelledError
        class Own(BaseException): pass
        def help():
            raise {raised}
        {prefix}def reward_fn(messages):
            return help()
        """,
    )
    error = failure(env)
    text = str(error)
    assert text.startswith("reward_fn raised:\nTraceback") and text.strip().endswith(raised)
    assert f'"{tmp_path / "env.py"}", line 7, in reward_fn' in text and "line 5, in help" in text
    assert "rl2/env/" not in text
    copied = pickle.loads(pickle.dumps(error))
    assert (str(copied), copied.kind) == (text, error.kind)


def test_hung_calls_do_not_keep_the_process_from_exiting(tmp_path):
    """Neither in a thread of ours, nor in one that the env asks asyncio for."""
    (tmp_path / "env.py").write_text(
        "import asyncio, time\ndef reward_fn(messages):\n    time.sleep(600)\n"
        "async def interact(messages):\n    await asyncio.to_thread(time.sleep, 600)"
    )
    code = (
        "import asyncio, sys\nfrom rl2.env.contract import EnvError\n"
        "from rl2.env.load import load_env\nenv = load_env(sys.argv[1], 0.1)\n"
        "for call in (env.score, env.answer):\n"
        "    try:\n        asyncio.run(call([], {}))\n"
        "    except EnvError:\n        print('failed')"
    )
    done = run("-c", code, tmp_path / "env.py", timeout=120)
    assert (done.stdout, done.stderr) == ("failed\nfailed\n", "")


def tool(content="x", **more):
    return [{"role": "tool", "content": content, **more}]


PARTS = [{"type": "text", "text": "5 "}, {"type": "text", "text": "is"}]


@pytest.mark.parametrize(
    "value, messages",
    [
        (tool(PARTS), tool("5 is")),  # as of rows: a template may write a list as Python does
        (tool(value=np.float16(0.5)), tool(value=0.5)),
        (tool(value=torch.tensor(0.5, requires_grad=True)), tool(value=0.5)),
        (tool(value=nest(45)), tool(value=nest(45))),
    ],
)
def test_messages_become_json(value, messages):
    env = env_of(lambda messages: 0, lambda messages: value)
    answer = asyncio.run(env.answer(MESSAGES, ROW)).messages
    assert json.loads(json.dumps(answer)) == messages


@pytest.mark.parametrize(
    "value, error",
    [
        ("5", "expected a list"),
        ([5], "expected a list"),
        ([{"role": "tool"}], "expected a list"),
        ([{"content": "5"}], "expected a list"),
        (MESSAGES, "expected a list"),
        (tool([*PARTS, {"type": "image"}]), "content of type 'image' is not supported"),
        (tool(value=nest(60)), "lists and objects are nested"),
        (tool("x" * 2**21), "20971.. characters, a turn may have 1048576, in"),
    ],
)
def test_bad_messages_are_an_env_error(value, error):
    env = env_of(lambda messages: 0, lambda messages: value)
    with pytest.raises(EnvError, match=f"interact: {error}"):
        asyncio.run(env.answer(MESSAGES, ROW))


@pytest.mark.parametrize("text, message", CASES["works_with_no_row"])
def test_env_file_that_cannot_work_is_refused(tmp_path, text, message):
    with pytest.raises(ValueError, match=message) as error:
        load(tmp_path, text)
    assert "importlib" not in str(error.value)
    assert "rl2/env/" not in str(error.value) and "user_files.py" not in str(error.value)


def test_an_env_file_is_found_by_its_path_or_as_a_ready_made_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_env_file("gsm8k") == ENVS / "gsm8k.py"
    (tmp_path / "gsm8k").mkdir()  # a folder of this name is no env file
    assert find_env_file("gsm8k") == ENVS / "gsm8k.py"
    with pytest.raises(ValueError, match="=gsm9k: no such file.*did you mean gsm8k.*arithmetic, "):
        find_env_file("gsm9k")
    (tmp_path / "boxed").write_text("")  # a file that exists wins
    assert find_env_file("boxed") == Path("boxed")
    with pytest.raises(ValueError, match="expected a Python file"):
        load_env("boxed")


def test_env_files_of_the_same_name_stay_apart_and_may_import_neighbours(tmp_path):
    envs = []
    for value in (1, 2):
        folder = tmp_path / str(value)
        folder.mkdir()
        (folder / f"neighbour{value}.py").write_text(f"VALUE = {value}")
        text = f"from neighbour{value} import VALUE\ndef reward_fn(messages): return VALUE"
        envs.append(load(folder, text))
    assert [call(env)["reward"] for env in envs] == [1.0, 2.0]


SPAWNING = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from neighbour import VALUE
def double(number):
    return VALUE * number
def reward_fn(messages, answer):
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(double, answer).result()
"""


@pytest.mark.parametrize("file", ["math.py", "my env-1.5.py"])
def test_processes_that_the_env_spawns_find_its_functions(tmp_path, file):
    """Also where the file's name is that of a standard module, or no name of a module."""
    (tmp_path / "neighbour.py").write_text("VALUE = 2")
    (tmp_path / file).write_text(SPAWNING)
    assert call(load_env(str(tmp_path / file), 60), **ROW) == {"reward": 4.0}


def test_failures_are_logged_once_a_kind_and_stop_the_run_above_the_fraction(tmp_path, caplog):
    env = load(tmp_path, "def reward_fn(messages, answer):\n    raise KeyError(answer)")
    failures = EnvFailures(max_fraction=0.5)
    with caplog.at_level(logging.WARNING):
        for answer in range(3):
            failures.record(failure(env, answer=answer))
        failures.record(failure(env_of(lambda messages: None)))
    assert failures.count == 4 and len(caplog.records) == 2 and "KeyError: 0" in caplog.text
    failures.check(0, 0)
    failures.check(4, 8)
    with pytest.raises(
        RuntimeError,
        match="(?s)failed on 5 of 8 .*max_env_failures=0.5.*expected reward to be a number",
    ):
        failures.check(5, 8)
    with pytest.raises(RuntimeError, match="log of the other processes"):
        EnvFailures(0).check(1, 8)


def test_preflight_accepts_a_working_env_and_warns_of_an_unused_function():
    env = env_of(lambda messages, answer: messages[-1]["content"] == "2", lambda messages: [])
    assert preflight(env, {"data.path": [ROW, ROW]}, 2) == []
    [warning] = preflight(env, {"data.path": [ROW], "data.test_path": [ROW]}, 1)
    assert "interact()" in warning
    counts = env_of(lambda messages: len(messages[0]["content"]))
    assert preflight(counts, {"data.path": [{"messages": "1+1=", "answer": 2}]}, 1) == []


def test_preflight_tries_rows_of_the_whole_data_and_of_the_test_data():
    """A column of other types in the middle, or in the test data, is seen before training."""
    env = env_of(lambda messages, answer: messages[-1]["content"] == str(int(answer)))
    rows = [{**ROW, "answer": i} for i in range(8)]
    assert preflight(env, {"data.path": rows, "data.test_path": rows}, 1) == []
    rows[4] = {**ROW, "answer": "four"}
    for row_sets in ({"data.path": rows}, {"data.path": [ROW], "data.test_path": rows}):
        with pytest.raises(ValueError, match="invalid literal for int.*: 'four'"):
            preflight(env, row_sets, 1)
    many = [{**ROW, "answer": i} for i in range(1000)]
    seen = set()
    counts = env_of(lambda messages, answer: seen.add(answer) or 0)
    preflight(counts, {"data.path": many}, 1)
    assert len(seen) == 8 and {0, 999} <= seen


@pytest.mark.parametrize(("reply", "most"), [("", 1), ("four" * 10, 40), ("word " * 999, 100)])
def test_a_trial_counts_no_more_tokens_than_a_reply_may_have(reply, most):
    env = env_of(lambda messages, num_tokens: num_tokens)
    assert 1 <= asyncio.run(play_reply(env, 1, ROW, reply, "key"))["reward"] <= most


def test_preflight_names_the_data_that_lacks_a_column():
    env = env_of(lambda messages, answer: 0.0)
    rows = {"data.path": [ROW], "data.test_path": [ROW, {"messages": "x", "label": 1}]}
    words = "'answer', which 1 of 2 rows of data.test_path lack, .*row 2; it has messages, label"
    with pytest.raises(ValueError, match=words + ".*data.columns.OLD=answer"):
        preflight(env, rows, 1)


def test_preflight_survives_a_call_that_never_gives_the_interpreter_away(tmp_path):
    """With the default rollout.env_isolation=thread."""
    match = 're.match("(a+)+$", "a" * 50 + "b")'
    env = load(tmp_path, f"import re\ndef reward_fn(messages): {match}; return 1", 0.5)
    with pytest.raises(ValueError, match="reward_fn did not return within rollout.env_timeout=0.5"):
        preflight(env, {"data.path": [ROW] * 8}, 1)
    env.close()


def test_preflight_tries_what_fails_now_and_then_again(tmp_path):
    text = """
        import pathlib, time
        def reward_fn(messages):
            folder = pathlib.Path(__file__).parent
            number = len(list(folder.glob("call_*")))
            (folder / f"call_{number}_{time.time_ns()}").touch()
            if number == 4:
                raise OSError("HTTP 429")
            if number == 9:
                time.sleep(60)
            return 1
    """
    env = load(tmp_path, text, 1.0)
    assert preflight(env, {"data.path": [ROW] * 8}, 1) == []
    assert len(list(tmp_path.glob("call_*"))) > 24


@pytest.mark.parametrize("text, row, max_turns, message", CASES["refused_by_the_trial"])
def test_preflight_refuses_an_env_that_cannot_work(tmp_path, text, row, max_turns, message):
    env = load(tmp_path, text)
    with pytest.raises(ValueError, match=message):
        preflight(env, {"data.path": [row]}, max_turns)
    if message == CASES["one_turn"]:
        assert not preflight(env, {"data.path": [row]}, 2)
        with pytest.raises(ValueError, match="rollout.partial=true moves trajectories"):
            preflight(env, {"data.path": [row]}, 2, is_partial=True)
    env.close()


def test_a_run_without_base_url_is_the_files_own(tmp_path):
    text = "def run(text): return text\ndef reward_fn(messages): return len(run('ab'))"
    env = load(tmp_path, text)
    assert env.spec.run is None and call(env) == {"reward": 2.0}


def test_row_without_a_needed_column_costs_its_trajectory_only():
    assert "reward_fn needs level" in str(failure(env_of(lambda messages, level: 1.0), answer=1))
