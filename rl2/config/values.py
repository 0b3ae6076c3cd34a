"""Values of a config by dotted key, and how they are written on the command line."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

# Dicts, whose keys the schema does not list.
OPEN_KEYS = (
    "engine_args",  # of rl2.engine.serve
    "rollout.engine_args",
    "rollout.env_path",
    "rollout.reward_weights",
    "data.path",
    "data.columns",
    "data.chat_template_kwargs",
    "data.test_path",
)


def get_value(config: object, name: str) -> Any:
    """The value of a dotted name; None for an entry that a dict of the config does not have."""
    for part in name.split("."):
        config = config.get(part) if isinstance(config, dict) else getattr(config, part)
    return config


def flatten(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """(dotted key, value) of every key in nested dicts."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value and key not in OPEN_KEYS:
            yield from flatten(value, key + ".")
        else:
            yield key, value


def show_value(value: object) -> str:
    """A value as one writes it on the command line."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def declared_key(name: str) -> str:
    """The name as a schema declares it: that of the map, if it is an entry of an open one."""
    for key in OPEN_KEYS:
        if name.startswith(f"{key}."):
            return key
    return name
