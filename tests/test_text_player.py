"""Env files of RL2 upstream: `step(state, action, extra_info)`, written as its README has them."""

import pytest
from common import (
    launch_runs,
    make_model,
    pack_rows,
    read_jsonl,
    read_metrics,
    run_main,
    write_jsonl,
)
from env_helpers import load_text, make_play
from scripted import PARAMS, process_group  # noqa: F401

from rl2.env.load import preflight
from rl2.rollout.text_player import TextPlayer
from rl2.tools import env as command

# One turn: an answer in tags.
ANSWER = """
import re

async def step(state, action, extra_info):
    match = re.search(r"<answer>(.*?)</answer>", action)
    is_right = bool(match) and match.group(1) == extra_info["answer"]
    return {"next_state": None, "reward": 0.1 * bool(match) + is_right, "score": float(is_right),
            "done": True, "extra_info": extra_info}
"""
# Several turns: a search, whose passage follows the turn, another prompt, and an answer.
SEARCH = """
async def step(state, action, extra_info):
    seen = extra_info.setdefault("seen", [])
    seen.append([state, action])
    response = {"next_state": None, "reward": 0.0, "score": 0.0, "done": False,
                "extra_info": extra_info}
    if "<search>" in action:
        response["reward"] = 0.25
        response["next_state"] = state + action + "\\n<information>Paris</information>\\n"
    elif "<rewrite>" in action:
        response["next_state"] = "rewritten: " + action
    else:
        assert [text for text, _ in seen] == extra_info.get("states", [text for text, _ in seen])
        response["done"] = True
        response["reward"] = response["score"] = float(extra_info["answer"] in action)
    return response
"""


def make_row(**extra_info):
    question = [{"role": "user", "content": "Capital of France?"}]
    return {"messages": question, "extra_info": {"answer": "Paris", **extra_info}}


def play(folder, text, script, row=None, max_turns=4, **options):
    """(the trajectory, the template, the player) of a row; `script` has the replies."""
    env = load_text(folder, text, **options)
    row = row or make_row()
    collector, [prompt], player = make_play(env, script, [row], max_turns=max_turns)
    step_player = TextPlayer(
        engine=player.engine,
        envs=player.envs,
        templates=player.templates,
        failures=player.failures,
        max_turns=max_turns,
        max_length=player.max_length,
    )
    collector.player = step_player
    [trajectory] = collector.play([prompt], PARAMS, 1, "train", 1)
    env.close()
    return trajectory, player.templates[""], step_player


PROMPT = "<|im_start|>user\nCapital of France?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_passage_follows_the_tokens_of_the_turn(tmp_path, isolation):
    """The rewards lie on the last tokens of their turns. The score is not in the reward."""
    first, passage, last = (
        "<search>capital</search>",
        "\n<information>Paris</information>\n",
        "Paris",
    )
    states = [PROMPT, PROMPT + first + passage]  # what the model saw, without the end of its turn
    row = make_row(states=states)
    trajectory, template, player = play(tmp_path, SEARCH, [first, last], row, isolation=isolation)
    assert trajectory.finish_reason == "stop", player.failures.last
    [sample] = trajectory.samples
    assert template.decode(sample.tokens) == f"{PROMPT}{first}<|im_end|>{passage}{last}<|im_end|>"
    trained = [token for token, is_on in zip(sample.tokens, sample.mask, strict=True) if is_on]
    assert template.decode(trained) == f"{first}<|im_end|>{last}<|im_end|>"
    assert trajectory.rewards == {"turns": 1.25, "score": 1.0} and trajectory.reward == 1.25
    end = len(template.tokenize(f"{PROMPT}{first}<|im_end|>"))
    placed = {i: value for i, value in enumerate(sample.rewards) if value}
    assert placed == {end - 1: 0.25, len(sample.tokens) - 1: 1.0}
    assert row["extra_info"] == {"answer": "Paris", "states": states}  # of the other samples too


def test_another_text_begins_another_sequence(tmp_path):
    trajectory, template, player = play(tmp_path, SEARCH, ["<rewrite>", "Paris"])
    assert trajectory.finish_reason == "stop", player.failures.last
    texts = [template.decode(sample.tokens) for sample in trajectory.samples]
    assert texts == [f"{PROMPT}<rewrite><|im_end|>", "rewritten: <rewrite>Paris<|im_end|>"]


def test_limits_end_a_trajectory_after_its_step(tmp_path):
    """As upstream: a turn that is cut, and the last of max_turns, are answered too."""
    replies = lambda turn, _: ("<answer>Paris</answer>", "length")  # noqa: E731
    trajectory, _, _ = play(tmp_path, ANSWER, replies, max_turns=1)
    assert trajectory.finish_reason == "length" and trajectory.reward == 1.1
    trajectory, _, _ = play(tmp_path, SEARCH, ["<search>"] * 2, max_turns=2)
    assert trajectory.finish_reason == "stop" and trajectory.rewards["turns"] == 0.5
    long = SEARCH.replace("Paris</inf", "x" * 400 + "</inf")
    trajectory, _, _ = play(tmp_path, long, ["<search>"])
    assert trajectory.finish_reason == "length" and len(trajectory.samples) == 1


