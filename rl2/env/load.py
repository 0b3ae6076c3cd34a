"""Loads an env file, and tries it on the rows before any model is loaded."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping

from rl2.data.rows import Rows
from rl2.env.call import Env
from rl2.env.contract import MARKS, EnvError, add_parts, required_columns
from rl2.env.gold import FORMS, PROGRAM, WRONG, gold_answers
from rl2.env.processes import ProcessPool
from rl2.env.spec import read_spec
from rl2.user_files import import_env_file

TRIAL_REPLIES = ("", "The answer is 42.", PROGRAM.replace("{}", "pass"))
TRIAL_PROCESSES = 2  # few: each imports the env file, and may load a model
TRIAL_TRIES = 3  # of a conversation that fails
MAX_TRIAL_ROWS = 8  # of each data set, spread over it
MAX_GOLD_ROWS = 4  # of them: a right program passes all its tests, which takes long
MAX_GOLDS = 3  # answers of a row: some of several programs may be wrong

MAX_TRIAL_TOKENS = 100
TRIAL_INPUTS = {
    "turn": 1,
    "finish_reason": "stop",
    "max_new_tokens": MAX_TRIAL_TOKENS,
    "completion_ids": [],
}

Functions = Mapping[str, Callable]  # by the name that each has in an env file
LocatedRow = tuple[str, dict]  # its file and number, the row
RowSets = dict[str, Rows]  # by the key that names the data: data.path, data.test_path


def load_env(
    path: str, timeout: float = 60.0, concurrency: int = 32, isolation: str = "thread"
) -> Env:
    """Returns the environment of an env file.

    `timeout` is the limit of each call in seconds; `concurrency` calls run at a time. `isolation`
    is what they run in: thread | process.

    Raises ValueError when the file works with no row: it is missing or fails on import, it has no
    reward_fn, or a function cannot be called by the names of its parameters.
    """
    module = import_env_file(path)
    try:
        spec = read_spec(vars(module))
    except ValueError as error:
        raise ValueError(f"rollout.env_path={path}: {error}") from error
    file = str(module.__file__)
    if isolation == "process" and spec.play is not None:
        raise ValueError(
            "rollout.env_isolation=process: play() asks the model in this process; leave the key "
            "out, or write run(), which asks over HTTP"
        )
    pool = ProcessPool(file, timeout, concurrency) if isolation == "process" else None
    return Env(spec, timeout, concurrency, pool, file)


def make_env(
    functions: Functions, timeout: float = 60.0, concurrency: int = 32, isolation: str = "thread"
) -> Env:
    """Returns the environment of functions of this process, by the names of an env file.

    The other arguments are those of `load_env`. ValueError when the functions work with no row, and
    for isolation=process.
    """
    given = ", ".join(functions)
    if isolation == "process":
        raise ValueError(
            f"rollout.env_isolation=process: other processes cannot call {given}, which this "
            "process made: write them to a file and give env=FILE, or leave the key out"
        )
    spec = read_spec(functions)
    for name in functions.keys() - spec.functions().keys():
        needed = MARKS.get(name, "messages")
        raise ValueError(f"{name}: expected a function with a parameter called {needed}")
    return Env(spec, timeout, concurrency)


def preflight(env: Env, row_sets: RowSets, max_turns: int, is_partial: bool = False) -> list[str]:
    """Tries the environment on the rows. Returns warnings; ValueError lists the problems.

    `is_partial` is rollout.partial.

    The functions' parameters are compared with the columns of all rows; one row of each kind is
    enough. If they fit, the functions are called with a few rows of each data set, each with an
    empty reply, a short one and a program; then with the gold answers of rows that have some. The
    calls of a file run in processes, so that none can block this one. A conversation that fails is
    tried again, as a run tolerates some failures. After one that fails always, no other begins.
    """
    warnings = []
    functions = env.spec.row_functions()
    if max_turns == 1 and env.spec.interact is not None:
        del functions["interact"]
        warnings.append("the env file has interact(), which rollout.max_turns=1 never calls")
    problems = list(_find_turn_problems(env, row_sets, max_turns, is_partial))
    problems += _find_missing_columns(functions, row_sets)
    if not problems:
        trial = _Trial(env.in_processes(TRIAL_PROCESSES) if env.path else env, max_turns)
        try:
            problems = asyncio.run(trial.run(row_sets))
        finally:
            if env.path:
                trial.env.close()
        warnings += trial.warnings
    if problems:
        raise ValueError("the env file cannot work:\n" + "\n".join(dict.fromkeys(problems)))
    return warnings


def _spread(count: int, limit: int) -> list[int]:
    """Up to `limit` indices of `count` at equal distances, the first and the last among them."""
    number = min(count, limit)
    return [i * (count - 1) // max(1, number - 1) for i in range(number)]


def _find_turn_problems(
    env: Env, row_sets: RowSets, max_turns: int, is_partial: bool
) -> Iterator[str]:
    """Yields what keeps a conversation from having several turns, or an object."""
    needed = f"{env.spec.agent}() asks for its first reply" if env.spec.agent else ""
    if env.spec.tools:
        needed = "the model calls its tools"
    if max_turns == 1 and needed:
        yield (
            f"rollout.max_turns=1 ends a trajectory after {needed}: set rollout.max_turns to the "
            "most replies that one may need, at least 2"
        )
    if is_partial and env.keeps_state:
        yield (
            "rollout.partial=true moves trajectories between processes, where `run`, `play`, "
            "`step`, the objects of make_env and `state` cannot follow: take the key out, or keep "
            "all in the messages"
        )
    if env.spec.agent or env.spec.step or (max_turns <= 1 and not env.has_object):
        return
    several_turns = "make_env" if env.has_object else f"rollout.max_turns={max_turns}"
    if not env.has_object and env.spec.interact is None:
        yield f"{several_turns}, but the env file has no interact(messages)"
    for key, rows in row_sets.items():
        if any(isinstance(rows[kind.first]["messages"], str) for kind in rows.kinds):
            yield f"{several_turns}, but some rows of {key} are plain strings, which have no turns"


def _find_missing_columns(functions: dict[str, Callable], row_sets: RowSets) -> Iterator[str]:
    for name, function in functions.items():
        columns = required_columns(function)
        for (key, rows), column in itertools.product(row_sets.items(), columns):
            lacking = [kind for kind in rows.kinds if column not in rows[kind.first]]
            if lacking:
                first = min(kind.first for kind in lacking)
                number = sum(kind.count for kind in lacking)
                seen = ", ".join(rows[first])
                yield (
                    f"{name} needs column {column!r}, which {number} of {len(rows)} rows of "
                    f"{key} lack, the first at {rows.locate(first)}; it has {seen}. Ask for "
                    f"another column, give {column!r} a default, or rename one: "
                    f"data.columns.OLD={column}"
                )


class _Trial:
    """Conversations of one reply with an environment.

    `failures` are those of conversations that fail whenever they are tried: the first row and
    reply of each.
    """

    def __init__(self, env: Env, max_turns: int):
        self.env = env
        self.max_turns = max_turns
        self.failures: dict[str, str] = {}
        self.warnings: list[str] = []
        self._keys = itertools.count()
        self._slots = asyncio.Semaphore(TRIAL_PROCESSES if env.path else MAX_TRIAL_ROWS)

    async def run(self, row_sets: RowSets) -> list[str]:
        """Returns the failures on rows of the data sets, and warns of their gold answers."""
        sets: list[list[LocatedRow]] = []
        tries = []
        for rows in row_sets.values():
            chosen = [(rows.locate(i), rows[i]) for i in _spread(len(rows), MAX_TRIAL_ROWS)]
            sets.append(chosen)
            for location, row in chosen:
                tries += [self._try(location, row, reply) for reply in TRIAL_REPLIES]
        await asyncio.gather(*tries)
        if not self.failures and self.env.spec.reward_functions():
            for chosen in sets:
                await self._try_golds(chosen)
        return sorted(f"{place}, {failure}" for failure, place in self.failures.items())

    async def _try_golds(self, rows: list[LocatedRow]) -> None:
        """Warns if the gold answer of a row earns no more than a wrong one in all forms."""
        functions = self.env.spec.row_functions().values()
        asked = {column for function in functions for column in required_columns(function)}
        answers = [(*row, golds) for row in rows if (golds := gold_answers(row[1], asked))]
        answers = [answers[i] for i in _spread(len(answers), MAX_GOLD_ROWS)]
        earns = await asyncio.gather(*(self._earns_more(*answer) for answer in answers))
        lacking = [answer for answer, more in zip(answers, earns, strict=True) if not more]
        has_turns = self.env.has_object or self.env.spec.agent or self.max_turns > 1
        if self.failures or not lacking or (has_turns and len(lacking) == len(answers)):
            return
        location, _, golds = lacking[0]
        self.warnings.append(
            f"the gold answer earns no more than a wrong one in {len(lacking)} of {len(answers)} "
            f"rows that were tried, the first at {location}: {golds[0]!r:.60}. See that it is "
            "right and that reward_fn reads it, unless a reply needs more than the answer "
            "(`rl2 env` tries more replies, and those of --form)"
        )

    async def _earns_more(self, location: str, row: dict, golds: list[str]) -> bool:
        """Whether a gold answer of the row earns more than a wrong one in the same form."""
        for form in FORMS + [PROGRAM]:
            wrong = await self._try(location, row, form.replace("{}", WRONG))
            for gold in golds[:MAX_GOLDS]:
                right = await self._try(location, row, form.replace("{}", gold))
                if sum(right.values()) > sum(wrong.values()):
                    return True
        return False

    async def _try(self, location: str, row: dict, reply: str) -> dict[str, float]:
        """Returns the reward parts of a conversation of one reply.

        There are none where it fails whenever it is tried, which is noted, and after that.
        """
        failure: EnvError | None = None
        async with self._slots:
            if self.failures:
                return {}
            for _ in range(TRIAL_TRIES):
                key = ("trial", next(self._keys))
                try:
                    return await play_reply(self.env, self.max_turns, row, reply, key)
                except EnvError as error:
                    failure = error
        self.failures.setdefault(str(failure), f"{location}: with the reply {reply!r}")
        return {}


async def play_reply(
    env: Env, max_turns: int, row: dict, reply: str, key: Hashable
) -> dict[str, float]:
    """Returns the reward parts of a conversation of one reply.

    EnvError if one of its calls fails.
    """
    inputs = TRIAL_INPUTS | {"num_tokens": min(MAX_TRIAL_TOKENS, len(reply) // 4 + 1)}
    parts = {}
    try:
        prompt = await env.begin(row, key)
        messages = prompt + [{"role": "assistant", "content": reply}]
        if env.has_object or (max_turns > 1 and env.spec.interact is not None):
            turn = await env.answer(messages, row, key, inputs)
            parts["turns"] = turn.reward
        if env.spec.step is not None:  # without a model no template writes the prompt
            state = "\n".join(str(message.get("content")) for message in prompt)
            answer = await env.step(state, reply, row.get("extra_info", {}), key)
            parts["turns"] = answer.reward
            if max_turns == 1 and not answer.done:
                raise EnvError(
                    "step: done is false after the first turn, and rollout.max_turns=1 ends the "
                    "trajectory there: set rollout.max_turns to the most turns that it may have"
                )
        add_parts(parts, await env.score(messages, row, key, inputs))
    except EnvError:
        with contextlib.suppress(EnvError):  # which would hide the first one
            await env.end(key)
        raise
    await env.end(key)
    return parts
