"""Messages of rows: how they are read, what is refused with the reason, and what only looks odd.

A message is {"role": ..., "content": ...}. Its content is text, and may be missing beside
`tool_calls`, the arguments of which are objects. `weight` is 0 in a reply that is not trained.
"""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

Row = dict[str, Any]  # a row of a data file: the values by column
Message = dict[str, Any]
Messages = str | list[Message]  # or plain text, which gets no template

SYSTEM_ROLES = ("system", "developer")
ROLES = ("system", "developer", "user", "assistant", "tool")
# What each is called in rows, in lower case.
ROLE_NAMES = {role: role for role in ROLES} | {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
}
MEDIA_COLUMNS = ("image", "images", "video", "videos", "audio", "audios")
# The columns of a row, as formats.py reads it, that are conversations.
CONVERSATION_COLUMNS = ("messages", "completion", "chosen", "rejected")
# Fields of a reply that say what of it is trained, for axolotl, ms-swift and torchtune.
OTHER_WEIGHTS = (
    "train",
    "training",
    "trainable",
    "train_detail",
    "loss",
    "loss_scale",
    "masked",
)
# Columns that SFT, DPO and reward models use.
READ_COLUMNS = (
    *CONVERSATION_COLUMNS,
    "prompt",
    "text",
    "tools",
    "system",
    "system_prompt",
    "margin",
    "label",
)
MAX_SHOWN_CHARACTERS = 100  # of a wrong value, in a message


def check_messages(messages: object, column: str = "messages") -> None:
    """ValueError unless the value of the column is text or a list of messages, and not empty."""
    if not isinstance(messages, str | list) or not messages:
        raise ValueError(
            f"column '{column}': expected text or a list of messages, not empty, "
            f"got {abbreviate(messages)}"
        )
    if isinstance(messages, list):
        for message in messages:
            _check_message(message, column)


def read_message(message: Message) -> Message:
    """A message in rl2's form: its role by rl2's name, its content joined, arguments as objects.

    Columnar files give every message the keys of all, with null for those that it lacks, while chat
    templates ask whether a key exists. ValueError for what is no text, no call or no weight.
    """
    message = _drop_nulls(message)
    if isinstance(role := message.get("role"), str):
        message["role"] = ROLE_NAMES.get(role.lower(), role)
    if isinstance(message.get("content"), list):
        message["content"] = join_parts(message["content"])
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        message["tool_calls"] = [_read_call(call) for call in calls]
    weight = message.get("weight", 1)
    if message.get("role") != "assistant":
        if weight == 0:
            del message["weight"]  # as no message but a reply is trained
        return message
    if weight not in (0, 1):
        raise ValueError(
            f"weight={abbreviate(weight)} of a reply: it is trained or not, 1 or 0; repeat a row "
            "to give it more weight"
        )
    for name in OTHER_WEIGHTS:
        if name in message:
            raise ValueError(
                f"{name} of a reply is not read: replies are trained whole; write weight=0 in one "
                "that is not trained, and remove the field"
            )
    message.pop("weight", None)
    return message if weight else message | {"weight": 0}


def join_parts(parts: list) -> str:
    """The text of a content that is a list of parts. ValueError for a part that is no text."""
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else part
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind != "text" or not isinstance(text, str):
            raise ValueError(f"content of type {kind!r} is not supported, only text")
        texts.append(text)
    return "".join(texts)


def _read_call(call: object) -> Any:
    """A call of a tool with its arguments as an object."""
    if not isinstance(call, dict):
        raise ValueError(f"tool_calls: expected an object, got {abbreviate(call)}")
    call = _drop_nulls(call)
    if isinstance(call.get("function"), dict):
        return call | {"function": _read_call(call["function"])}
    arguments = call.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            pass  # refused below
    if not isinstance(arguments, dict):
        raise ValueError(
            "tool_calls: expected arguments that are an object, or its JSON text, got "
            f"{abbreviate(call['arguments'])}"
        )
    return call | {"arguments": arguments}


def _drop_nulls(value: dict) -> dict:
    return {name: item for name, item in value.items() if item is not None}


def ends_with_reply(messages: Messages) -> bool:
    """Whether the last message is the assistant's."""
    return isinstance(messages, list) and messages[-1]["role"] == "assistant"


