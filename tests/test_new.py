"""`rl2 new`: the folder that it makes works as it is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from common import make_environment, make_model, run_main

from rl2.tools import new
from rl2.tools.ls import summarise


@pytest.mark.nightly
def test_what_it_prints_can_be_typed(tmp_path, monkeypatch, capsys):
    """In a folder whose name needs quotes. Only the training is made shorter."""
    monkeypatch.chdir(tmp_path)
    assert run_main(new.main, "sums of two/first try") == 0
    _, _, *lines = capsys.readouterr().out.splitlines()
    enter, try_env, train = (line.partition("   #")[0].strip() for line in lines)
    train += " trainer.max_steps=1 data.responses_per_prompt=2"
    train += " rollout.train_sampling_params.max_new_tokens=4"
    environment = make_environment({"MODEL": make_model(tmp_path / "model")})
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    command = ["bash", "-ec", "\n".join([enter, try_env, train])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "no fault found" in done.stdout, done.stdout + done.stderr
    folder = tmp_path / "sums of two/first try"
    run = summarise(folder / "runs/first")
    assert (run.state, run.step, run.num_steps) == ("finished", 1, 1)
    assert [text.split()[0] for text in run.success] == ["reward", "test"]
    [answers] = (folder / "runs/first/rollouts/train").glob("*.jsonl")
    assert len(answers.read_text().splitlines()) == 6


@pytest.mark.parametrize(
    "reply, parts",
    [
        ("7 + 5 is 12.", {"right": 1.0, "short": 0.1}),
        ("It is 12." + " " * 100, {"right": 1.0, "short": 0.0}),
        ("12 or 13", {"right": 0.0, "short": 0.0}),
        ("", {"right": 0.0, "short": 0.0}),
    ],
)
def test_the_reward(reply, parts):
    scope: dict = {}
    exec((new.TASK / "env.py").read_text(), scope)
    messages = [{"role": "user", "content": ""}, {"role": "assistant", "content": reply}]
    assert scope["reward_fn"](messages, "12") == parts


@pytest.mark.parametrize("name", ["there/", ".", "", "file", "file/below", "link"])
def test_what_is_there_is_left_alone(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("nowhere")
    before = sorted(tmp_path.rglob("*"))
    assert run_main(new.main, name) == 2 and capsys.readouterr().err.startswith("rl2 new: ")
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "file").read_text() == "mine"
