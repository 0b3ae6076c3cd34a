"""`rl2 diff`: where runs part, and the planted settings that differ. Equal runs are equal."""

import fnmatch
import json
import shutil
import sys
from itertools import takewhile

import pytest
from common import LETTER_ENV, launch_runs, make_model, make_tokenizer, read_jsonl, write_jsonl
from safetensors.numpy import load_file, save_file

from rl2.config.key import schema_keys
from rl2.config.schema import DPOConfig, PPOConfig, RMConfig, SFTConfig
from rl2.run.changes import HARMLESS, LENGTH
from rl2.tools import diff
from rl2.tools.compare import find_difference

SAMPLED = ("answer", "engine")  # the first token differs, or only its log-probability
# Name of a run -> (its keys, the phases in which it may part from `short`, what is listed).
PLANTED = {
    "seed": (["trainer.seed=1"], ["answer"], ["trainer.seed"]),
    "order": (["data.seed=1"], ["data"], ["data.seed"]),
    "row": (["data.path={}/edited.jsonl"], ["data"], ["data.path", "contents.data.path"]),
    "system": (["data.system_prompt=Be short."], ["prompt"], ["data.system_prompt"]),
    "template": (
        ["data.chat_template_kwargs.mood=calm"],
        ["prompt"],
        ["data.chat_template_kwargs.mood"],
    ),
    "model": (["actor.model_name={}/other"], SAMPLED, ["actor.model_name"]),
    "temperature": (
        ["rollout.train_sampling_params.temperature=0.7"],
        SAMPLED,
        ["rollout.train_sampling_params.temperature"],
    ),
    "length": (
        ["rollout.train_sampling_params.max_new_tokens=9"],
        ["answer"],
        ["rollout.train_sampling_params.max_new_tokens"],
    ),
    "reward": (
        ["rollout.env_path={}/edited.py"],
        ["reward"],
        ["rollout.env_path", "contents.rollout.env_path"],
    ),
    "estimator": (["adv.estimator=rloo"], ["advantage"], ["adv.estimator", "adv.norm_var"]),
    "lr": (["actor.lr=0.01"], ["update"], ["actor.lr"]),
}


KEYS = ["actor.lr=0.02", "actor.dtype=float32", "trainer.disable_wandb=true", "trainer.max_steps=1"]
TWO_STEPS = "trainer.max_steps=2"
PPO = [
    "data.prompts_per_rollout=2",
    "data.responses_per_prompt=4",
    "actor.update_per_rollout=2",
    "rollout.train_sampling_params.max_new_tokens=6",
    "trainer.save_tokens=true",
]


