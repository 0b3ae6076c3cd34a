"""`python -m rl2 replay`: a recorded step is run again, and each planted change is named."""

import json
import re
import shutil

import pytest
from common import (
    LETTER_ENV,
    keep_process,
    launch_runs,
    make_model,
    read_jsonl,
    read_metrics,
    run_main,
    write_jsonl,
)

from rl2.tools import replay


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with a model, an environment and rows for all trainers."""
    folder = tmp_path_factory.mktemp("replay")
    make_model(folder / "tiny")
    (folder / "env.py").write_text(LETTER_ENV)
    rows = []
    for i in range(10):
        messages = [{"role": "user", "content": f"say {i}"}]
        replies = {"completion": "aa", "chosen": "a" * (1 + i % 3), "rejected": "z"}
        rows.append({"messages": messages, "answer": "abc", **replies})
    write_jsonl(folder / "rows.jsonl", rows)
    return folder


def arguments(data, trainer):
    """A run of three steps with an evaluation after each, and checkpoints of all."""
    worker = "critic" if trainer == "rm" else "actor"
    words = [
        trainer,
        "data.path=rows.jsonl",
        "data.test_path=rows.jsonl",
        f"{worker}.model_name={data / 'tiny'}",
        f"{worker}.dtype=float32",
        f"{worker}.lr=0.01",
        f"{worker}.scheduler=linear",
        "data.max_length=100",
        f"{worker}.max_length_per_device=250",
        f"trainer.save_dir={data / 'runs' / trainer}",
        "trainer.n_epochs=2",
        "trainer.max_steps=3",
        "trainer.save_freq=1",
        "trainer.keep_checkpoints=null",
        "trainer.test_freq=1",
    ]
    if trainer != "ppo":
        return [*words, "data.batch_size=4"]
    return [
        *words,
        "trainer.save_tokens=true",
        "rollout.env_path=env.py",
        "rollout.train_sampling_params.max_new_tokens=6",
        "rollout.test_sampling_params.max_new_tokens=6",
        "rollout.train_sampling_params.top_p=0.9",
        "data.prompts_per_rollout=2",
        "data.responses_per_prompt=4",
        "actor.update_per_rollout=2",
        "adv.estimator=gae",
        "critic.dtype=float32",
        "kl.coef=0.01",
        "kl.type=reward",
    ]


@pytest.fixture(scope="module")
def runs(data):
    """Runs of the four trainers, each in the folder with its name. They begin in another folder
    than the replays.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(data)
        launch_runs(1, [arguments(data, trainer) for trainer in ("ppo", "sft", "dpo", "rm")])
    return data / "runs"


@pytest.fixture
def replayed(capsys):
    """Calls the command in this process. Returns (status, what it printed)."""

    def replay_here(run, step, *more):
        capsys.readouterr()
        with keep_process():
            status = run_main(replay.main, run, "--step", step, *more)
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return replay_here


@pytest.mark.parametrize("trainer", ["ppo", "sft", "dpo", "rm"])
def test_steps_of_every_trainer_are_the_same_again(runs, replayed, trainer):
    """The replays evaluate nothing, and RUN is only read."""
    folder = runs / trainer
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    for step in (1, 3) if trainer == "ppo" else [3]:
        status, output = replayed(folder, step)
        assert status == 0 and "first difference" not in output, output
        assert f"same: steps {step} to {step}\n" in output
        assert "changed since the run" not in output
        assert "test " not in output and "model saved" not in output
        assert f"step {step}/3" in output and f"step {step + 1}/3" not in output
        assert (f"step_{step - 1}: {step - 1} of 3" in output) == (step > 1)
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


@pytest.fixture
def copied(runs, tmp_path):
    """A copy of the run of PPO, to change."""
    return shutil.copytree(runs / "ppo", tmp_path / "ppo")


