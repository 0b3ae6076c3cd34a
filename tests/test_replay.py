"""`python -m rl2 replay`: a recorded step is run again, and each planted change is named."""

import json
import re
import shutil
import sys
from dataclasses import replace

import numpy as np
import pytest
from common import (
    LETTER_ENV,
    launch,
    launch_runs,
    make_model,
    read_jsonl,
    read_metrics,
    run,
    write_jsonl,
)
from safetensors.numpy import load_file, save_file

from rl2.tools import replay


def edit_json(path, change):
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with a model, an environment and the rows of all trainers."""
    folder = tmp_path_factory.mktemp("replay")
    make_model(folder / "tiny")
    (folder / "env.py").write_text(LETTER_ENV)
    user = [{"role": "user", "content": "say a"}]
    numbers = range(10)
    prompts = [{"messages": [{**user[0], "content": f"say {i}"}], "answer": "abc"} for i in numbers]
    reply = {"role": "assistant", "content": "aa"}
    write_jsonl(folder / "ppo.jsonl", prompts)
    write_jsonl(folder / "sft.jsonl", [{"messages": [*user, reply]} for _ in numbers])
    pairs = [{"messages": user, "chosen": "a" * (1 + i % 3), "rejected": "z"} for i in numbers]
    write_jsonl(folder / "dpo.jsonl", pairs)
    write_jsonl(folder / "rm.jsonl", pairs)
    return folder


def arguments(data, trainer, save_dir, *more):
    """A run of three steps with an evaluation after each, and checkpoints of all."""
    worker = "critic" if trainer == "rm" else "actor"
    words = [
        trainer,
        f"data.path={data / trainer}.jsonl",
        f"data.test_path={data / trainer}.jsonl",
        f"{worker}.model_name={data / 'tiny'}",
        f"{worker}.dtype=float32",
        f"{worker}.lr=0.01",
        f"{worker}.scheduler=linear",
        "data.max_length=100",
        f"{worker}.max_length_per_device=250",
        f"trainer.save_dir={save_dir}",
        "trainer.disable_wandb=true",
        "trainer.n_epochs=2",
        "trainer.max_steps=3",
        "trainer.save_freq=1",
        "trainer.keep_checkpoints=null",
        "trainer.test_freq=1",
    ]
    if trainer != "ppo":
        return [*words, "data.batch_size=4", *more]
    return [
        *words,
        "trainer.save_tokens=true",
        f"rollout.env_path={data / 'env.py'}",
        "rollout.train_sampling_params.max_new_tokens=6",
        "rollout.test_sampling_params.max_new_tokens=6",
        "rollout.train_sampling_params.top_p=0.9",
        "data.prompts_per_rollout=2",
        "data.responses_per_prompt=4",
        "actor.update_per_rollout=2",
        *more,
    ]


@pytest.fixture(scope="module")
def runs(data):
    """Runs of the four trainers, each in the folder with its name."""
    critic = ("adv.estimator=gae", "critic.dtype=float32", "kl.coef=0.01", "kl.type=reward")
    commands = [arguments(data, "ppo", data / "runs/ppo", *critic)]
    commands += [arguments(data, name, data / "runs" / name) for name in ("sft", "dpo", "rm")]
    launch_runs(1, commands)
    edit_json(data / "runs/ppo/run.json", lambda record: record.update(date="2001-02-03"))
    return data / "runs"


def forked(command, start):
    """Runs the program of a replay in processes that are forked after the imports."""
    assert start["threads"] == 1
    module = command.index("rl2.tools.rerun")
    done = launch(start["world_size"], *command[module - 1 :], check=False)
    print(done.stdout)
    if done.returncode:
        raise RuntimeError(done.stderr)


@pytest.fixture
def replayed(capsys, monkeypatch):
    """Calls the command. Returns (status, what it printed)."""

    def replay_here(folder, step, *more, run_processes=forked):
        monkeypatch.setattr(replay, "run_processes", run_processes)
        words = ["rl2 replay", str(folder), "--step", str(step), *map(str, more)]
        monkeypatch.setattr(sys, "argv", words)
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            replay.main()
        printed = capsys.readouterr()
        return ended.value.code, printed.out + printed.err

    return replay_here


@pytest.mark.parametrize("trainer", ["ppo", "sft", "dpo", "rm"])
def test_steps_of_every_trainer_are_the_same_again(runs, replayed, trainer):
    """The replays evaluate nothing, and RUN is only read."""
    folder = runs / trainer
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    for step in (1, 3) if trainer in ("ppo", "sft") else [3]:
        status, output = replayed(folder, step)
        assert status == 0 and "first difference" not in output, output
        kinds = "metrics, answers, tokens, weights" if trainer == "ppo" else "metrics, weights"
        assert f"same: step {step} (compared: {kinds})" in output
        assert "changed since the run" not in output
        assert "test " not in output and "model saved" not in output
        assert f"step {step}/3" in output and f"step {step + 1}/3" not in output
        assert (f"step_{step - 1}: {step - 1} of 3" in output) == (step > 1)
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_saved_tokens_give_the_same_steps_without_an_engine(copied, replayed, tmp_path):
    shutil.rmtree(copied / "checkpoints/step_2")
    words = ["--rollouts", "saved", "--out", tmp_path / "out"]
    status, output = replayed(copied, 3, *words)
    assert status == 0 and "same: steps 2 to 3 (" in output and "rollout engine" not in output
    assert [line["step"] for line in read_metrics(tmp_path / "out")] == [2, 3]
    assert not (tmp_path / "out/checkpoints").exists() and not (tmp_path / "out/model").exists()


@pytest.mark.nightly
def test_a_killed_run_of_two_processes_replays(data, replayed, tmp_path):
    """Its steps after the kill, and those before it, from the beginning of the run."""
    shorter = ("trainer.max_steps=2", "trainer.test_freq=null")
    words = arguments(data, "ppo", tmp_path / "run", *shorter)
    launch_runs(2, [["kill=3", *words], words])
    assert len(json.loads((tmp_path / "run/run.json").read_text())["starts"]) == 2
    shutil.rmtree(tmp_path / "run/checkpoints")
    status, output = replayed(tmp_path / "run", 2)
    assert status == 0 and "same: steps 1 to 2 (" in output, output


@pytest.fixture
def copied(runs, tmp_path):
    """A copy of the run of PPO, to change."""
    return shutil.copytree(runs / "ppo", tmp_path / "ppo")


@pytest.fixture(scope="module")
def again(runs, tmp_path_factory):
    """The folder of a replay of the steps 1 to 3 of `runs`/ppo."""
    folder = tmp_path_factory.mktemp("again") / "ppo"
    rerun = replace(replay.make_rerun(runs / "ppo", 1, "again", folder), last_step=3)
    start = replay.find_launch(runs / "ppo", 1)
    replay.prepare(runs / "ppo", folder)
    forked(replay.make_command(rerun, start), start)
    date = json.loads((folder / "run.json").read_text())["date"]
    assert date == "2001-02-03", "a chat template would show another day"
    return folder


@pytest.fixture
def steps_again(again):
    """It, in the place of the processes of a replay."""

    def run_processes(command, start):
        shutil.copytree(again, json.loads(command[-1])["out"], dirs_exist_ok=True)

    return run_processes


def flip_token(folder):
    path = folder / "rollouts/train/step_2.safetensors"
    columns = load_file(path)
    columns["tokens"][np.flatnonzero(columns["mask"])[3]] ^= 1
    save_file(columns, path)


def edit_logp(folder):
    path = folder / "rollouts/train/step_1.safetensors"
    columns = load_file(path)
    columns["logps"][-1] += 1e-5
    save_file(columns, path)


def edit_answer(**changes):
    def edit(folder):
        path = folder / "rollouts/train/step_3.jsonl"
        records = read_jsonl(path)
        records[5] |= changes
        write_jsonl(path, records)

    return edit


def drop_answer(folder):
    path = folder / "rollouts/train/step_1.jsonl"
    write_jsonl(path, read_jsonl(path)[:-1])


def edit_metrics(number, **changes):
    def edit(folder):
        lines = read_metrics(folder)
        lines[number] |= changes
        write_jsonl(folder / "metrics.jsonl", lines)

    return edit


ANSWER = "step 3, group 1, answer 1 of rollouts/train/step_3.jsonl\n  "
EDITS = {  # what is planted in a record -> (the edit, how the first difference begins)
    "token": (
        flip_token,
        r"step 2, group 0, answer 0 of .*\n  tokens\.\d+\.id: \d+ '.*' and \d+ '",
    ),
    "log-probability": (edit_logp, r"step 1, group 1, answer 3 of .*\n  tokens\.\d+\.logp: "),
    "row": (edit_answer(row={"answer": "x"}), f"{ANSWER}row.answer: x and abc"),
    "reward": (edit_answer(reward=7.5, advantage=9.0), f"{ANSWER}reward: 7.5 and "),
    "failure": (edit_answer(finish_reason="failed"), f"{ANSWER}finish_reason: failed and length"),
    "filtered": (edit_answer(is_filtered=True), f"{ANSWER}is_filtered: True and None"),
    "answer": (drop_answer, "step 1, .*jsonl\n  ids of answers: "),
    "metric": (
        edit_metrics(2, **{"actor/grad_norm": 0.5}),
        "step 2, metrics.jsonl\n  actor/grad_norm: 0.5 and ",
    ),
    "weights": (
        edit_metrics(-1, weights={"critic": "0" * 16}),
        "step 3, metrics.jsonl\n  weights.critic: 0000000000000000 and ",
    ),
    "time": (edit_metrics(1, **{"time/step": 77.0, "another": 1.0}), "$"),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_planted_difference_is_named(copied, again, name):
    edit, expected = EDITS[name]
    edit(copied)
    found = replay.find_difference(copied, again, [1, 2, 3])
    assert re.match(expected, found), found


def test_a_flipped_token_is_named_with_the_answers_sampled_again_and_with_saved_ones(
    copied, replayed, steps_again
):
    flip_token(copied)
    status, output = replayed(copied, 2, run_processes=steps_again)
    assert status == 1 and "first difference: step 2, group 0, answer 0" in output
    status, output = replayed(copied, 2, "--rollouts", "saved")
    assert status == 1 and "\n  trainer_logps." in output, output


def test_changed_versions_processors_and_code_are_named(copied, replayed, steps_again):
    def change(record):
        record["starts"][0] |= {"cpu": "Z80", "code": "0" * 16}
        record["starts"][0]["versions"]["torch"] = "0.1"

    edit_json(copied / "run.json", change)
    status, output = replayed(copied, 1, run_processes=steps_again)
    assert status == 0 and "changed since the run:\n" in output
    for name in ("cpu: Z80 -> ", "code: 0000", "versions.torch: 0.1 -> "):
        assert f"  {name}" in output


def test_an_edited_environment_is_named(copied, data, replayed):
    path = data / "env.py"
    text = path.read_text()
    path.write_text(text.replace("return sum", "return 1 - sum"))
    status, output = replayed(copied, 2)
    path.write_text(text)
    assert status == 1 and "first difference: step 2, group 0, answer 0" in output
    assert "  contents.rollout.env_path: " in output


def test_other_rows_are_refused_and_named(data, runs, replayed):
    path = data / "sft.jsonl"
    text = path.read_text()
    path.write_text(text.replace("aa", "ab", 1))
    status, output = replayed(runs / "sft", 2)
    path.write_text(text)
    assert status == 2
    assert f"data.path={path} has another content than when {runs / 'sft'}" in output


def test_what_cannot_be_replayed_is_said_at_once(copied, runs, replayed, tmp_path):
    status, output = replayed(tmp_path / "nothing", 1)
    assert status == 2 and "nothing is not the folder of a run" in output
    status, output = replayed(copied, 7)
    assert status == 2 and "--step 7: " in output and "has recorded steps 1 to 3" in output
    status, output = replayed(runs / "sft", 1, "--rollouts", "saved")
    assert status == 2 and "has not the tokens of step 1" in output
    status, output = replayed(copied, 1, "--out", copied)
    assert status == 2 and "is not empty: give a new folder" in output
    (copied / "checkpoints/step_1").rename(tmp_path / "step_1")
    write_jsonl(copied / "metrics.jsonl", read_metrics(copied)[2:])
    status, output = replayed(copied, 2)
    assert status == 2 and "from a checkpoint of another run" in output
    edit_json(copied / "run.json", lambda record: record["starts"][0].update(hosts=["a", "b"]))
    status, output = replayed(copied, 3)
    assert status == 2 and "2 machines" in output
    (copied / "run.json").unlink()
    status, output = replayed(copied, 1)
    assert status == 2 and "is not the folder of a run" in output


def test_a_run_on_gpus_is_compared_with_a_tolerance_and_without_hashes(
    copied, replayed, steps_again
):
    edit_json(copied / "run.json", lambda record: record["starts"][0].update(gpu="a GPU"))
    lines = read_metrics(copied)
    lines[-1]["weights"]["actor"] = "0" * 16
    lines[-1]["actor/grad_norm"] *= 1 + replay.GPU_TOLERANCE / 2
    write_jsonl(copied / "metrics.jsonl", lines)
    status, output = replayed(copied, 3, run_processes=steps_again)
    assert status == 0 and "(compared: metrics, answers, tokens)" in output, output
    lines[-1]["actor/grad_norm"] *= 1 + replay.GPU_TOLERANCE
    write_jsonl(copied / "metrics.jsonl", lines)
    status, output = replayed(copied, 3, run_processes=steps_again)
    assert status == 1 and "step 3, metrics.jsonl" in output


@pytest.mark.nightly
def test_the_command_starts_in_the_folder_of_the_run(data, tmp_path, monkeypatch):
    """Its paths may be relative to the folder in which the run was started."""
    monkeypatch.chdir(data)
    words = arguments(data, "sft", "runs/relative", "data.path=sft.jsonl", "trainer.max_steps=2")
    launch(1, "-m", "rl2.trainer.sft", *words[1:])
    done = run("-m", "rl2", "replay", data / "runs/relative", "--step", "2", cwd=tmp_path)
    assert "same: step 2 (compared: metrics, weights)" in done.stdout
