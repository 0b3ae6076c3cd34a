"""Presets: `algo=NAME` sets the keys of a published algorithm, as presets.yaml has them.

They are Hydra's config group `algo`, whose default is `none`. A preset is no key of the config: the
run folder has the keys that it sets. A key that is written beside it wins, whatever the order.
"""

from collections.abc import Collection
from functools import cache
from pathlib import Path

import yaml

from rl2.config.values import show_value

FILE = Path(__file__).with_name("presets.yaml")
KEY = "algo"
NONE = "none"


@cache
def load_presets() -> dict[str, dict[str, object]]:
    """Reads the keys of each preset, by its name."""
    presets: dict[str, dict[str, object]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return presets


def has_presets(known: Collection[str]) -> bool:
    """Whether a trainer with these keys is PPO, whose algorithms the presets are."""
    return "adv.estimator" in known


def describe_preset(name: str) -> str:
    """What a preset sets, as arguments."""
    return " ".join(f"{key}={show_value(value)}" for key, value in load_presets()[name].items())
