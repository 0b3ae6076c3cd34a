"""Helpers of the tests of environments."""

import textwrap
from pathlib import Path

from rl2.env.call import Env
from rl2.env.load import load_env
from rl2.env.spec import EnvSpec

ENVS = Path(__file__).resolve().parent.parent / "envs"


def env_of(reward_fn, interact=None, extract=None, timeout=60.0, concurrency=32) -> Env:
    """Returns the environment of these functions, which come from no file."""
    return Env(EnvSpec({"reward_fn": reward_fn}, interact, extract), timeout, concurrency)


def load_text(folder, text, timeout=20.0, **options) -> Env:
    """Returns the environment of a file with this text."""
    file = folder / "env.py"
    file.write_text(textwrap.dedent(text))
    return load_env(str(file), timeout, **options)
