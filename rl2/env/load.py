"""The user's env file: loaded, checked before the model is, and called so that nothing it does can stop the run.

Async functions run on an event loop of their own, which lives as long as the run (as do the sessions they open there);
others run in threads. Whatever goes wrong inside is an EnvError, whose trajectory the caller masks.
"""

import asyncio
import importlib.util
import itertools
import sys
from pathlib import Path

from rl2.env.call import Env, _traceback
from rl2.env.contract import EnvError, _check_signature, _required

SAMPLE_REPLIES = ("", "The answer is 42.")


_numbers = itertools.count()


def load_env(path: str, timeout: float = 60.0) -> "Env":
    """Imports the env file. ValueError when it cannot work with any row: no such file, an error on import, no
    reward_fn, or a function that cannot be called by the names of its parameters. `timeout`: seconds for each call."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"rollout.env_path={path}: no such file")
    name = f"rl2_env_{next(_numbers)}_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file.resolve())
    if spec is None:
        raise ValueError(f"rollout.env_path={path}: expected a Python file, ending in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look it up
    if str(file.resolve().parent) not in sys.path:
        sys.path.append(
            str(file.resolve().parent)
        )  # as for a script: the file may import its neighbours
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ValueError(
            f"{error.filename}:{error.lineno}: {error.msg}: {(error.text or '').strip()}"
        ) from error
    except Exception as error:
        raise ValueError(
            f"rollout.env_path={path} fails on import:\n{_traceback(error)[0]}"
        ) from error
    if not hasattr(module, "reward_fn"):
        raise ValueError(
            f"rollout.env_path={path}: expected a function reward_fn(messages, answer), found none"
        )
    for function in ("reward_fn", "interact"):
        if hasattr(module, function):
            _check_signature(getattr(module, function), f"{path}: {function}")
    return Env(module.reward_fn, getattr(module, "interact", None), timeout)


def preflight(env: Env, rows, max_turns: int) -> list[str]:
    """Tries the env before a model is loaded: its signatures against the columns of all rows, its functions on the
    first and the last row with an empty and a short reply. Returns warnings; ValueError lists all that is wrong."""
    problems, warnings = [], []
    functions = {"reward_fn": env.reward_fn}
    if max_turns > 1:
        if env.interact_fn is None:
            problems.append(
                f"rollout.max_turns={max_turns}, but the env file has no interact(messages)"
            )
        else:
            functions["interact"] = env.interact_fn
        if any(isinstance(row["messages"], str) for row in rows):
            problems.append(
                f"rollout.max_turns={max_turns}, but some rows are plain strings, which have no turns"
            )
    elif env.interact_fn is not None:
        warnings.append("the env file has interact(), which rollout.max_turns=1 never calls")
    for name, function in functions.items():
        for column in _required(function):
            lacking = [i for i, row in enumerate(rows) if column not in row]
            if lacking:
                problems.append(
                    f"{name} needs column {column!r}, which {len(lacking)} rows lack: first {lacking[0]}"
                )
    if not problems:
        problems = asyncio.run(_try(env, [rows[0], rows[-1]], functions))
    if problems:
        raise ValueError("the env file cannot work:\n" + "\n".join(dict.fromkeys(problems)))
    return warnings


async def _try(env, rows, functions) -> list[str]:
    problems = []
    for row, reply in itertools.product(rows, SAMPLE_REPLIES):
        prompt = row["messages"]
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        messages = [*messages, {"role": "assistant", "content": reply}]
        for name in functions:
            try:
                await (env.score if name == "reward_fn" else env.interact)(messages, row)
            except EnvError as error:
                problems.append(f"with the reply {reply!r}, {error}")
    return problems
