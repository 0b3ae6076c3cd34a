"""Presets: `algo=NAME` sets the keys of a published algorithm."""

import pytest
from common import ROOT
from configs import BASE, find_problems

from rl2.config.arguments import read_arguments
from rl2.config.parse import compose, parse
from rl2.config.presets import load_presets
from rl2.config.schema import PPOConfig
from rl2.config.values import get_value


def compose_keys(*words):
    return compose(PPOConfig, read_arguments(PPOConfig, [*BASE["ppo"], *words]))[0]


def read_docs() -> dict[str, list[str]]:
    """The keys of each algorithm in docs/algorithms.md, by its name."""
    page = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
    text = page.partition("## Estimators")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return {row[0].strip("`"): row[-1].strip("`").split() for row in rows[2:]}


@pytest.mark.parametrize("name", sorted(load_presets().keys() | read_docs().keys()))
def test_a_preset_is_its_line_in_the_docs(base, capsys, name):
    """Both make the same config, but for what the docs add as an example.

    The keys of the docs pass all checks without a warning, and each changes a default.
    """
    keys = read_docs()[name]
    config = parse(PPOConfig, [*base, *keys])
    assert "warning" not in capsys.readouterr().err
    for key in keys:
        key_name = key.partition("=")[0]
        assert get_value(config, key_name) != get_value(PPOConfig(), key_name), key
    examples = {
        "dr_grpo": {"actor.average_constant=512"},  # that of the config
        "rloo": {"kl.coef=0.05", "kl.type=reward"},
        "distillation": {"teacher.model_name=Qwen/Qwen3-8B"},
    }.get(name, set())
    assert examples <= set(keys)
    words = [key for key in keys if key not in examples]
    if name == "dr_grpo":
        words.append("actor.average_constant=77")
    longest = "rollout.train_sampling_params.max_new_tokens=77"
    assert compose_keys(f"algo={name}", longest) == compose_keys(*words, longest)


@pytest.mark.parametrize(
    ("words", "problems", "values"),
    [
        (["actor.clip_high=0.3", "algo=dapo"], [], {"actor.clip_high": 0.3, "adv.norm_var": True}),
        # adv.lamda has no effect, but nobody wrote it.
        (["algo=ppo", "adv.estimator=rloo"], [], {"actor.epochs_per_rollout": 4}),
        (["algo=none"], [], {"actor.clip": 0.2}),
        (["algo=grpq"], ["algo/grpq"], {}),
    ],
)
def test_what_is_written_beside_a_preset_wins(base, words, problems, values):
    words = [*words, "data.prompts_per_rollout=8", "data.responses_per_prompt=4"]
    found = find_problems("ppo", words)
    assert len(found) == len(problems)
    assert all(text in str(problem) for text, problem in zip(problems, found, strict=True))
    config = compose_keys(*words)
    assert {name: get_value(config, name) for name in values} == values