@pytest.mark.parametrize(
    "result, problem",
    [
        ("1.0", "expected next_state, reward, score, done, extra_info, got 1.0"),
        ("{'reward': 0, 'done': False, 'extra_info': {}}", "expected a text next_state"),
        ("{'reward': 0, 'done': False, 'extra_info': {}, 'next_state': ''}", "expected a text"),
        ("{'reward': 0, 'done': False, 'extra_info': {}, 'next_state': 3}", "to be a text, got 3"),
        ("{'reward': float('nan'), 'done': True, 'extra_info': {}}", "reward to be finite"),
        ("{'reward': 0, 'done': True, 'extra_info': {'a': step}}", "extra_info to be JSON"),
    ],
)
def test_a_wrong_result_costs_the_trajectory(tmp_path, result, problem):
    text = f"async def step(state, action, extra_info): return {result}"
    trajectory, _, player = play(tmp_path, text, ["a"])
    assert trajectory.is_failed and problem in str(player.failures.last)


@pytest.mark.parametrize(
    "text, problem",
    [
        (ANSWER + "def reward_fn(messages, answer): return 1", "remove it, or the other functions"),
        ("async def step(message): return 1", "expected a function reward_fn"),
    ],
)
def test_a_file_with_another_step_is_refused(tmp_path, text, problem):
    with pytest.raises(ValueError, match=problem):
        load_text(tmp_path, text)


def test_a_run_on_the_rows_of_upstream(tmp_path, monkeypatch, capsys):
    """The README's two forms of rows; the trial, `rl2 env`, a run with an evaluation."""
    monkeypatch.chdir(tmp_path)
    make_model("model", max_position_embeddings=512)
    (tmp_path / "env.py").write_text(ANSWER)
    write_jsonl(tmp_path / "rows.jsonl", [make_row() for _ in range(4)])
    text = [{"prompt": "The capital of China is", "extra_info": {"answer": "Beijing"}}]
    write_jsonl(tmp_path / "text.jsonl", text)
    for rows in ("rows.jsonl", "text.jsonl"):
        status = run_main(command.main, "env.py", f"data.path={rows}")
        printed = capsys.readouterr().out
        assert status == 0 and "gold answer" in printed and "not tried: step" in printed
    keys = ["actor.model_name=model", "data.path=rows.jsonl", "data.test_path=text.jsonl"]
    keys += ["rollout.env_path=env.py", "rollout.train_sampling_params.max_new_tokens=4"]
    sizes = ["data.prompts_per_rollout=2", "data.responses_per_prompt=2", "trainer.max_steps=1"]
    launch_runs(1, [["ppo", *keys, *sizes, "rollout.score=score", "trainer.save_dir=run"]])
    [start, line] = read_metrics(tmp_path / "run")
    assert line["reward/score"] == 0 and start["test/reward/mean"] == 0
    records = read_jsonl(tmp_path / "run/rollouts/train/step_1.jsonl")
    assert all(record["rewards"] == {"turns": 0, "score": 0} for record in records)


def test_the_trial_names_rows_without_extra_info(tmp_path):
    env = load_text(tmp_path, ANSWER)
    rows = pack_rows([{"messages": make_row()["messages"], "answer": "Paris"}])
    with pytest.raises(ValueError, match="step needs column 'extra_info'"):
        preflight(env, {"data.path": rows}, 1)
    with pytest.raises(ValueError, match="rollout.partial=true"):
        preflight(env, {"data.path": pack_rows([make_row()])}, 1, is_partial=True)
    env.close()


GO_ON = """
async def step(state, action, extra_info):
    return {"next_state": state + action + "Go on.", "reward": "42" in action,
            "done": "42" in action, "extra_info": extra_info}
"""


def test_the_trial_finds_that_one_turn_is_not_enough(tmp_path, monkeypatch, capsys):
    """The run would train on first turns alone, as if they were the whole."""
    env, rows = load_text(tmp_path, GO_ON), {"data.path": pack_rows([make_row()])}
    with pytest.raises(ValueError, match="set rollout.max_turns"):
        preflight(env, rows, 1)
    assert preflight(env, rows, 2) == []
    env.close()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "env.py").write_text(GO_ON)
    write_jsonl(tmp_path / "rows.jsonl", [make_row(answer="42")])
    for keys, is_lacking in ([], True), (["rollout.max_turns=2"], False):
        run_main(command.main, "env.py", "data.path=rows.jsonl", *keys)
        assert ("give the key to this command" in capsys.readouterr().out) is is_lacking
