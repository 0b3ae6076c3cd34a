"""Tests of the run folder: what a run resumes from, branches, and what is written."""

import datetime
import json
import os
import re
import shutil
import socket
import subprocess
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from common import (
    ROOT,
    before_each_call,
    keep_process,
    launch,
    read_metrics,
    read_untimed_metrics,
    run_main,
    write_jsonl,
)
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

from rl2 import worker
from rl2.config.parse import parse
from rl2.config.schema import PPOConfig, SFTConfig
from rl2.data.chat import ChatTemplate
from rl2.recorder import Recorder
from rl2.report import health
from rl2.report.loggers import MetricsLog
from rl2.rollout.evaluate import Evaluator
from rl2.run import folder as folder_module
from rl2.run.checkpoints import Checkpoints, delete
from rl2.run.folder import RunFolder
from rl2.run.lock import RunLock
from rl2.run.signals import StopSignal
from rl2.run.start import find_changes, identify
from rl2.tools.ls import summarise
from rl2.trainer import ppo, sft

NUM_ROWS = 12


def set_up(folder, model):
    """Writes rows into the folder. Returns the arguments of a small SFT run there, of six steps,
    that saves every second one.
    """
    rows = []
    for i in range(NUM_ROWS):
        messages = [{"role": "user", "content": f"say {i}"}, {"role": "assistant", "content": "a"}]
        rows.append({"messages": messages})
    write_jsonl(folder / "rows.jsonl", rows)
    return [
        f"actor.model_name={model}",
        "data.path=rows.jsonl",
        "data.batch_size=2",
        "data.max_length=64",
        "actor.lr=0.01",
        "actor.dtype=float32",
        "actor.gradient_checkpointing=false",
        "trainer.save_freq=2",
        "trainer.keep_checkpoints=null",
    ]


@pytest.fixture
def setup(tmp_path, model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return set_up(tmp_path, model)


@pytest.fixture
def train(setup, capsys):
    """Runs a trainer in this process, which must end with this status. Returns what it prints."""

    def train_here(*arguments, main=sft.main, status=0):
        capsys.readouterr()
        with keep_process():
            ended_with = run_main(main, *setup, *arguments)
        printed = capsys.readouterr()
        output = printed.out + printed.err
        assert ended_with == status, output
        return output

    return train_here


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory, model):
    """The folder of a run of four steps."""
    folder = tmp_path_factory.mktemp("trained")
    with keep_process():
        os.chdir(folder)
        assert run_main(sft.main, *set_up(folder, model), "trainer.max_steps=4") == 0
    return folder / "runs/default"


@pytest.fixture
def run(setup, trained_run, tmp_path):
    """A run of four steps of `setup`, with checkpoints of steps 2 and 4."""
    ignored = shutil.ignore_patterns("lock")
    return shutil.copytree(trained_run, tmp_path / "runs/default", ignore=ignored)


@pytest.fixture
def become_ppo(setup, tmp_path):
    """Makes the arguments of `setup` those of a PPO run with an environment."""
    write_jsonl(
        tmp_path / "rows.jsonl", [{"messages": f"say {i}", "answer": "a"} for i in range(8)]
    )
    env = "def reward_fn(messages, answer): return len(set(messages[-1]['content'])) / 9"
    (tmp_path / "env.py").write_text(env)
    setup[:] = [argument for argument in setup if "batch_size" not in argument]
    setup += [
        "rollout.env_path=env.py",
        "data.prompts_per_rollout=2",
        "data.responses_per_prompt=2",
        "rollout.train_sampling_params.max_new_tokens=4",
        "rollout.test_sampling_params.max_new_tokens=4",
    ]


def steps(folder):
    return [line["step"] for line in read_metrics(folder)]


def contents(folder):
    """The bytes of every file below the folder, without the lock and the branches."""
    files = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        if path.is_file() and name.parts[0] not in ("lock", "branches"):
            files[str(name)] = path.read_bytes()
    return files


