"""What a call of the environment gives: a checked result of plain data, or EnvError.

A call may run in another process, so nothing here needs more than the standard library.
"""

import json
import numbers
import os
import re
import reprlib
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rl2.env.contract import EnvError, is_env_message, unwrap_reward

LARGEST_REWARD = 3e38  # float32 overflows above it
# In the messages of one turn. Their text is tokenised while the engine waits: a second a million.
MAX_CHARACTERS = 2**20
MAX_NESTING = 50  # lists and objects inside each other in a message; more overflow the stack
# Half of a character outside of Unicode's basic plane. No encoder and no tokenizer takes it alone.
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
# Frames of these files are left out of tracebacks: those of rl2/env and of the import system.
OWN_FILES = (str(Path(__file__).parent) + os.sep, "<frozen importlib")


@contextmanager
def raising_env_error(name: str) -> Iterator[None]:
    """Whatever the function `name` of the env raises inside becomes EnvError, also an exit."""
    try:
        yield
    except EnvError:
        raise
    except BaseException as error:
        text, locations = user_traceback(error)
        text = LONE_SURROGATE.sub("\ufffd", f"{name} raised:\n{text}")
        raise EnvError(text, kind=f"{type(error).__name__} {locations}") from None


def user_traceback(error: BaseException) -> tuple[str, str]:
    """The traceback of `error` without the frames of rl2: (its text, "file:line file:line ...").

    A line that occurs again in a recursion is listed once.
    """
    frame = error.__traceback__
    while frame and frame.tb_frame.f_code.co_filename.startswith(OWN_FILES):
        frame = frame.tb_next
    summaries = traceback.extract_tb(frame)
    locations = dict.fromkeys(f"{summary.filename}:{summary.lineno}" for summary in summaries)
    return "".join(traceback.format_exception(type(error), error, frame)), " ".join(locations)


def check_result(name: str, function: Callable, result: Any) -> Any:
    """What `function` returned, as plain data: messages, a text, or reward parts by name.

    EnvError if it is something else. It is a copy, since the env may change its own later.
    """
    if name in _CHECKS:
        return _CHECKS[name](result)
    return _to_reward_parts(name, unwrap_reward(name, function, result))


def _to_reward_parts(name: str, result: Any) -> dict[str, float]:
    """Reward parts by name. EnvError unless all are finite. A number becomes {"reward": number}."""
    if isinstance(result, list | tuple):
        raise _unexpected(f"{name}: expected the number of one conversation, not a list", result)
    parts = result if isinstance(result, dict) else {"reward": result}
    if not parts or not all(isinstance(part, str) for part in parts):
        raise _unexpected(f"{name}: expected a number or a dict of numbers", result)
    return {
        LONE_SURROGATE.sub("\ufffd", part): _to_reward(name, part, value)
        for part, value in parts.items()
    }


def _to_reward(name: str, part: str, value: Any) -> float:
    number = _to_python(value)
    is_number = isinstance(number, numbers.Real)
    if not is_number:
        raise _unexpected(f"{name}: expected {part} to be a number", value)
    if not abs(number) <= LARGEST_REWARD:  # NaN compares as false, so it is caught too
        raise _unexpected(f"{name}: expected {part} to be finite", value)
    return float(number)


def _to_messages(result: Any) -> list[dict]:
    """What `interact` returned. EnvError unless it is a list of messages and JSON."""
    if not isinstance(result, list) or not all(map(is_env_message, result)):
        raise _unexpected(
            "interact: expected a list of new messages {'role': ..., 'content': ...}, none of them "
            "from the assistant (an empty list ends the conversation)",
            result,
        )
    try:
        # The run folder records messages as JSON.
        text = json.dumps(result, ensure_ascii=False, default=_to_python)
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"{len(text)} characters, a turn may have {MAX_CHARACTERS},")
        messages = json.loads(LONE_SURROGATE.sub("\ufffd", text))
        _check_nesting(messages, MAX_NESTING)
    except (TypeError, ValueError, RecursionError) as error:
        text = f"interact: {error} in {reprlib.repr(result)}"
        raise EnvError(text, kind="result of interact") from None
    return messages


def _to_extract(result: Any) -> str | None:
    """What `extract` returned, as a text; None where the conversation has no answer."""
    value = _to_python(result)
    if value is None:
        return None
    if not isinstance(value, str | numbers.Number):
        raise _unexpected("extract: expected the answer as a text or a number, or None", result)
    return LONE_SURROGATE.sub("\ufffd", str(value))


def _to_python(value: Any) -> Any:
    """A scalar of NumPy or PyTorch as a number of Python. Other values are returned as they are."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def _check_nesting(value: Any, levels: int) -> None:
    if isinstance(value, list | dict):
        if not levels:
            raise ValueError(f"lists and objects are nested more than {MAX_NESTING} deep")
        for item in value.values() if isinstance(value, dict) else value:
            _check_nesting(item, levels - 1)


def _unexpected(expected: str, value: Any) -> EnvError:
    """The env returned something else than what it says in words."""
    return EnvError(f"{expected}, got {reprlib.repr(value)} ({type(value).__name__})", expected)


_CHECKS = {"interact": _to_messages, "extract": _to_extract}
