"""Loads an env file, and tries it on the rows before any model is loaded."""

import asyncio
import inspect
import itertools
from collections.abc import Callable, Iterator
from types import ModuleType

from rl2.data.rows import Rows
from rl2.env.call import Env
from rl2.env.contract import (
    EnvError,
    check_signature,
    project_of,
    required_columns,
)
from rl2.env.files import import_env_file
from rl2.env.processes import ProcessPool

TRIAL_REPLIES = ("", "The answer is 42.")
MAX_TRIAL_ROWS = 8  # of each data set, spread over it

RowSets = dict[str, Rows]  # by the key that names the data: data.path, data.test_path


def load_env(
    path: str, timeout: float = 60.0, concurrency: int = 32, isolation: str = "thread"
) -> Env:
    """The environment of an env file.

    `timeout` is the limit of each call in seconds; `concurrency` calls run at a time. `isolation`
    is what a sync function runs in: thread | process.

    Raises ValueError when the file works with no row: it is missing or fails on import, it has no
    reward_fn, or a function cannot be called by the names of its parameters.
    """
    module = import_env_file(path)
    reward_fns = _find_reward_functions(path, module)
    interact = getattr(module, "interact", None)
    for name, function in {**reward_fns, "interact": interact}.items():
        if function is not None:
            check_signature(function, f"rollout.env_path={path}: {name}")
    extract = getattr(module, "extract", None)
    if not inspect.isfunction(extract) or "messages" not in inspect.signature(extract).parameters:
        extract = None  # a function of another purpose
    pool = None
    if isolation == "process":
        pool = ProcessPool(str(module.__file__), timeout, concurrency)
    return Env(reward_fns, interact, timeout, concurrency, pool, extract)


def preflight(env: Env, row_sets: RowSets, max_turns: int) -> list[str]:
    """Tries the environment on the rows. Returns warnings; ValueError lists all problems.

    The functions' parameters are compared with the columns of all rows; one row of each kind stands
    for all of them. If they fit, the functions are called with a few rows of each data set, each
    with an empty and a short reply.
    """
    warnings = []
    functions = dict(env.reward_fns)
    if env.interact_fn is not None:
        if max_turns > 1:
            functions["interact"] = env.interact_fn
        else:
            warnings.append("the env file has interact(), which rollout.max_turns=1 never calls")
    if env.extract_fn is not None:
        functions["extract"] = env.extract_fn
    problems = [
        *_find_turn_problems(env, row_sets, max_turns),
        *_find_missing_columns(functions, row_sets),
    ]
    if not problems:
        rows = [row for rows in row_sets.values() for row in _spread(rows)]
        names = functions.keys() - env.reward_fns
        problems = asyncio.run(_try_calls(rows, [env.score, *(getattr(env, n) for n in names)]))
    if problems:
        raise ValueError("the env file cannot work:\n" + "\n".join(dict.fromkeys(problems)))
    return warnings


def _spread(rows: Rows) -> list[dict]:
    """Up to MAX_TRIAL_ROWS rows at equal distances, the first and the last among them."""
    count = min(len(rows), MAX_TRIAL_ROWS)
    return [rows[i * (len(rows) - 1) // max(1, count - 1)] for i in range(count)]


def _find_reward_functions(path: str, module: ModuleType) -> dict[str, Callable]:
    """`reward_fn` of an env file, or else verl's `compute_score`, or all that TRL would call."""
    if hasattr(module, "reward_fn"):
        return {"reward_fn": module.reward_fn}
    functions = {}
    for name, value in vars(module).items():
        project = project_of(value) if inspect.isfunction(value) else ""
        if name == "compute_score" and project == "verl":
            return {name: value}
        if project == "TRL" and name[0] != "_":
            functions[name] = value
    if not functions:
        raise ValueError(
            f"rollout.env_path={path}: expected a function reward_fn(messages, answer), found none;"
            " a reward function of TRL or verl works too: reward_fn = NAME"
        )
    return functions


def _find_turn_problems(env: Env, row_sets: RowSets, max_turns: int) -> Iterator[str]:
    """What keeps a conversation from having several turns."""
    if max_turns <= 1:
        return
    several_turns = f"rollout.max_turns={max_turns}, but"
    if env.interact_fn is None:
        yield f"{several_turns} the env file has no interact(messages)"
    for key, rows in row_sets.items():
        if any(isinstance(rows[first]["messages"], str) for first, _ in rows.kinds):
            yield f"{several_turns} some rows of {key} are plain strings, which have no turns"


def _find_missing_columns(functions: dict[str, Callable], row_sets: RowSets) -> Iterator[str]:
    for name, function in functions.items():
        columns = required_columns(function)
        for (key, rows), column in itertools.product(row_sets.items(), columns):
            lacking = [kind for kind in rows.kinds if column not in rows[kind[0]]]
            if lacking:
                first = min(lacking)[0]
                number = sum(count for _, count in lacking)
                seen = ", ".join(rows[first])
                yield (
                    f"{name} needs column {column!r}, which {number} of {len(rows)} rows of "
                    f"{key} lack, first row {first} (from 0); it has {seen}. Ask for another "
                    f"column, give {column!r} a default, or rename one: data.columns.OLD={column}"
                )


async def _try_calls(rows: list[dict], calls: list[Callable]) -> list[str]:
    """The failures of the calls on each row with each trial reply, tried side by side."""
    tries = []
    for row, call, reply in itertools.product(rows, calls, TRIAL_REPLIES):
        prompt = row["messages"]
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        tries.append(call([*prompt, {"role": "assistant", "content": reply}], row))
    results = await asyncio.gather(*tries, return_exceptions=True)
    replies_of: dict[str, list[str]] = {}  # failure -> the replies that had it
    for result, reply in zip(results, itertools.cycle(TRIAL_REPLIES), strict=False):
        if isinstance(result, EnvError):
            replies_of.setdefault(str(result), []).append(reply)
        elif isinstance(result, BaseException):
            raise result
    return [_describe_failure(failure, set(replies)) for failure, replies in replies_of.items()]


def _describe_failure(failure: str, replies: set[str]) -> str:
    """The failure, with the reply of the assistant if other replies have another result."""
    if len(replies) == len(TRIAL_REPLIES):
        return failure
    return f"with the reply {replies.pop()!r}, {failure}"