def check_ends_before_reply(messages: Messages) -> None:
    """ValueError if the last message is the assistant's: then there is no reply left to give."""
    if ends_with_reply(messages):
        raise ValueError(
            "column 'messages': expected a prompt, but the last message is the assistant's; remove "
            "it, keep it in another column such as answer, or read another column as the prompt: "
            "data.columns.OLD=messages"
        )


def check_reply(messages: list[Message], column: str = "messages") -> None:
    """ValueError unless a message of the assistant says something."""
    replies = [message for message in messages if message["role"] == "assistant"]
    if not replies:
        raise ValueError(
            f"column '{column}': no message of the assistant to train on; add one, or remove the "
            "row"
        )
    replies = [message for message in replies if is_trained(message)]
    if not replies:
        raise ValueError(f"column '{column}': every reply has weight 0; remove the row")
    if not any(message.get("tool_calls") or message["content"].strip() for message in replies):
        raise ValueError(f"column '{column}': every reply of the assistant is empty")


def is_trained(message: Message) -> bool:
    """Whether a message is a reply that is trained."""
    return message["role"] == "assistant" and message.get("weight") != 0


def check_text(text: object, column: str) -> str:
    """The value of the column. ValueError if it is empty or no text."""
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"column '{column}': expected text, not empty, got {abbreviate(text)}")
    return text


def find_oddities(row: Row) -> list[str]:
    """Warnings of what is allowed but seldom meant. ValueError for images, videos and sounds."""
    warnings = []
    messages = row["messages"]
    roles = {message["role"] for message in messages} if isinstance(messages, list) else set()
    for role in sorted(roles - set(ROLES)):
        warnings.append(f"warning: the role {role!r} is unusual: see that the chat template has it")
    for column in MEDIA_COLUMNS:
        if row.get(column):
            raise ValueError(
                f"column {column!r}: the model reads text; remove the row, or, if its messages are "
                f"whole without it, rename the column: data.columns.{column}=unused"
            )
    return warnings


def find_unread(row: Row) -> list[str]:
    """Names the columns that are not used: to other trainers they may change what is trained."""
    empty: tuple = (None, "", [], {})
    unread = [
        repr(name) for name, value in row.items() if name not in READ_COLUMNS and value not in empty
    ]
    return [f"columns neither shown nor trained: {', '.join(unread)}"] if unread else []


def read_column(row: Row, column: str) -> object:
    """The value in a column. ValueError if the row lacks it."""
    if column not in row:
        raise ValueError(f"column '{column}' is missing; {describe_columns(row, column)}")
    return row[column]


def describe_columns(row: Row, missing: str) -> str:
    """What the row has, and the remedy for the column that it lacks."""
    remedy = f"data.columns.OLD={missing} renames a column"
    if missing == "messages":
        remedy = f"prompt and conversations are read too; {remedy}"
    return f"the row has {', '.join(row) or 'no column'}; {remedy}"


def abbreviate(value: object) -> str:
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


def _check_message(message: object, column: str) -> None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(
            f"column '{column}': expected {{'role': ..., 'content': ...}}, "
            f"got {abbreviate(message)}"
        )
    if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
        raise ValueError(
            f"column '{column}': expected content that is text, got {abbreviate(message)}"
        )


def describe_form(row: Row) -> tuple:
    """What the rendering of a row depends on, apart from its texts. Equal for rows of one form."""
    conversations: list[object] = []
    for column in CONVERSATION_COLUMNS:
        value = row.get(column)
        if isinstance(value, dict):
            value = [value]
        if isinstance(value, list):
            forms = [()] + [_describe_message(message) for message in value] + [()]
            # Pairs of neighbours, so that conversations of all lengths have few forms.
            conversations.append(frozenset(pairwise(forms)))
        else:
            conversations.append(type(value))
    return (*row, *conversations, bool(row.get("tools")))


def _describe_message(message: Message) -> tuple:
    content = str(message.get("content") or "").lstrip()
    is_tagged = content[:1] in ("<", "[") and ("</" in content or "[/" in content)
    fields = (name for name, value in message.items() if value)
    return (*fields, message["role"], bool(content), is_tagged)