@pytest.mark.parametrize("main", [ppo.main, sft.main])
def test_a_run_keeps_its_template_system_prompt_and_date(
    request, train, tmp_path, monkeypatch, main
):
    """Resumed after midnight, it trains the tokens that it would have trained before."""
    texts = []

    def record(template, text):
        texts.extend(text if isinstance(text, list) else [text])

    before_each_call(monkeypatch, ChatTemplate, "tokenize", record)
    source = (
        "{{ strftime_now('%d %b %Y') }} {{ mood }} "
        "{% for m in messages %}{{ m.role[0] + ':' + m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    (tmp_path / "template.jinja").write_text(source)
    (tmp_path / "prompt.md").write_text("be kind\n")
    if main is ppo.main:
        request.getfixturevalue("become_ppo")
    row = {"messages": [{"role": "user", "content": "say"}], "completion": "a", "answer": "a"}
    write_jsonl(tmp_path / "rows.jsonl", [row] * NUM_ROWS)
    keys = ["data.chat_template=template.jinja", "data.chat_template_kwargs.mood=glad"]
    for day in (5, 6):
        today = SimpleNamespace(today=partial(datetime.date, 2026, 3, day))
        monkeypatch.setattr("rl2.run.start.date", today)
        texts.clear()
        num_steps = f"trainer.max_steps={day - 4}"
        train(*keys, "data.system_prompt=prompt.md", num_steps, main=main)
        start = "05 Mar 2026 glad s:be kind<|im_end|>u:say"
        assert texts and all(text.startswith(start) for text in texts)
    assert (tmp_path / "runs/default/model/chat_template.jinja").read_text() == source


# A run and the next one in its folder.


def listed(run):
    """What `rl2 ls` says of a run: its state, the steps that are done, and all of them."""
    (run / "lock/owner.json").write_text("{}")  # as at the end of its process, which is the test's
    summary = summarise(run)
    return summary.state, summary.step, summary.num_steps


def test_a_finished_run_started_again_says_how_to_go_on(train, tmp_path):
    output = train()
    run = tmp_path / "runs/default"
    assert steps(run) == [1, 2, 3, 4, 5, 6] and "changed:" not in output
    assert listed(run) == ("finished", 6, 6)
    before = contents(run)
    output = train()
    assert "all steps are done" in output and "loading" not in output
    assert contents(run) == before

    # Another setting, as in a sweep that forgot the name of the run, would have no effect.
    output = train("actor.lr=0.02", status=1)
    assert "actor.lr: 0.01 -> 0.02" in output and "no effect" in output
    assert contents(run) == before
    train("trainer.n_epochs=1")

    # A kill between the last checkpoint and the export: the next start makes up for it.
    expected = contents(run / "model")
    (run / "model").rename(run / "model.partial")
    assert "model saved to runs/default/model" in train()
    assert not (run / "model.partial").exists() and steps(run) == [1, 2, 3, 4, 5, 6]
    assert contents(run / "model") == expected

    # More epochs resume from the last checkpoint. Off starts over and keeps the old run.
    output = train("trainer.n_epochs=2", "trainer.max_steps=7")
    assert "6 of 7 steps are done" in output and "changed: 6 -> 7 steps" in output
    assert "trainer.n_epochs: 1 -> 2" in output
    (run / "wandb_id").write_text("")
    output = train("trainer.resume=off", "trainer.max_steps=1")
    assert "the earlier run is now in runs/default/branches/1" in output
    assert steps(run) == [1] and steps(run / "branches/1") == [1, 2, 3, 4, 5, 6, 7]
    assert (run / "branches/1/wandb_id").exists() and not (run / "wandb_id").exists()
    assert Checkpoints(run / "checkpoints").steps() == [1], "the last step was not saved"


def test_another_experiment_is_refused_and_touches_nothing(train, run, tmp_path):
    before = contents(run)
    output = train("actor.lora_rank=2", "data.shuffle=false", "actor.lr=0.5", status=1)
    assert "is of another experiment" in output
    assert "actor.lora_rank: 0 -> 2" in output and "data.shuffle: True -> False" in output
    assert "actor.lr: 0.01" not in output, "a change that would be allowed"
    output = train("actor.lora_rank=2", "trainer.resume=force", status=1)
    assert "is it of another model" in output and "Traceback" not in output
    assert contents(run) == before

    # The same rows elsewhere are the same experiment; a row more makes another one.
    rows = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "moved.jsonl").write_text(rows)
    moved = f"data.path={tmp_path}/moved.jsonl"
    output = train(moved, "trainer.max_steps=5", "actor.lr=0.5")
    assert "4 of 5 steps are done" in output
    assert "actor.lr: 0.01 -> 0.5" in output and "moved.jsonl" in output
    (tmp_path / "moved.jsonl").write_text(rows + rows.splitlines()[0] + "\n")
    assert "moved.jsonl has another content" in train(moved, "trainer.max_steps=6", status=1)
    output = train(moved, "trainer.max_steps=6", "trainer.resume=force")
    assert "5 of 6 steps are done" in output and steps(run) == [1, 2, 3, 4, 5, 6]
    record = json.loads((run / "checkpoints/step_6/run.json").read_text())
    assert record["rows"] == 2, "other rows begin with their first one"


