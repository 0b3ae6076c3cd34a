"""Presets: `algo=NAME` sets the keys of a published algorithm, as presets.yaml has them.

A preset is no key of the config: the run folder has the keys that it sets. A key that is written
beside it wins, whatever the order.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from rl2.config.arguments import Assignment
from rl2.config.problem import Problem, wrong_value
from rl2.config.schema import PPOConfig
from rl2.config.values import flatten, show_value

FILE = Path(__file__).with_name("presets.yaml")
KEY = "algo"
OTHER_TRAINERS = {"dpo": "dpo", "ipo": "dpo", "sft": "sft", "rm": "rm"}  # name -> command of rl2
# Under which one looks for a key that names the algorithm.
ALGORITHM_KEYS = ("algorithm", "alg", "method", "algorithm.name", "trainer.algorithm")


@dataclass(frozen=True)
class Preset:
    title: str  # the published name
    keys: dict[str, Any]

    def __str__(self) -> str:
        """The keys as arguments."""
        return " ".join(f"{key}={show_value(value)}" for key, value in self.keys.items())


@cache
def load_presets() -> dict[str, Preset]:
    """Reads the presets by name."""
    entries = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return {name: Preset(**entry) for name, entry in entries.items()}


def has_presets(known: Collection[str]) -> bool:
    """Whether a trainer with these keys is PPO, whose algorithms the presets are."""
    return "adv.estimator" in known


def find_preset(text: str) -> str:
    """The name of the preset that `text` spells in any way, such as "Dr. GRPO"; "" if none."""
    for name, preset in load_presets().items():
        if _plain(text) in (_plain(name), _plain(preset.title)):
            return name
    return ""


def preset_of(config: dict[str, Any]) -> str:
    """The name of the preset that a config has the keys of, the one with most keys; "" if none."""
    values = dict(flatten(config))
    found = ""
    defaults = {"adv.estimator": PPOConfig().adv.estimator, "actor.loss": PPOConfig().actor.loss}
    for name, preset in load_presets().items():
        keys = defaults | preset.keys
        has_all = all(values.get(key) == _resolve(values, keys[key]) for key in keys)
        if has_all and (not found or len(preset.keys) > len(load_presets()[found].keys)):
            found = name
    return found


def _resolve(values: dict[str, Any], value: Any) -> Any:
    """The value of the key that "${KEY}" names, or the value itself."""
    reference = re.fullmatch(r"\$\{(.*)\}", value) if isinstance(value, str) else None
    return values.get(reference[1]) if reference else value


def explain_algorithm(name: str) -> str:
    """How to choose the algorithm of this name, in words; "" if no algorithm has the name."""
    preset = find_preset(name)
    if preset:
        found = load_presets()[preset]
        return f"{found.title} is algo={preset}, which sets {found}"
    if name.lower() in OTHER_TRAINERS:
        return f"it has a trainer of its own, python -m rl2 {OTHER_TRAINERS[name.lower()]}"
    return ""


def _plain(text: str) -> str:
    """The name in lower case, without marks and spaces: "Dr. GRPO" is drgrpo."""
    return re.sub(r"[^\w]|_", "", text.lower().replace("++", "plusplus"))


def take_preset(
    assignments: list[Assignment], problems: list[Problem]
) -> tuple[list[Assignment], list[Assignment]]:
    """(the assignments of the preset, all others). Of several presets, the last one counts."""
    others = [assignment for assignment in assignments if assignment.key != KEY]
    named = [assignment for assignment in assignments if assignment.key == KEY]
    if not named or named[-1].value is None:
        return [], others
    _, value, source = named[-1]
    name = find_preset(str(value))
    if not name:
        problem = wrong_value(KEY, value, f"choose {', '.join(load_presets())}")
        problems.append(Problem(KEY, value, problem.text, source))
        return [], others
    return [Assignment(key, value) for key, value in load_presets()[name].keys.items()], others