STEP_3 = "rollouts/train/step_3.jsonl"
ANSWER = f"step 3, answer 5 of {STEP_3}\n  "
EDITS = [  # file, line, what is planted there (None: it is gone), how the first difference begins
    (
        STEP_3,
        5,
        {"messages": [{"role": "user", "content": 50 * "b"}]},
        f"{ANSWER}messages.0.content: b+ and say",
    ),
    (STEP_3, 5, {"reward": 7.5, "advantage": 9.0}, f"{ANSWER}reward: 7.5 and "),
    (
        "rollouts/train/step_1.jsonl",
        -1,
        None,
        r"step 1, .*jsonl\n  ids of answers\.7: nothing and 7",
    ),
    (
        "metrics.jsonl",
        -1,
        {"weights": {"critic": "0" * 16}},
        "step 3, metrics.jsonl\n  weights.critic: 0000000000000000 and ",
    ),
    ("metrics.jsonl", 1, {"time/step": 77.0, "another": 1.0}, "$"),
]


def test_planted_differences_are_named(runs, copied):
    for name, number, planted, expected in EDITS:
        path = copied / name
        whole = read_jsonl(path)
        lines = read_jsonl(path)
        if planted is None:
            del lines[number]
        else:
            lines[number] |= planted
        write_jsonl(path, lines)
        found = replay.find_difference(copied, runs / "ppo", [1, 2, 3])
        assert re.match(expected, found), found
        write_jsonl(path, whole)


def test_what_has_changed_since_the_run_is_named(copied, data, replayed, tmp_path):
    record = json.loads((copied / "run.json").read_text())
    record["date"] = "2001-02-03"
    record["starts"][0] |= {"cpu": "Z80", "code": "0" * 16}
    record["starts"][0]["versions"]["torch"] = "0.1"
    record["starts"].append({"step": 2, "world_size": 2})  # which has not done step 2
    (copied / "run.json").write_text(json.dumps(record))
    path = data / "env.py"
    text = path.read_text()
    path.write_text(text.replace("return sum", "return 1 - sum"))
    shutil.rmtree(copied / "checkpoints")
    status, output = replayed(copied, 2, "--out", tmp_path / "out")
    path.write_text(text)
    assert status == 1 and "first difference: step 1, answer " in output
    assert "changed since the run:\n" in output
    for name in ("cpu: Z80 -> ", "code: 0000", "versions.torch: 0.1 -> ", "contents.rollout.env_"):
        assert f"  {name}" in output
    date = json.loads((tmp_path / "out/run.json").read_text())["date"]
    assert date == "2001-02-03", "a chat template would show another day"


def test_other_rows_are_refused_after_a_checkpoint_and_named(data, runs, replayed):
    path = data / "rows.jsonl"
    text = path.read_text()
    path.write_text(text.replace("aa", "ab"))
    (status, output), (other_status, other_output) = (replayed(runs / "sft", n) for n in (2, 1))
    path.write_text(text)
    assert status == 2 and "data.path: rows.jsonl has another content" in output
    assert other_status == 1 and "  contents.data.path: " in other_output


def test_what_cannot_be_replayed_is_said_at_once(copied, runs, replayed, tmp_path):
    status, output = replayed(tmp_path / "nothing", 1)
    assert status == 2 and "nothing is not the folder of a run" in output
    status, output = replayed(copied, 7)
    assert status == 2 and "--step 7: " in output and "has recorded steps 1 to 3" in output
    status, output = replayed(copied, 1, "--out", copied)
    assert status == 2 and "is not empty: give a new folder" in output
    record = json.loads((copied / "run.json").read_text())
    starts = [*record["starts"], record["starts"][0] | {"step": 2, "world_size": 2}]
    (copied / "run.json").write_text(json.dumps(record | {"starts": starts}))
    status, output = replayed(copied, 3)
    assert status == 2 and "ran as 2 processes: start `torchrun " in output
    (copied / "checkpoints/step_1").rename(tmp_path / "step_1")
    write_jsonl(copied / "metrics.jsonl", read_metrics(copied)[2:])
    status, output = replayed(copied, 2)
    assert status == 2 and "from a checkpoint of another run" in output