def test_a_run_without_checkpoints_is_compared_too_and_starts_over(train, tmp_path):
    no_checkpoints = ["trainer.save_freq=null", "trainer.max_steps=1"]
    output = train(*no_checkpoints)
    assert "no checkpoints: trainer.save_freq is not set" in output
    assert "no checkpoint to resume from" not in output
    run = tmp_path / "runs/default"
    before = contents(run)
    output = train(*no_checkpoints, "data.seed=3", status=1)
    assert "data.seed: 0 -> 3" in output and contents(run) == before
    output = train(*no_checkpoints)
    assert "the earlier run is now in runs/default/branches/1" in output
    assert "has no checkpoint to resume from: the run starts over at step 0" in output
    assert load_file(run / "branches/1/model/model.safetensors") and steps(run) == [1]
    output = train("trainer.max_steps=1", "trainer.resume=off")
    assert "no checkpoint" not in output


def test_no_row_is_skipped_or_repeated_with_another_batch_size(train, tmp_path, monkeypatch):
    taken = []

    def record_rows(run, examples):
        taken.extend(example.index for example in examples)

    before_each_call(monkeypatch, sft, "make_batch", record_rows)
    train("trainer.max_steps=4")
    assert "data.batch_size: 2 -> 4" in train("data.batch_size=4", "trainer.n_epochs=2")
    assert sorted(taken[:NUM_ROWS]) == sorted(taken[NUM_ROWS:]) == list(range(NUM_ROWS))
    assert steps(tmp_path / "runs/default")[-1] == 4 + (2 * NUM_ROWS - 8) // 4


# Branches.


def test_an_older_checkpoint_begins_a_branch_in_which_the_same_command_goes_on(
    train, run, tmp_path, monkeypatch
):
    """Although the folder of the run is a mount point, which cannot be renamed."""

    def refuse_the_folder(source, target):
        if Path(source).resolve() == run:
            raise OSError(16, "Device or resource busy", str(source))

    before_each_call(monkeypatch, os, "rename", refuse_the_folder)
    old_step_4 = contents(run / "checkpoints/step_4")
    keys = [f"trainer.resume={run}/checkpoints/step_2", "actor.lr=0.1", "trainer.save_freq=1"]
    output = train(*keys, "trainer.max_steps=4")
    assert "what came after step 2 is now in runs/default/branches/1" in output
    assert steps(run) == [1, 2, 3, 4] and steps(run / "branches/1") == [3, 4]
    assert contents(run / "branches/1/checkpoints/step_4") == old_step_4
    assert (run / "branches/1/model/config.json").exists()
    assert "lr: 0.01" in (run / "branches/1/config.yaml").read_text()
    assert Checkpoints(run / "checkpoints").steps() == [2, 3, 4]

    whole = read_untimed_metrics(run)
    shutil.rmtree(run / "checkpoints/step_4")  # as if the run had been killed before
    output = train(*keys, "trainer.max_steps=4")
    assert "resumes from runs/default/checkpoints/step_3 and not from" in output
    assert "changed since" not in output and "3 of 4 steps are done" in output
    assert f"trainer.resume=force:{run}" in output and read_untimed_metrics(run) == whole
    output = train(*keys, "trainer.max_steps=3")  # another command begins there again
    assert "2 of 3 steps are done" in output

    # Into a folder of its own, and with another order of the rows only if that is forced.
    named = f"{run}/checkpoints/step_3"
    other = [f"trainer.save_dir={tmp_path}/other", "data.shuffle=false", "trainer.max_steps=4"]
    output = train(*other, f"trainer.resume={named}", status=1)
    assert f"trainer.resume=force:{named} resumes" in output
    train(*other, f"trainer.resume=force:{named}")
    assert steps(tmp_path / "other") == [4] and steps(run)[-1] == 3


