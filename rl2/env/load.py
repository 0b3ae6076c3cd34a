"""Loads an env file, and tries it on the rows before any model is loaded."""

import asyncio
import importlib.util
import itertools
import sys
from collections.abc import Callable
from types import ModuleType

from rl2.env.call import Env, user_traceback
from rl2.env.contract import EnvError, check_signature, find_env_file, required_columns

TRIAL_REPLIES = ("", "The answer is 42.")

_module_numbers = itertools.count()


def load_env(path: str, timeout: float = 60.0) -> Env:
    """The environment of an env file. `timeout` is the limit of each call in seconds.

    Raises ValueError when the file works with no row: it is missing or fails on import, it has no
    reward_fn, or a function cannot be called by the names of its parameters.
    """
    module = _import_file(path)
    if not hasattr(module, "reward_fn"):
        raise ValueError(
            f"rollout.env_path={path}: expected a function reward_fn(messages, answer), found none"
        )
    for name in ("reward_fn", "interact"):
        if hasattr(module, name):
            check_signature(getattr(module, name), f"{path}: {name}")
    return Env(module.reward_fn, getattr(module, "interact", None), timeout)


def preflight(env: Env, rows: list[dict], max_turns: int) -> list[str]:
    """Tries the environment on the rows. Returns warnings; ValueError lists all problems.

    The functions' parameters are compared with the columns of all rows. If they fit, the functions
    are called with the first and the last row, each with an empty and a short reply.
    """
    problems = _find_turn_problems(env, rows, max_turns)
    warnings = []
    functions = {"reward_fn": env.reward_fn}
    if env.interact_fn is not None:
        if max_turns > 1:
            functions["interact"] = env.interact_fn
        else:
            warnings.append("the env file has interact(), which rollout.max_turns=1 never calls")
    problems += _find_missing_columns(functions, rows)
    if not problems:
        with_interact = "interact" in functions
        problems = asyncio.run(_try_calls(env, [rows[0], rows[-1]], with_interact))
    if problems:
        raise ValueError("the env file cannot work:\n" + "\n".join(dict.fromkeys(problems)))
    return warnings


def _import_file(path: str) -> ModuleType:
    file = find_env_file(path)
    # A number makes the name unique: two env files may have the same file name.
    name = f"rl2_env_{next(_module_numbers)}_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file.resolve())
    if spec is None or spec.loader is None:
        raise ValueError(f"rollout.env_path={path}: expected a Python file, ending in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look it up there
    # As for a script, the file may import modules of its own folder.
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise ValueError(f"{error.filename}:{error.lineno}: {error.msg}: {line}") from error
    except Exception as error:
        text, _ = user_traceback(error)
        raise ValueError(f"rollout.env_path={path} fails on import:\n{text}") from error
    return module


def _find_turn_problems(env: Env, rows: list[dict], max_turns: int) -> list[str]:
    """What keeps a conversation from having several turns."""
    problems: list[str] = []
    if max_turns <= 1:
        return problems
    if env.interact_fn is None:
        problems.append(
            f"rollout.max_turns={max_turns}, but the env file has no interact(messages)"
        )
    if any(isinstance(row["messages"], str) for row in rows):
        problems.append(
            f"rollout.max_turns={max_turns}, but some rows are plain strings, which have no turns"
        )
    return problems


def _find_missing_columns(functions: dict[str, Callable], rows: list[dict]) -> list[str]:
    problems = []
    for name, function in functions.items():
        for column in required_columns(function):
            lacking = [i for i, row in enumerate(rows) if column not in row]
            if lacking:
                problems.append(
                    f"{name} needs column {column!r}, which {len(lacking)} rows lack, "
                    f"first row {lacking[0]} (from 0)"
                )
    return problems


async def _try_calls(env: Env, rows: list[dict], with_interact: bool) -> list[str]:
    """The failures of the environment on each row with each trial reply."""
    problems = []
    calls = [env.score, env.interact] if with_interact else [env.score]
    for row, reply, call in itertools.product(rows, TRIAL_REPLIES, calls):
        prompt = row["messages"]
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        try:
            await call([*prompt, {"role": "assistant", "content": reply}], row)
        except EnvError as error:
            problems.append(f"with the reply {reply!r}, {error}")
    return problems
