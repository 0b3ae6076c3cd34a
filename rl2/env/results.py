"""What a call of the environment gives: a checked result of plain data, or EnvError.

A call may run in another process, so nothing here needs more than the standard library.
"""

import json
import numbers
import re
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rl2.data.messages import join_parts
from rl2.env.contract import TOOL, EnvError
from rl2.user_files import user_traceback

LARGEST_REWARD = 3e38  # float32 overflows above it
# In the messages of one turn. Their text is tokenised while the engine waits: a second a million.
MAX_CHARACTERS = 2**20
MAX_NESTING = 50  # lists and objects inside each other in a message; more overflow the stack
# The reward part that a number becomes, where it is not "reward".
PARTS = {
    "environment.reward": "environment",
    "environment.get_reward": "environment",
    "group_reward_fn": "group",
    "run": "run",
    "play": "play",
}
# Half of a character outside of Unicode's basic plane. No encoder and no tokenizer takes it alone.
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@contextmanager
def raising_env_error(name: str) -> Iterator[None]:
    """Whatever the function `name` of the env raises inside becomes EnvError, also an exit.

    What a tool raises is for the model to read: EnvError of the kind TOOL, with one line.
    """
    try:
        yield
    except EnvError:
        raise
    except BaseException as error:
        if name.startswith(TOOL) and isinstance(error, Exception):
            text = _to_text(f"error: {type(error).__name__}: {error}")
            raise EnvError(text, kind=TOOL) from None
        text, locations = user_traceback(error)
        text = LONE_SURROGATE.sub("\ufffd", f"{name} raised:\n{text}")
        raise EnvError(text, kind=f"{type(error).__name__} {locations}") from None


def check_result(name: str, result: object) -> Any:
    """What a function returned, as plain data: a turn, messages, a text, or reward parts by name.

    EnvError if it is something else. It is a copy, since the env may change its own later.
    """
    if name.startswith(TOOL):
        return _to_tool_result(result)
    if name in _CHECKS:
        return _CHECKS[name](name, result)
    return _to_reward_parts(name, result)


def _to_reward_parts(name: str, result: object) -> dict[str, float]:
    """Reward parts by name. EnvError unless all are finite. A number has the name of PARTS."""
    if isinstance(result, list | tuple):
        raise _unexpected(f"{name}: expected the number of one conversation, not a list", result)
    parts = result if isinstance(result, dict) else {PARTS.get(name, "reward"): result}
    if not parts or not all(isinstance(part, str) for part in parts):
        raise _unexpected(f"{name}: expected a number or a dict of numbers", result)
    return {
        LONE_SURROGATE.sub("\ufffd", part): _to_reward(name, part, value)
        for part, value in parts.items()
    }


def _to_reward(name: str, part: str, value: object) -> float:
    number = _to_python(value)
    is_number = isinstance(number, numbers.Real)
    if not is_number:
        raise _unexpected(f"{name}: expected {part} to be a number", value)
    if not abs(number) <= LARGEST_REWARD:  # NaN compares as false, so it is caught too
        raise _unexpected(f"{name}: expected {part} to be finite", value)
    return float(number)


def _to_group(name: str, result: object) -> list[dict[str, float]]:
    """Returns the reward parts of each trajectory of a group."""
    if not isinstance(result, list | tuple):
        raise _unexpected(f"{name}: expected a list with the reward of each trajectory", result)
    return [_to_reward_parts(name, reward) for reward in result]


def _to_turn(name: str, result: object) -> dict[str, object]:
    """Returns what `interact` or `step` returned, as the fields of a Turn."""
    if isinstance(result, tuple):  # of Gymnasium, or its elder with one flag
        observation, reward, *flags = result
        done = any(flag for flag in flags if not isinstance(flag, dict))
        result = {"messages": observation, "reward": reward, "done": done}
    turn = result if isinstance(result, dict) else {"messages": result}
    if turn.keys() - {"messages", "reward", "done"}:
        raise _unexpected(f"{name}: expected messages, reward and done alone", result)
    messages = turn.get("messages", [])
    if name != "interact" and isinstance(messages, str | None):
        messages = [{"role": "user", "content": messages}] if messages else []
    return {
        "messages": to_messages(name, messages),
        "reward": _to_reward(name, "reward", turn.get("reward", 0.0)),
        "done": bool(turn.get("done")),
    }


