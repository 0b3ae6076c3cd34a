"""The process of an env file: it imports the file, and runs its functions one call at a time.

rl2/env/processes.py starts it. Nothing of the trainer is imported here.
"""

import inspect
import json
import os
import pickle
from collections.abc import Hashable
from contextlib import suppress
from functools import cache
from typing import Any

from rl2.cleanup import end_with_parent
from rl2.env.contract import EnvError
from rl2.env.results import check_result, raising_env_error
from rl2.env.session import Sessions
from rl2.output import outlive_readers
from rl2.user_files import import_env_file


def serve(descriptor: int, path: str) -> None:
    """Imports the env file `path` and answers calls on the socket until the trainer closes it.

    A call is a pickle, an answer is a line of JSON. The first answer is that of the import.
    """
    end_with_parent()  # where that does nothing, it ends after its call: the socket has ended
    # Whole lines, also with PYTHONUNBUFFERED: those of several processes do not mix.
    outlive_readers()
    # Processes that the env starts must not hold the socket: its end tells that this one ended.
    os.set_inheritable(descriptor, False)
    os.register_at_fork(after_in_child=lambda: os.close(descriptor))
    with (
        suppress(EOFError, ConnectionError),  # the trainer has ended
        open(descriptor, "rb") as calls,
        open(descriptor, "wb", closefd=False) as answers,
    ):
        answer: dict[str, object] = {"value": None}
        sessions = Sessions({})
        try:
            sessions = Sessions(vars(import_env_file(path)))
        except ValueError as error:
            answer = {"reason": str(error), "kind": str(error)}
        while True:
            answers.write(json.dumps(answer).encode() + b"\n")
            answers.flush()
            answer = _answer(sessions, *pickle.load(calls))


def _answer(sessions: Sessions, name: str, key: Hashable, arguments: bytes) -> dict[str, object]:
    try:
        with raising_env_error(name), sessions.open(name, key) as function:
            result = function(**pickle.loads(arguments))
            if inspect.isawaitable(result):
                result = _event_loop().run_until_complete(result)
            return {"value": check_result(name, result)}
    except EnvError as error:
        return {"reason": str(error), "kind": error.kind}


@cache
def _event_loop() -> Any:
    """One loop for all calls, so that sessions which the env opens on it stay usable."""
    import asyncio  # here, since few envs need it and every process would load it

    return asyncio.new_event_loop()
