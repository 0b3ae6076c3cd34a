"""Helpers of the tests of environments."""

import asyncio
import textwrap
import time
from pathlib import Path

from rl2.env.call import Env
from rl2.env.load import load_env
from rl2.env.spec import EnvSpec

MESSAGES = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
ENVS = Path(__file__).resolve().parent.parent / "envs"


def env_of(reward_fn, interact=None, timeout=60.0, concurrency=32) -> Env:
    """Returns the environment of these functions, which come from no file."""
    return Env(EnvSpec(reward_fn, interact), timeout, concurrency)


def load_text(folder, text, timeout=20.0, **options) -> Env:
    """Returns the environment of a file with this text."""
    file = folder / "env.py"
    file.write_text(textwrap.dedent(text))
    return load_env(str(file), timeout, **options)


def call(env, key=None, **row):
    return asyncio.run(env.score(MESSAGES, row, key))


def call_together(env, calls):
    """The results of calls (key, row) side by side: {"reward": ...} or EnvError."""

    async def main():
        tasks = [env.score(MESSAGES, row, key) for key, row in calls]
        return await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run(main())


def wait_until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