def test_folders_that_a_user_names_are_no_checkpoints(tmp_path):
    for name in ("step_2", "step_20_backup", "step_best", "step_4.partial"):
        (tmp_path / name).mkdir()
    assert Checkpoints(tmp_path).steps() == [2]


def test_a_restart_by_torchrun_does_not_begin_again(train, run, monkeypatch):
    """trainer.resume=off would do so with every restart."""
    before = contents(run)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert "trainer.resume=off: torchrun has restarted" in train("trainer.resume=off", status=1)
    assert contents(run) == before
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    train("trainer.max_steps=5")
    starts = json.loads((run / "run.json").read_text())["starts"]
    assert [start["step"] for start in starts] == [0, 4]
    assert starts[-1]["command"][-1] == "trainer.max_steps=5"
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    head = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    assert (starts[-1]["commit"] or "").startswith(head)


def test_which_changes_make_another_experiment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rl2.user_files.PACKAGE", tmp_path)
    Path("ready_envs").mkdir()
    files = {
        "prompt.md": "data.system_prompt",
        "loss.py": "actor.loss",
        "env.py": "rollout.env_path",
        "ready_envs/quiz.py": "rollout.env_path",
    }
    for name in files:
        Path(name).write_text("before")
    config = PPOConfig()
    config.data.system_prompt, config.actor.loss = "prompt.md", "loss.py:own"
    config.rollout.env_path = {"a": "env.py", "b": "quiz"}
    before = identify(config, "")
    assert find_changes(before, identify(config, "")) == ({}, {})
    experiment, _ = find_changes(before, identify(SFTConfig(), ""))
    assert list(experiment.values()) == ["the trainer: PPOConfig -> SFTConfig"]
    for name, key in files.items():
        Path(name).write_text("after")
        experiment, others = find_changes(before, identify(config, ""))
        assert experiment == {} and "another content" in others.pop(key) and not others
        Path(name).write_text("before")
    config.actor.lr, config.actor.loss, config.adv.estimator = 1.0, "gspo", "gae"
    config.rollout.env_path, config.kl.type = "quiz", "loss"
    config.data.system_prompt, config.data.chat_template = "be brief", "plain"
    before.config["actor.adapter"] = "folder"  # that an earlier version trained further
    experiment, others = find_changes(before, identify(config, ""))
    made = {"actor.adapter", "actor.loss", "adv.estimator", "kl.type", "rollout.env_path"}
    made |= {"data.system_prompt", "data.chat_template"}
    assert experiment.keys() == made and others.keys() == {"actor.lr"}
    config.data.system_prompt = ""
    experiment, _ = find_changes(before, identify(config, ""))
    assert experiment["data.system_prompt"].endswith(" -> ''")


@pytest.mark.parametrize("text", ["a" * 300, "~~ be short", "no file: or so", "a\0b"])
def test_a_text_that_is_no_path_names_no_file(text):
    config = SFTConfig()
    config.data.system_prompt = text
    assert identify(config, "").contents == {}


