"""Presets: `algo=NAME` sets the keys of a published algorithm."""

import pytest
from common import ROOT
from configs import BASE, find_problems, write_files

from rl2.config.arguments import read_arguments
from rl2.config.parse import compose
from rl2.config.presets import explain_algorithm, load_presets
from rl2.config.schema import DPOConfig, PPOConfig


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("grpo", "grpo"),
        ("GRPO", "grpo"),
        ("Dr. GRPO", "dr_grpo"),
        ("reinforce++", "reinforce_plus_plus"),
    ],
)
def test_a_preset_is_named_in_any_spelling(text, name):
    assert f"algo={name}, " in explain_algorithm(text)
    assert explain_algorithm("sapo") == ""


def test_a_name_that_is_no_algorithm_of_ppo():
    assert "python -m rl2 dpo" in explain_algorithm("dpo")


def compose_keys(*words):
    return compose(PPOConfig, read_arguments(PPOConfig, [*BASE["ppo"], *words])).config


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    """The required keys name files of the current folder."""
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", load_presets())
def test_a_preset_is_its_line_in_the_docs(name):
    """Both make the same config, but for what the docs add as an example."""
    page = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
    text = page.partition("## Estimators")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    [keys] = [row[-1].strip("`").split() for row in rows if row[0] == f"`{name}`"]
    examples = {
        "dr_grpo": {"actor.average_constant=512"},  # that of the config
        "rloo": {"kl.coef=0.05", "kl.type=reward"},
        "dapo": {"rollout.overlong_buffer=102"},
        "distillation": {"teacher.model_name=Qwen/Qwen3-8B"},
    }.get(name, set())
    assert examples <= set(keys)
    words = [key for key in keys if key not in examples]
    if name == "dr_grpo":
        words.append("actor.average_constant=77")
    longest = "rollout.train_sampling_params.max_new_tokens=77"
    assert compose_keys(f"algo={name}", longest) == compose_keys(*words, longest)


@pytest.mark.parametrize("name", load_presets())
def test_a_preset_passes_the_checks(in_folder, name):
    needed = ["teacher.model_name=model"] if name == "distillation" else []
    sizes = ["data.prompts_per_rollout=8", "data.responses_per_prompt=4"]
    if name == "reinforce_plus_plus":
        sizes = ["data.prompts_per_rollout=8"]
    assert find_problems("ppo", [f"algo={name}", *needed, *sizes]) == []


@pytest.mark.parametrize(
    ("words", "problems"),
    [
        (["actor.clip_high=0.3", "algo=dapo"], []),
        (["algo=ppo", "adv.estimator=rloo"], []),  # adv.lamda has no effect, but nobody wrote it
        (["algo=none"], []),
        (["algo=grpq"], ["algo/grpq"]),
        (["algorithm=grpo"], ["algo=grpo"]),
    ],
)
def test_what_is_written_beside_a_preset_wins(in_folder, words, problems):
    words = [*words, "data.prompts_per_rollout=8", "data.responses_per_prompt=4"]
    found = find_problems("ppo", words)
    assert len(found) == len(problems)
    assert all(text in str(problem) for text, problem in zip(problems, found, strict=True))
    config = compose_keys(*words)
    if "actor.clip_high=0.3" in words:
        assert config.actor.clip_high == 0.3 and config.rollout.filter == [0, 1]
    if "adv.estimator=rloo" in words:
        assert config.adv.estimator == "rloo" and config.actor.epochs_per_rollout == 4


def test_a_preset_is_for_ppo_alone():
    draft = compose(DPOConfig, read_arguments(DPOConfig, [*BASE["dpo"], "algo=grpo"]))
    assert [problem.key for problem in draft.arguments.problems] == ["algo"]
