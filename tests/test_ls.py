"""`rl2 ls`: a table of runs from their small files."""

import json
import os
import re
import socket
import subprocess
import sys

import pytest
from common import make_environment, run_main, write_jsonl
from test_lock import start_holder

from rl2.tools import ls

PPO = {"actor": {"model_name": "Qwen/Qwen3-0.6B"}, "trainer": {"eval_only": False}}
LINES = [
    {"step": 0, "test/reward/mean": 0.25, "test/reward/loss": 9.0},
    {"step": 1, "reward/mean": 0.5, "actor/loss": 0.0},
    {"step": 2, "reward/mean": 0.75, "actor/loss": 0.0, "test/reward/mean": 0.625},
    {"step": 3, "reward/mean": None, "actor/loss": 0.0},
]
RELEASED: dict = {}


def write_run(folder, *, config=PPO, lines=LINES, lock=RELEASED, trainer="PPOConfig", **record):
    """Writes the small files of a run that is laid out for 3 steps."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    record = {"identity": {"trainer": trainer}, "starts": [{"step": 0, "num_steps": 3}], **record}
    (folder / "run.json").write_text(json.dumps(record))
    write_jsonl(folder / "metrics.jsonl", lines)
    if lock is not None:
        (folder / "lock").mkdir()
        (folder / "lock/owner.json").write_text(json.dumps(lock))
        (folder / "lock/held").touch()
    if "model_step" in record:
        (folder / "model").mkdir()
    return folder


def list_runs(capsys, *folders):
    """(the cells of the table by the names of the runs, the lines below it)."""
    assert run_main(ls.main, *folders) == 0
    titles, *lines = capsys.readouterr().out.splitlines()
    assert titles.split() == ["RUN", "TRAINER", "STEP", "SUCCESS", "STATE"]
    rows = [re.split("  +", line) for line in lines]
    runs = {os.path.basename(name): cells for name, *cells in rows if cells}
    return runs, [cells[0] for cells in rows if len(cells) == 1]


@pytest.mark.parametrize("arguments", [["ls", "."], ["sft", "--help"]])
def test_a_reader_such_as_head_may_close_the_pipe(tmp_path, arguments):
    write_run(tmp_path / "run")
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "rl2", *arguments]
    environment = make_environment()
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_states(tmp_path, capsys):
    evaluation = {**PPO, "trainer": {"eval_only": True}}
    folder = write_run(tmp_path / "sweep/lr_1", model_step=3, is_complete=True)
    (folder / "branches/1").mkdir(parents=True)
    (folder / "branches/1/metrics.jsonl").write_text('{"step": 9}\n')
    write_run(tmp_path / "stopped", model_step=3, is_complete=False)
    write_run(tmp_path / "failed")
    write_run(tmp_path / "failed_later", model_step=2, is_complete=False)
    write_run(tmp_path / "killed", lock={"pid": 2**30, "host": socket.gethostname(), "since": ""})
    write_run(tmp_path / "evaluated", config=evaluation, lines=LINES[:1])
    write_run(tmp_path / "copied", lock=None)
    write_run(tmp_path / "copied_whole", lock=None, model_step=3, is_complete=True)
    (tmp_path / "new").mkdir()
    (tmp_path / "new/notes.txt").touch()
    holder = start_holder(tmp_path / "new")  # before it has written any metrics
    runs, problems = list_runs(capsys, tmp_path)
    holder.kill()
    holder.communicate()
    assert runs["new"][1:] == ["-/-", "-", "running"] and problems == []
    runs, _ = list_runs(capsys, tmp_path)
    assert runs["lr_1"][:3] == ["ppo", "3/3", "reward -, test 0.625"]
    assert {name: run[-1] for name, run in runs.items()} == {
        "lr_1": "finished",
        "stopped": "stopped",
        "failed": "failed",
        "failed_later": "failed",
        "killed": "killed",
        "evaluated": "finished",
        "copied": "unknown",
        "copied_whole": "finished",
        "new": "killed",
    }


def test_success_of_other_trainers_of_a_score_and_of_test_sets(tmp_path, capsys):
    lines = [{"step": 1, "actor/loss": 2.5, "test/news/loss": 2.0, "test/code/loss": 1.0}]
    write_run(tmp_path / "sft", trainer="SFTConfig", lines=lines)
    write_run(tmp_path / "rm", trainer="RMConfig", lines=[{"step": 1, "critic/loss": 0.5}])
    lines = [{"step": 1, "reward/mean": 1.5, "reward/right": 0.5, "test/reward/mean": 1.25}]
    lines[0] |= {"test/avg@4": 0.25, "test/avg@4_stderr": 0.1, "test/pass@4": 1.0}
    write_run(tmp_path / "ppo", config={**PPO, "rollout": {"score": "right"}}, lines=lines)
    runs, _ = list_runs(capsys, tmp_path)
    assert {name: run[:3] for name, run in runs.items()} == {
        "sft": ["sft", "1/3", "loss 2.5, test/news 2, test/code 1"],
        "rm": ["rm", "1/3", "loss 0.5"],
        "ppo": ["ppo", "1/3", "right 0.5, test 0.25"],
    }


def test_broken_and_foreign_folders_are_named_and_the_rest_is_listed(tmp_path, capsys):
    write_run(tmp_path / "whole", model_step=3, is_complete=True)
    torn = write_run(tmp_path / "torn")
    with open(torn / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "rew')
    damaged = write_run(tmp_path / "damaged")
    (damaged / "config.yaml").write_text("actor: {")
    write_run(tmp_path / "odd", config={"actor": 3}, identity=[], starts=["x"], lock=[])
    for file, text in (
        ("foreign/metrics.jsonl", '{"loss": 1}\n'),
        (".hidden/run.json", "{}"),
        ("configs/config.yaml", "a: 1"),
    ):
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text(text)
    (tmp_path / "loop").symlink_to(tmp_path)
    runs, problems = list_runs(capsys, tmp_path)
    assert set(runs) == {"whole", "torn", "damaged", "odd", "foreign"}
    assert runs["torn"][1] == "3/3"
    named = sorted(problem.partition(": ")[0].rpartition("/")[2] for problem in problems)
    assert named == ["damaged", "odd", "torn"] and "config.yaml" in "".join(problems)


def test_folders_without_runs(tmp_path, capsys):
    assert run_main(ls.main, tmp_path) == 0
    assert "trainer.save_dir" in capsys.readouterr().out
    assert run_main(ls.main, tmp_path / "missing") == 2
    assert "missing" in capsys.readouterr().err