def test_a_falling_rate_ends_with_the_run_after_updates_per_rollout_are_lowered(
    become_ppo, train, tmp_path
):
    keys = ["actor.scheduler=linear", "trainer.max_steps=4"]
    more = [*keys, "actor.update_per_rollout=3", "data.responses_per_prompt=3"]
    train(*more, "trainer.experiment_name=whole", main=ppo.main)
    run, whole = tmp_path / "runs/default", tmp_path / "runs/whole"
    keys.append(f"trainer.resume={whole}/checkpoints/step_2")
    train(*keys, "data.responses_per_prompt=3", main=ppo.main)
    # 6 of 8 updates are done after step 2, in place of 6 of 12.
    rates = [line["actor/lr"] for line in read_metrics(run)]
    assert rates == pytest.approx([0.01 * (1 - done / 8) for done in (6, 7)])


def test_ppo_that_diverges_names_its_last_good_checkpoint(become_ppo, train, tmp_path, monkeypatch):
    """Its logits are not finite. The same command fails again, and says the same."""
    keys = ["trainer.max_steps=5", "trainer.n_epochs=9", "trainer.save_freq=1"]
    keys += ["trainer.keep_checkpoints=1"]
    monkeypatch.setattr(health, "SKIPPED_UPDATES", 2)
    with monkeypatch.context() as patch:
        patch.setattr(worker, "schedule", lambda done, *rest: 1e20 if done == 2 else 1.0)
        outputs = [train(*keys, main=ppo.main, status=1)]
    outputs.append(train(*keys, main=ppo.main, status=1))
    good = "runs/default/checkpoints/step_2"
    for output in outputs:
        assert "Traceback" not in output
        assert "lower actor.lr=0.01" in output and f"trainer.resume={good}" in output
    train(*keys, f"trainer.resume={good}", main=ppo.main)
    assert steps(tmp_path / "runs/default") == [1, 2, 3, 4, 5]


def test_weights_that_are_no_numbers_are_not_saved(train, tmp_path, monkeypatch):
    """Not even for a signal."""
    with monkeypatch.context() as patch:
        patch.setattr(worker, "schedule", lambda done, *rest: 1e42 if done == 2 else 1.0)
        stop_in(patch, 3)
        assert "step 3 gets no checkpoint" in train("trainer.save_freq=1")
    assert Checkpoints(tmp_path / "runs/default/checkpoints").steps() == [1, 2]


# A stop leaves the evaluation of its step to the next launch.


def stop_in(monkeypatch, step, method="finish_step"):
    """Lets a signal arrive in this step, before the recorder's method."""

    def stop(recorder, number, *_):
        if number == step:
            recorder.stop_signal.requested_at = 0.0

    before_each_call(monkeypatch, Recorder, method, stop)


def record_calls(monkeypatch):
    """A list of the names of what a step calls, in order."""
    calls = []
    for owner, name in (
        (StopSignal, "is_requested_anywhere"),
        (RunFolder, "write_records"),
        (MetricsLog, "write"),
        (Evaluator, "evaluate"),
    ):
        before_each_call(monkeypatch, owner, name, lambda *_, name=name: calls.append(name))
    return calls


def test_a_stopped_run_evaluates_when_it_is_started_again(become_ppo, train, tmp_path, monkeypatch):
    """It ends with the files of a run that is not stopped. The last stop is in its last step."""
    keys = ["data.test_path=rows.jsonl", "trainer.test_freq=1", "trainer.max_steps=2"]
    keys += ["actor.freeze_steps=1"]  # the first checkpoint has an actor without updates
    with monkeypatch.context() as patch:
        calls = record_calls(patch)
        train(*keys, "trainer.experiment_name=whole", main=ppo.main)
    # All ranks ask whether to stop before the first one writes, and again after an evaluation.
    evaluation = ["evaluate", "write_records"]
    ask = "is_requested_anywhere"
    step = [ask, *evaluation, ask, "write_records", "write"]
    assert calls == [*evaluation, "write", *step, *step]
    run, whole = tmp_path / "runs/default", tmp_path / "runs/whole"
    for step in (1, 2):
        with monkeypatch.context() as patch:
            stop_in(patch, step)
            assert f"the evaluation of step {step} is left out" in train(*keys, main=ppo.main)
        assert [line["step"] for line in read_metrics(run) if "test/" not in str(line)] == [step]
        assert listed(run) == ("stopped", step, 2)
    assert "2 of 2 steps are done" in train(*keys, main=ppo.main)
    assert read_untimed_metrics(run) == read_untimed_metrics(whole)
    for pattern in ("rollouts/*/*.jsonl", "model/*.safetensors"):
        for path in whole.glob(pattern):
            assert (run / path.relative_to(whole)).read_bytes() == path.read_bytes(), path
    assert "all steps are done" in train(*keys, main=ppo.main)