def write_inputs(folder):
    """Rows, an env file, a model, and another one of each."""
    rows, other_rows = [], []
    for i in range(4):
        question = {"role": "user", "content": f"say a, {i}"}
        rows.append({"messages": [question], "answer": "abcdefgh"})
        other_rows.append({"messages": [question], "answer": "abcd"})
    conversations, others = [], []
    for row in rows:
        for made, reply in ((conversations, "aaaa"), (others, "aaba")):
            made.append({"messages": [*row["messages"], {"role": "assistant", "content": reply}]})
    files = {"rows": rows, "edited": other_rows, "chats": conversations, "edited_chats": others}
    for name, made in files.items():
        write_jsonl(folder / f"{name}.jsonl", made)
    (folder / "env.py").write_text(LETTER_ENV)
    (folder / "edited.py").write_text(LETTER_ENV.replace("letter in answer", "letter in 'xyz'"))
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ mood }}" + tokenizer.chat_template
    for name, seed in (("tiny", 0), ("other", 1)):
        make_model(folder / name, seed=seed)
        tokenizer.save_pretrained(folder / name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder of runs: `first`, `again` and `resumed` have two steps, `short` and the others one.

    The others are those of PLANTED, `processes`, `sft` and `sft_row`.
    """
    folder = tmp_path_factory.mktemp("diff")
    write_inputs(folder)

    def command(trainer, name, *keys):
        keys = [key.replace("{}", str(folder)) for key in keys]
        model = f"actor.model_name={folder / 'tiny'}"
        return [trainer, model, *KEYS, *keys, f"trainer.save_dir={folder / name}"]

    ppo = ["data.path={}/rows.jsonl", "rollout.env_path={}/env.py", *PPO]
    sft = ["data.batch_size=2", "data.path={}/chats.jsonl"]
    resumed = command("ppo", "resumed", *ppo, TWO_STEPS, "trainer.save_freq=1")
    commands = [
        command("ppo", "first", *ppo, TWO_STEPS),
        command("ppo", "again", *ppo, TWO_STEPS),
        command("ppo", "short", *ppo),
        *(command("ppo", name, *ppo, *keys) for name, (keys, *_) in PLANTED.items()),
        ["kill=3", *resumed],
        resumed,
        command("sft", "sft", *sft),
        command("sft", "sft_row", *sft, "data.path={}/edited_chats.jsonl"),
    ]
    launch_runs(1, commands)
    launch_runs(2, [command("ppo", "processes", *ppo)])
    return folder


def call(capsys, monkeypatch, *words):
    """Exit status and output of `rl2 diff`."""
    monkeypatch.setattr(sys, "argv", ["rl2 diff", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        diff.main()
    captured = capsys.readouterr()
    return ended.value.code, captured.out + captured.err


def test_equal_runs_are_the_same(runs, capsys, monkeypatch):
    for name in ("again", "resumed"):
        status, text = call(capsys, monkeypatch, runs / "first", runs / name)
        assert status == 0 and "same: steps 1, 2 (compared: metrics, answers, tokens" in text
        assert "trainer.save_dir" in text and "may change numbers" not in text


def check(text, found, phases, causes):
    """The phase is one of these, and these settings are listed, without any other."""
    assert found.phase in phases and found.step == 1, text
    listed = text.partition("may change numbers:\n")[2]
    names = [line.split(": ")[0].strip() for line in takewhile(is_entry, listed.splitlines())]
    assert sorted(names) == sorted(causes), text


def is_entry(line):
    return line.startswith("  ")


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_cause_is_listed_with_where_the_runs_part(runs, capsys, monkeypatch, name):
    _, phases, causes = PLANTED[name]
    status, text = call(capsys, monkeypatch, runs / "short", runs / name)
    found = find_difference(runs / "short", runs / name, [1])
    assert status == 1
    check(text, found, phases, causes)


def test_another_number_of_processes_is_found(runs, capsys, monkeypatch):
    status, text = call(capsys, monkeypatch, runs / "short", runs / "processes")
    found = find_difference(runs / "short", runs / "processes", [1])
    assert status == 1
    check(text, found, [*SAMPLED, "advantage", "update"], ["world_size"])


def test_an_edited_row_of_a_run_without_answers_is_found(runs, capsys, monkeypatch):
    status, text = call(capsys, monkeypatch, runs / "sft", runs / "sft_row")
    found = find_difference(runs / "sft", runs / "sft_row", [1])
    assert status == 1
    check(text, found, ["update"], ["data.path", "contents.data.path"])


@pytest.fixture
def copy(runs, tmp_path):
    """A copy of the first run to be edited, without hashes of the weights."""
    folder = shutil.copytree(runs / "first", tmp_path / "copy", ignore=lambda *_: {"model"})
    lines = read_jsonl(folder / "metrics.jsonl")
    kept = [{name: line[name] for name in line if name != "weights"} for line in lines]
    write_jsonl(folder / "metrics.jsonl", kept)
    return folder


def edit_lines(path, number, **changes):
    """Changes entries of an object of a JSONL file."""
    lines = read_jsonl(path)
    lines[number] |= changes
    write_jsonl(path, lines)


def edit_tokens(folder, step, name, change):
    """Adds `change` to the last value of a column of the saved tokens."""
    path = folder / f"rollouts/train/step_{step}.safetensors"
    columns = load_file(path)
    columns[name][-1] += change
    save_file(columns, path)


def test_another_version_is_listed_beside_log_probabilities(runs, copy, capsys, monkeypatch):
    record = json.loads((copy / "run.json").read_text())
    record["starts"][0]["versions"]["torch"] = "2.11.0"
    del record["starts"][0]["commit"]  # as in an older run
    (copy / "run.json").write_text(json.dumps(record))
    status, text = call(capsys, monkeypatch, runs / "first", copy)
    assert status == 0 and "  versions.torch: " in text and "commit" not in text
    edit_tokens(copy, 1, "logps", 1e-5)
    status, text = call(capsys, monkeypatch, runs / "first", copy)
    assert status == 1
    check(text, find_difference(runs / "first", copy, [1]), ["engine"], ["versions.torch"])
    assert call(capsys, monkeypatch, runs / "first", copy, "--tolerance=1e-4")[0] == 0


def test_an_edited_record_is_found_and_nothing_is_listed(runs, copy, capsys, monkeypatch):
    path = copy / "rollouts/train/step_2.jsonl"
    edit_lines(path, 6, rewards={"reward": 7.0})
    found = find_difference(runs / "first", copy, [1, 2])
    assert (found.phase, found.step, found.group, found.answer) == ("reward", 2, 1, 2)
    assert found.name == "rewards.reward" and found.values[1] == 7.0
    status, text = call(capsys, monkeypatch, runs / "first", copy)
    assert status == 1 and "no recorded setting that may change numbers differs" in text
    assert "step 2, the reward (group 1, answer 2 of rollouts/train/step_2.jsonl)" in text
    edit_tokens(copy, 2, "tokens", 1)
    assert find_difference(runs / "first", copy, [1, 2]).phase == "answer"
    edit_lines(copy / "rollouts/train/step_1.jsonl", 3, row={"answer": "x"})
    found = find_difference(runs / "first", copy, [1, 2])
    assert (found.phase, found.name, found.values) == ("data", "row.answer", ("abcdefgh", "x"))
    assert find_difference(runs / "first", copy, [2]).step == 2


def test_hashes_of_the_weights_are_compared_where_both_runs_have_them(copy, tmp_path):
    other = shutil.copytree(copy, tmp_path / "other")
    edit_lines(copy / "metrics.jsonl", 0, weights={"actor": "aa"})
    assert find_difference(copy, other, [1, 2]) is None
    edit_lines(other / "metrics.jsonl", 0, weights={"actor": "bb"})
    found = find_difference(copy, other, [1, 2])
    assert (found.phase, found.step, found.values) == ("weights", 1, ("aa", "bb"))
    edit_lines(other / "metrics.jsonl", 0, **{"actor/grad_norm": 5.0, "test/reward/mean": 1.0})
    edit_lines(copy / "metrics.jsonl", 0, **{"time/step": 77.0, "test/reward/mean": 0.0})
    assert find_difference(copy, other, [1]).name == "actor/grad_norm"
    edit_lines(copy / "metrics.jsonl", 0, **{"actor/grad_norm": 5.0, "weights": {"actor": "bb"}})
    found = find_difference(copy, other, [1])
    assert (found.phase, found.name) == ("evaluation", "test/reward/mean")


def test_without_tokens_the_messages_are_compared(runs, copy, capsys, monkeypatch):
    shutil.rmtree(copy / "rollouts")
    shutil.copytree(runs / "system/rollouts", copy / "rollouts")
    shutil.copy(runs / "system/config.yaml", copy / "config.yaml")
    for path in copy.glob("rollouts/train/*.safetensors"):
        path.unlink()
    status, text = call(capsys, monkeypatch, runs / "short", copy)
    assert status == 1
    check(text, find_difference(runs / "short", copy, [1]), ["answer"], ["data.system_prompt"])


def test_what_the_environment_says_is_a_phase_of_its_own(copy, tmp_path):
    other = shutil.copytree(copy, tmp_path / "other")
    for folder, content in ((copy, "41"), (other, "42")):
        path = folder / "rollouts/train/step_1.jsonl"
        messages = read_jsonl(path)[5]["messages"]
        tool = {"role": "tool", "content": content}
        edit_lines(path, 5, messages=[*messages, tool, messages[-1]], num_turns=2)
    found = find_difference(copy, other, [1])
    assert (found.phase, found.name) == ("environment", "messages.2.content")


def test_a_group_that_was_filtered_out_is_named_by_that(runs, copy):
    """Its tokens are not kept, and this is no difference of the tokens."""
    path = copy / "rollouts/train/step_1.safetensors"
    columns = load_file(path)
    num_tokens = columns["length"][-1]
    for name in ("tokens", "mask", "logps", "rewards", "advantages", "trainer_logps"):
        columns[name] = columns[name][:-num_tokens]
    for name in ("length", "trajectory"):
        columns[name] = columns[name][:-1]
    save_file(columns, path)
    edit_lines(path.with_suffix(".jsonl"), 7, is_filtered=True)
    found = find_difference(runs / "first", copy, [1])
    assert (found.phase, found.name, found.answer) == ("reward", "is_filtered", 3)


def test_an_answer_that_one_run_lacks_is_named(runs, copy):
    path = copy / "rollouts/train/step_1.jsonl"
    write_jsonl(path, read_jsonl(path)[:-1])
    found = find_difference(runs / "first", copy, [1])
    assert (found.phase, found.name) == ("data", "ids of the answers")
    assert "[0, 1, 2, 3, 4, 5, 6, 7] and [0, 1, 2, 3, 4, 5, 6]" in str(found)


def test_an_environment_that_failed_is_a_difference_of_the_reward(runs, copy):
    edit_lines(copy / "rollouts/train/step_1.jsonl", 0, finish_reason="failed", length=0)
    found = find_difference(runs / "first", copy, [1])
    assert (found.phase, found.name) == ("reward", "finish_reason")


def test_a_key_that_follows_another_is_not_listed(runs, copy, capsys, monkeypatch):
    config = (copy / "config.yaml").read_text()
    (copy / "config.yaml").write_text(
        config.replace("update_per_rollout: 2", "update_per_rollout: 4")
    )
    status, text = call(capsys, monkeypatch, runs / "first", copy)
    assert status == 0 and "  actor.update_per_rollout: 2 -> 4" in text
    assert "critic.update_per_rollout" not in text


def test_an_answer_without_messages_is_compared(runs, copy):
    edit_lines(copy / "rollouts/train/step_1.jsonl", 0, messages=[], num_turns=0)
    assert find_difference(runs / "first", copy, [1]).phase == "data"


def test_an_evaluation_is_compared(copy, tmp_path):
    (copy / "rollouts/train/step_2.jsonl").unlink()
    shutil.copytree(copy / "rollouts/train", copy / "rollouts/test_sums")
    other = shutil.copytree(copy, tmp_path / "other")
    edit_lines(other / "rollouts/test_sums/step_1.jsonl", 0, finish_reason="failed")
    found = find_difference(copy, other, [1, 2])
    assert (found.phase, found.split, found.name) == ("evaluation", "test_sums", "finish_reason")
    edit_lines(other / "metrics.jsonl", 0, **{"actor/loss": 7.0})
    assert find_difference(copy, other, [1, 2]).phase == "update"


def test_steps_that_one_run_lacks_are_said(runs, copy, tmp_path, capsys, monkeypatch):
    first, second = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text(first + second[:50])
    status, output = call(capsys, monkeypatch, copy, runs / "first")
    assert status == 0 and "same: step 1 (" in output
    assert f"only {runs / 'first'} has step 2" in output
    assert f"{copy}/metrics.jsonl: 1 lines are cut or broken" in output
    (copy / "metrics.jsonl").write_text("")
    status, output = call(capsys, monkeypatch, copy, runs / "first")
    assert status == 2 and f"{copy} has no step" in output
    assert "has steps 1, 2" in output
    status, output = call(capsys, monkeypatch, runs / "first", tmp_path)
    assert status == 2 and f"{tmp_path} is not the folder of a run" in output
    assert diff.describe_steps([3]) == "step 3"
    assert diff.describe_steps(range(1, 10)) == "steps 1, ..., 9"


def test_settings_that_change_no_number_are_keys():
    names = set()
    for config in (PPOConfig, SFTConfig, DPOConfig, RMConfig):
        names |= schema_keys(config).keys()
    for pattern in HARMLESS:
        assert fnmatch.filter(names, pattern), f"{pattern} is not a key"
    for name in LENGTH:
        assert name in names