def _to_text_turn(name: str, result: object) -> dict[str, object]:
    """Returns what `step` of the env file returned, as the fields of a TextTurn."""
    if not isinstance(result, dict) or not {"reward", "done", "extra_info"} <= result.keys():
        raise _unexpected(f"{name}: expected next_state, reward, score, done, extra_info", result)
    state, extra_info, reward = result.get("next_state"), result["extra_info"], result["reward"]
    try:
        json.dumps(extra_info)  # it may cross processes
    except (TypeError, ValueError, RecursionError):
        raise _unexpected(f"{name}: expected extra_info to be JSON", extra_info) from None
    if not isinstance(state, str | None):
        raise _unexpected(f"{name}: expected next_state to be a text", state)
    return {
        "reward": _to_reward(name, "reward", reward),
        "score": _to_reward(name, "score", result.get("score", reward)),
        "done": bool(result["done"]),
        "extra_info": extra_info,
        "next_state": state and LONE_SURROGATE.sub("\ufffd", state),
    }


def _to_observation(name: str, result: object) -> str:
    """Returns what `reset` returned: a text or nothing. Gymnasium's tuple begins with it."""
    observation = result[0] if isinstance(result, tuple) else result
    if not isinstance(observation, str | None):
        raise _unexpected(f"{name}: expected a text for the end of the prompt, or None", result)
    return _to_text(observation or "")


def _to_text(text: str) -> str:
    """Returns a text that the policy sees."""
    return LONE_SURROGATE.sub("\ufffd", text[:MAX_CHARACTERS])


def _to_tool_result(result: object) -> str:
    """Returns what a tool returned, as the text that the model sees: JSON unless it is a text."""
    if isinstance(result, str):
        return _to_text(result)
    return _to_text(json.dumps(result, ensure_ascii=False, default=str))


def to_messages(name: str, result: object) -> list[dict]:
    """New messages of the environment. EnvError unless they are a list of messages and JSON."""
    if not isinstance(result, list) or not all(map(_is_env_message, result)):
        raise _unexpected(
            f"{name}: expected a list of new messages {{'role': ..., 'content': ...}}, none of "
            "them from the assistant (an empty list ends the conversation)",
            result,
        )
    try:
        # The run folder records messages as JSON.
        text = json.dumps(result, ensure_ascii=False, default=_to_python)
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"{len(text)} characters, a turn may have {MAX_CHARACTERS},")
        messages = json.loads(LONE_SURROGATE.sub("\ufffd", text))
        check_nesting(messages)
        for message in messages:
            if isinstance(message["content"], list):
                message["content"] = join_parts(message["content"])
    except (TypeError, ValueError, RecursionError) as error:
        text = f"{name}: {error} in {reprlib.repr(result)}"
        raise EnvError(text, kind=f"result of {name}") from None
    return messages


def _is_env_message(message: object) -> bool:
    """Whether `message` is one that `interact` may return."""
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        # The assistant's role means that the env returned the whole conversation by mistake.
        and message["role"] != "assistant"
        and isinstance(message.get("content"), str | list)
    )


def _to_agent_parts(name: str, result: object) -> dict[str, float]:
    """Returns the reward parts of `run` or `play`; none if it leaves them to reward_fn."""
    return {} if result is None else _to_reward_parts(name, result)


def _to_nothing(name: str, result: object) -> None:
    """Calls whose result is not used."""


def _to_python(value: Any) -> Any:
    """Returns a scalar of NumPy or PyTorch as a number of Python.

    Other values are returned as they are.
    """
    return value.item() if getattr(value, "ndim", None) == 0 else value


def check_nesting(value: object, levels: int = MAX_NESTING) -> None:
    """ValueError if lists and objects are nested too deep in a JSON value."""
    if isinstance(value, list | dict):
        if not levels:
            raise ValueError(f"lists and objects are nested more than {MAX_NESTING} deep")
        for item in value.values() if isinstance(value, dict) else value:
            check_nesting(item, levels - 1)


def _unexpected(expected: str, value: object) -> EnvError:
    """Returns the error of a result that is not the expected one."""
    return EnvError(f"{expected}, got {reprlib.repr(value)} ({type(value).__name__})", expected)


_CHECKS = {
    "interact": _to_turn,
    "step": _to_text_turn,
    "group_reward_fn": _to_group,
    "run": _to_agent_parts,
    "play": _to_agent_parts,
    "make_env": _to_nothing,
    "environment.reset": _to_observation,
    "environment.step": _to_turn,
    "environment.close": _to_nothing,
}