def test_a_signal_in_an_evaluation_trains_no_further_step(train, tmp_path, monkeypatch):
    stop_in(monkeypatch, 2, "_evaluate")
    train("data.test_path=rows.jsonl", "trainer.test_freq=2", "trainer.save_freq=null")
    assert steps(tmp_path / "runs/default") == [0, 1, 2]
    assert Checkpoints(tmp_path / "runs/default/checkpoints").steps() == [2]


# What a kill or a disk leaves.


DAMAGES = [  # a file and its damaged content
    ("run.json", '{"starts": ['),
    ("run.json", "[]"),
    ("metrics.jsonl", '{"step": 1}\n{"st\n{"step": 2}\n'),
    ("metrics.jsonl", '{"step": 1}\n7\n'),
    ("checkpoints/step_4/config.yaml", "a: ["),
    ("checkpoints/step_4/run.json", '"'),
    ("config.yaml", "a: ["),  # read where there is no checkpoint
]


def test_a_small_file_that_is_damaged_is_named(train, run):
    """Before a model loads. `trainer.resume=off` needs none of these files."""
    shutil.rmtree(run / "checkpoints/step_2")  # or it would be offered
    for name, damaged in DAMAGES:
        if name == "config.yaml":
            shutil.rmtree(run / "checkpoints")
        whole = (run / name).read_text()
        (run / name).write_text(damaged)
        output = train("trainer.max_steps=4", status=1)
        (run / name).write_text(whole)
        assert "is damaged" in output and Path(name).name in output
        assert "Traceback" not in output and "loading" not in output
        assert "restore" in output or "trainer.resume=off" in output
    for name in ("run.json", "metrics.jsonl", "config.yaml"):
        (run / name).write_text(f"{name} [")
    train("trainer.max_steps=1", "trainer.resume=off")
    assert steps(run) == [1]
    for name in ("run.json", "metrics.jsonl", "config.yaml"):
        assert (run / "branches/1" / name).read_text() == f"{name} ["


def test_leftovers_of_kills_are_swept(train, run, monkeypatch):
    checkpoints = Checkpoints(run / "checkpoints")
    expected = contents(checkpoints.path(4))
    shutil.copytree(checkpoints.path(2), checkpoints.folder / "step_9.partial")
    shutil.copytree(checkpoints.path(2), checkpoints.folder / "step_1.deleting")

    def stop(folder):
        next(folder.iterdir()).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", stop)
        with pytest.raises(KeyboardInterrupt):
            delete(checkpoints.path(2))
    assert checkpoints.steps() == [4], "half a checkpoint has the name of a whole one"
    output = train("trainer.max_steps=4")
    assert "all steps are done" in output and contents(checkpoints.path(4)) == expected
    assert [path.name for path in checkpoints.folder.iterdir()] == ["step_4"]


