"""Presets: `algo=NAME` sets the keys of a published algorithm, as presets.yaml has them.

They are Hydra's config group `algo`, whose default is `none`. A preset is no key of the config: the
run folder has the keys that it sets. A key that is written beside it wins, whatever the order.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from rl2.config.values import show_value, unflatten

FILE = Path(__file__).with_name("presets.yaml")
KEY = "algo"
NONE = "none"
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


def store_presets() -> None:
    """Makes them known to Hydra."""
    from hydra.core.config_store import ConfigStore  # here: the report reads presets without Hydra

    store = ConfigStore.instance().store
    store(NONE, {}, group=KEY, package="_global_")
    for name, preset in load_presets().items():
        store(name, unflatten(preset.keys), group=KEY, package="_global_")


def has_presets(known: Collection[str]) -> bool:
    """Whether a trainer with these keys is PPO, whose algorithms the presets are."""
    return "adv.estimator" in known


def explain_algorithm(name: str) -> str:
    """How to choose the algorithm of this name, in words; "" if no algorithm has the name."""
    for preset, found in load_presets().items():
        if _plain(name) in (_plain(preset), _plain(found.title)):
            return f"{found.title} is algo={preset}, which sets {found}"
    if name.lower() in OTHER_TRAINERS:
        return f"it has a trainer of its own, python -m rl2 {OTHER_TRAINERS[name.lower()]}"
    return ""


def _plain(text: str) -> str:
    """The name in lower case, without marks and spaces: "Dr. GRPO" is drgrpo."""
    return re.sub(r"[^\w]|_", "", text.lower().replace("++", "plusplus"))
