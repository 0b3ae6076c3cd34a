"""Checks of messages: what is refused with the reason, and what only looks odd.

A message is {"role": ..., "content": ...}. Its content is text or a list of parts, and may be
missing beside `tool_calls`.
"""

from collections.abc import Sequence
from typing import Any

Messages = str | list[dict[str, Any]]

ROLES = ("system", "developer", "user", "assistant", "tool")
# Names that mean one of these. A template that writes any role would pass them to the model.
MISTAKEN_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
MEDIA_COLUMNS = ("image", "images", "video", "videos", "audio", "audios")
MAX_SHOWN_CHARACTERS = 100  # of a wrong value, in a message


def check_messages(messages: Any, column: str = "messages") -> None:
    """ValueError unless the value of the column is text or a list of messages, and not empty."""
    if not isinstance(messages, str | list) or not messages:
        raise ValueError(
            f"column '{column}': expected text or a list of messages, not empty, "
            f"got {abbreviate(messages)}"
        )
    if isinstance(messages, list):
        for message in messages:
            _check_message(message, column)


def ends_with_reply(messages: Messages) -> bool:
    """Whether the last message is the assistant's."""
    return isinstance(messages, list) and messages[-1]["role"] == "assistant"


def check_ends_before_reply(messages: Messages) -> None:
    """ValueError if the last message is the assistant's: then there is no reply left to give."""
    if ends_with_reply(messages):
        raise ValueError(
            "column 'messages': expected a prompt, but the last message is the assistant's; remove "
            "it, or keep it in another column such as answer"
        )


def check_reply(messages: list[dict], column: str = "messages") -> None:
    """ValueError unless a message of the assistant says something."""
    replies = [message for message in messages if message["role"] == "assistant"]
    if not replies:
        raise ValueError(
            f"column '{column}': no message of the assistant to train on; add one, or remove the "
            "row"
        )
    if not any(_says_something(message) for message in replies):
        raise ValueError(f"column '{column}': every reply of the assistant is empty")


def check_text(text: Any, column: str) -> str:
    """The value of the column. ValueError if it is empty or no text."""
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"column '{column}': expected text, not empty, got {abbreviate(text)}")
    return text


def find_oddities(row: dict) -> list[str]:
    """Warnings of what is allowed but seldom meant."""
    warnings = []
    messages = row["messages"]
    roles = [message["role"] for message in messages] if isinstance(messages, list) else []
    for role in sorted({*roles} - {*ROLES}):
        warnings.append(f"warning: the role {role!r} is unusual: see that the chat template has it")
    if roles and not {*roles} - {"system", "developer"}:
        warnings.append("warning: the conversation has no message of the user")
    for column in MEDIA_COLUMNS:
        if row.get(column):
            warnings.append(f"warning: column {column!r} is not shown to the model: it reads text")
    return warnings


def read_column(row: dict, column: str) -> Any:
    """The value in a column. ValueError if the row lacks it."""
    if column not in row:
        raise ValueError(f"column '{column}' is missing; {describe_columns(row, column)}")
    return row[column]


def describe_columns(row: dict, missing: str) -> str:
    """What the row has, and the remedy for the column that it lacks."""
    remedy = f"data.columns.OLD={missing} renames a column"
    if missing == "messages":
        remedy = f"prompt and conversations are read too; {remedy}"
    return f"the row has {', '.join(row) or 'no column'}; {remedy}"


def abbreviate(value: Any) -> str:
    """A value as a message shows it."""
    text = repr(value)
    if len(text) <= MAX_SHOWN_CHARACTERS:
        return text
    return text[:MAX_SHOWN_CHARACTERS] + "..."


def common_prefix_length(left: Sequence, right: Sequence) -> int:
    """How many items at the beginning of two sequences are equal."""
    shorter = min(len(left), len(right))
    differences = (i for i in range(shorter) if left[i] != right[i])
    return next(differences, shorter)


def _check_message(message: Any, column: str) -> None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(
            f"column '{column}': expected {{'role': ..., 'content': ...}}, "
            f"got {abbreviate(message)}"
        )
    role = message["role"]
    known = MISTAKEN_ROLES.get(role.lower(), role.lower())
    if role != known and known in ROLES:
        raise ValueError(f"column '{column}': the role {role!r} is unknown; write {known!r}")
    content = message.get("content")
    if not isinstance(content, str | list) and not message.get("tool_calls"):
        raise ValueError(
            f"column '{column}': expected content that is text or a list, got {abbreviate(message)}"
        )
    for part in content if isinstance(content, list) else []:
        if isinstance(part, dict) and part.get("type", "text") != "text":
            raise ValueError(
                f"column '{column}': content of type {part['type']!r} is not supported, only text"
            )


def _says_something(message: dict) -> bool:
    content = message.get("content")
    has_text = bool(content.strip()) if isinstance(content, str) else bool(content)
    return has_text or bool(message.get("tool_calls"))