def flip_a_bit(folder, entry):
    """Returns the file of `folder` that has the entry of the checkpoint, with one bit changed."""
    places = FileSystemReader(folder).read_metadata().storage_data
    [place] = [place for key, place in places.items() if re.fullmatch(entry, key.fqn)]
    damaged = bytearray((folder / place.relative_path).read_bytes())
    damaged[place.offset + place.length // 2] ^= 1
    return place.relative_path, damaged


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_offered(train, run):
    newest = run / "checkpoints/step_4"
    damages = [
        ("__0_0.distcp", (newest / "__0_0.distcp").read_bytes()[:9999]),
        (".metadata", b""),
        ("random_0.pt", None),
        ("run.json", None),
        flip_a_bit(newest, r"actor\.model\..*embed_tokens.*"),
        flip_a_bit(newest, r"actor\.optimizer\..*embed_tokens.*exp_avg_sq"),
    ]
    for name, damaged in damages:
        whole = (newest / name).read_bytes()
        (newest / name).unlink()
        if damaged is not None:
            (newest / name).write_bytes(damaged)
        output = train(status=1)
        assert "Traceback" not in output, name
        assert "the checkpoint runs/default/checkpoints/step_4 is damaged" in output, name
        assert "trainer.resume=runs/default/checkpoints/step_2 resumes" in output
        (newest / name).write_bytes(whole)
    train()
    assert steps(run) == [1, 2, 3, 4, 5, 6]


def test_a_folder_that_cannot_be_written_is_found_before_the_model_loads(
    train, tmp_path, monkeypatch
):
    (tmp_path / "file").write_text("mine")

    def fail(self):
        raise OSError(28, "No space left on device", str(self.path))

    for folder, reason in (
        (tmp_path / "file", "it is a file"),
        ("/proc/rl2", "No such file or directory"),
        ("runs/full", "No space left"),
    ):
        if folder == "runs/full":
            monkeypatch.setattr(RunLock, "acquire", fail)
        output = train(f"trainer.save_dir={folder}", status=1)
        assert f"trainer.save_dir={folder} cannot be written: " in output
        assert reason in output and "loading" not in output
    assert (tmp_path / "file").read_text() == "mine"


def test_a_failed_start_leaves_no_folder_but_what_was_there(setup, model, run, tmp_path):
    """Neither rows nor weights are there. Both fail after the checks of the config."""
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "broken").mkdir()
    shutil.copy(f"{model}/config.json", tmp_path / "broken")
    before = contents(run)
    for world, *keys in (
        (1, "data.path=empty.jsonl", "trainer.save_dir=new"),
        (2, "actor.model_name=broken", "trainer.resume=off"),
    ):
        done = launch(world, "-m", "rl2.trainer.sft", *setup, *keys, check=False)
        assert done.returncode == 1 and "problem" not in done.stderr, done.stderr
    assert not (tmp_path / "new").exists()
    assert contents(run) == before and not (run / "branches").exists()


def test_ranks_that_differ_are_named(setup, tmp_path, device, monkeypatch):
    """This process is rank 0 and then rank 1, as on a node with another folder, or with another
    config, data and code.
    """
    config = parse(SFTConfig, setup)
    elsewhere = parse(SFTConfig, [*setup, f"trainer.save_dir={tmp_path}/1"])
    other = parse(SFTConfig, [*setup, "actor.lr=0.5"])
    views = []

    def gather(view):
        views.append(view)
        return [views[0], view]

    monkeypatch.setattr(folder_module, "all_gather_objects", gather)
    monkeypatch.setattr(folder_module, "SECONDS_TO_SEE_A_FILE", 0.1)
    first = RunFolder(config)
    monkeypatch.setenv("RANK", "1")
    broadcast = {str: first.lock.text, tuple: (first.start, "")}
    monkeypatch.setattr(folder_module, "broadcast_object", lambda value: broadcast[type(value)])
    RunFolder(config)
    host = socket.gethostname()
    with pytest.raises(ValueError, match=f"rank 1 on {host} does not see {tmp_path}/1 of rank 0"):
        RunFolder(elsewhere)
    (tmp_path / "rows.jsonl").write_text("{}")
    monkeypatch.setattr(folder_module, "hash_package", lambda: "the hash of other code")
    with pytest.raises(ValueError, match="rank 1") as error:
        RunFolder(other)
    first.lock.release()
    place = f"rank 1 on {host} differs from rank 0 on {host} in "
    assert str(error.value).splitlines() == [
        place + "actor.lr=0.5",
        place + "the content of data.path",
        place + "the code of rl2",
    ]
