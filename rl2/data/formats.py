"""Rows of other projects, in the form that rl2 works with.

- PPO: `messages`, a prompt, and whatever the environment asks for, often `answer`.
- SFT: `messages`, a conversation whose replies are trained; or `messages`, a prompt, and
  `completion`; or `text`.
- Pairs of DPO and reward models: `messages`, a prompt, with `chosen` and `rejected`.
- Labelled replies of KTO: `messages`, a prompt, with `completion` and `label`; or pairs.

Each `read_*_row` takes a row and returns it in this form with notes that say how it was read. Other
columns stay. ValueError tells why a row does not suit.
"""

import json
import math
from collections.abc import Collection, Iterable
from typing import Any

from rl2.data.messages import (
    ROLE_NAMES,
    SYSTEM_ROLES,
    Message,
    Messages,
    Row,
    abbreviate,
    check_ends_before_reply,
    check_messages,
    check_reply,
    check_text,
    common_prefix_length,
    describe_columns,
    ends_with_reply,
    find_oddities,
    find_unread,
    read_column,
    read_message,
)

ReadRow = tuple[Row, list[str]]  # the row, and notes

SHAREGPT_ROLES = ROLE_NAMES | {"observation": "tool"}
SYSTEM_COLUMNS = ("system", "system_prompt")
CONVERSATIONS = ("messages", "conversations", "prompt")  # the first that a row has is read
INPUT_COLUMNS = ("input", "context")  # what the question in another column is about
NO_TEMPLATE = (
    "text in prompt is read as it is, without the chat template, as for a base model; a chat model "
    'needs [{"role": "user", "content": TEXT}]'
)


def rename_columns(row: Row, columns: dict[str, str]) -> Row:
    """The row with the columns renamed: old name -> new name, as in data.columns."""
    missing = [name for name in columns if name not in row]
    if missing:
        raise ValueError(
            f"data.columns renames {', '.join(missing)}, which the row lacks; "
            f"the row has {', '.join(row)}"
        )
    replaced = columns.keys() | set(columns.values())
    return _without(row, replaced) | {new: row[old] for old, new in columns.items()}


def read_ppo_row(row: Row) -> ReadRow:
    """A prompt. verl's rows have the answer in `reward_model`, RL2's in `extra_info`."""
    row, notes = _read_messages(row)
    check_ends_before_reply(row["messages"])
    reward_model, extra_info = row.get("reward_model"), row.get("extra_info")
    if "answer" not in row and "gt_answer" in row:
        row["answer"] = row["gt_answer"]
        notes.append("gt_answer is read as answer")
    elif "answer" not in row and isinstance(reward_model, dict) and "ground_truth" in reward_model:
        row["answer"] = reward_model["ground_truth"]
        notes.append("reward_model.ground_truth is read as answer")
    elif "answer" not in row and isinstance(extra_info, dict) and "answer" in extra_info:
        row["answer"] = extra_info["answer"]
        notes.append("extra_info.answer is read as answer")
    return row, notes + find_oddities(row)


def read_sft_row(row: Row) -> ReadRow:
    """A conversation, or a prompt with the completion that is trained, or text."""
    completion = _first_column(row, ("completion", "response"))
    if completion is None and "instruction" in row:
        completion = _first_column(row, ("output",))
    source = _first_column(row, CONVERSATIONS)
    if completion is None and {"chosen", "rejected"} <= row.keys():
        raise ValueError(
            "this is a pair of replies: train on it with rl2.trainer.dpo or rl2.trainer.rm, or on "
            "the chosen ones with data.columns.chosen=completion"
        )
    if "text" in row and (source is None or source == "prompt" and completion is None):
        return row | {"messages": check_text(row["text"], "text")}, []
    if source == "prompt" and completion is None:
        columns = describe_columns(row, "completion")
        raise ValueError(f"column 'prompt' needs 'completion' beside it; {columns}")
    row, notes = _read_messages(row)
    reply = row.pop(completion) if completion else None
    row.pop("completion", None)
    notes += find_unread(row)
    if completion and not ends_with_reply(row["messages"]):
        row["completion"] = _to_reply(reply, completion)
        notes.append(f"{completion} is read as the reply that is trained")
        return row, notes + find_oddities(row)
    if reply:
        notes.append(f"column {completion!r} is not read: the messages end with a reply")
    if isinstance(row["messages"], list):
        check_reply(row["messages"])
    return row, notes + find_oddities(row)


def read_pair_row(row: Row) -> ReadRow:
    """A prompt with two replies, each text or the assistant's message.

    Where `chosen` and `rejected` are conversations, or there is no prompt, the prompt is what both
    begin with.
    """
    chosen = _to_messages(read_column(row, "chosen"))
    rejected = _to_messages(read_column(row, "rejected"))
    if chosen == rejected:
        raise ValueError(
            f"'chosen' and 'rejected' are the same text; remove the row: {abbreviate(chosen)}"
        )
    notes = []
    shared = _shared_prompt(chosen, rejected)
    has_prompt = _first_column(row, CONVERSATIONS + ("instruction",)) is not None
    if isinstance(chosen, list) and shared or not has_prompt:
        check_messages(shared)
        row = row | {"messages": shared}
        chosen, rejected = chosen[len(shared) :], rejected[len(shared) :]
        notes.append("what chosen and rejected begin with is read as the prompt")
    else:
        row, notes = _read_messages(row)
    check_ends_before_reply(row["messages"])
    row["chosen"] = _to_reply(chosen, "chosen", is_one_message=True)
    row["rejected"] = _to_reply(rejected, "rejected", is_one_message=True)
    pair_margin(row)  # its check
    return row, notes + find_unread(row) + find_oddities(row)


def read_labelled_row(row: Row) -> ReadRow:
    """A prompt with one reply in `completion` and whether it is desirable in `label`, or a pair.

    The reply is text or the assistant's message. The chosen reply of a pair counts as desirable,
    the rejected one as undesirable.
    """
    if is_pair(row):
        row, notes = read_pair_row(row)
        return row, notes + ["chosen is read as a desirable reply, rejected as an undesirable one"]
    labels(row)  # its check
    given = row
    row, notes = _read_messages(given)
    if given.get("completion") is None and ends_with_reply(row["messages"]):
        completion = row["messages"].pop()
        notes.append("the last message is read as the completion")
    else:
        completion = read_column(given, "completion")
    check_ends_before_reply(row["messages"])
    row["completion"] = _to_reply(completion, "completion", is_one_message=True)
    return row, notes + find_unread(row) + find_oddities(row)


def is_pair(row: Row) -> bool:
    """Whether a row of `read_labelled_row` has two replies in the place of one with a label."""
    return row.get("label") is None and {"chosen", "rejected"} <= row.keys()


def labels(row: Row) -> list[bool]:
    """Whether each reply of a row of `read_labelled_row` is desirable."""
    if is_pair(row):
        return [True, False]
    label = read_column(row, "label")
    if isinstance(label, str):  # as csv has it
        label = {"true": True, "false": False, "1": True, "0": False}.get(label.lower(), label)
    if label not in (True, False):  # 1 and 0 too, which columns of numbers have
        raise ValueError(
            f"column 'label': expected true (a desirable reply) or false, got {abbreviate(label)}"
        )
    return [bool(label)]


def pair_margin(row: Row) -> float:
    """By how much the chosen reply is better: the number in column `margin`, or 0 without one."""
    try:
        margin = float(row.get("margin") or 0)
    except (TypeError, ValueError):
        margin = math.nan
    if not math.isfinite(margin):
        raise ValueError(f"column 'margin': expected a number, got {abbreviate(row['margin'])}")
    return margin


def _read_messages(row: Row) -> ReadRow:
    """The row with `messages`, which may be one message, `prompt` or ShareGPT's conversations.

    Without any of these it is the `instruction` of Alpaca. A column with the system prompt becomes
    the first message, unless the messages have their own.
    """
    notes: list[str] = []
    if _first_column(row, CONVERSATIONS) is None and "instruction" in row:
        row, notes = _read_instruction(row)
    source = _first_column(row, CONVERSATIONS) or "messages"
    value = read_column(row, source)
    messages = _to_messages(value)
    check_messages(messages)
    if source != "messages":
        notes.append(f"{source} is read as messages")
    others = _without(row, (source,))
    system = next((name for name in SYSTEM_COLUMNS if name in row), None)
    if system is not None:
        # A text beside a system prompt is what the user says, as in rows of Orca.
        messages = (
            [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        )
        text = row[system]
        if text and messages[0]["role"] not in SYSTEM_ROLES:
            messages = [{"role": "system", "content": check_text(text, system)}] + messages
            notes.append(f"{system} is read as the system message")
        elif text:
            notes.append(f"warning: {system} is not read: the messages have a system message")
    elif source == "prompt" and isinstance(value, str):
        notes.append(NO_TEMPLATE)
    if any(message.get("weight") == 0 for message in messages if isinstance(message, dict)):
        notes.append("replies of weight 0 are not trained")
    if isinstance(others.get("tools"), list):
        others["tools"] = [_to_tool(tool) for tool in others["tools"]]
    return others | {"messages": messages}, notes


def _read_instruction(row: Row) -> ReadRow:
    """Alpaca's row with `messages`: `instruction` and its input, in lines."""
    if row.get("history"):
        raise ValueError("column 'history' is not read: write the conversation as messages")
    names = ["instruction"] + [name for name in INPUT_COLUMNS if row.get(name)]
    question = "\n".join(check_text(row[name], name) for name in names)
    note = f"the message of the user is read from {' and '.join(names)}"
    messages = [{"role": "user", "content": question}]
    return _without(row, names) | {"messages": messages}, [note]


def _to_tool(tool: object) -> object:
    """The schema of a tool, which chat templates expect inside of `function`."""
    if isinstance(tool, dict) and "name" in tool and not tool.keys() & {"function", "type"}:
        return {"type": "function", "function": tool}
    return tool


def _without(row: Row, names: Collection[str]) -> Row:
    return {name: value for name, value in row.items() if name not in names}


def _first_column(row: Row, names: Iterable[str]) -> str | None:
    """The first of the columns that the row has, with a value."""
    return next((name for name in names if row.get(name) is not None), None)


def _to_messages(value: object) -> Any:
    """A list for one message, and role and content for ShareGPT's from and value."""
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        return value
    return [_to_message(message) for message in value]


def _to_message(message: object) -> object:
    if not isinstance(message, dict):
        return message
    if "role" not in message and {"from", "value"} <= message.keys():
        sender, text = message["from"], message["value"]
        others = _without(message, ("from", "value"))
        if sender == "function_call":
            message = {"role": "assistant", "tool_calls": _to_calls(text)} | others
        elif sender in SHAREGPT_ROLES:
            message = {"role": SHAREGPT_ROLES[sender], "content": text} | others
        else:
            known = ", ".join([*SHAREGPT_ROLES, "function_call"])
            raise ValueError(
                f"column 'conversations': from={sender!r} is unknown; it may be {known}"
            )
    return read_message(message)


def _to_calls(text: Any) -> list[dict]:
    """Calls of tools from the JSON of one or of a list, as LLaMA-Factory has them."""
    try:
        calls = json.loads(text)
    except (TypeError, ValueError):
        calls = None
    calls = [calls] if isinstance(calls, dict) else calls
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(
            f"from='function_call': expected a call in JSON, with name and arguments, got "
            f"{abbreviate(text)}"
        )
    return [{"type": "function", "function": call} for call in calls]


def _to_reply(value: object, column: str, is_one_message: bool = False) -> Messages | Message:
    """A reply: its text, or the message of the assistant if it has more than a text.

    Unless `is_one_message`, it may be several messages, and is a list then.
    """
    messages = _to_messages(value)
    if not isinstance(messages, list):
        return check_text(messages, column)
    check_messages(messages, column)
    if not is_one_message:
        check_reply(messages, column)
        return messages
    if len(messages) > 1 or messages[0]["role"] != "assistant":
        raise ValueError(
            f"column '{column}': expected one message of the assistant after the prompt, "
            f"got {abbreviate(messages)}"
        )
    check_reply(messages, column)
    [message] = messages
    return message["content"] if message.keys() == {"role", "content"} else message


def _shared_prompt(chosen: Any, rejected: Any) -> Any:
    """What two conversations, or two texts, begin with. A text ends before a space."""
    if type(chosen) is not type(rejected) or not isinstance(chosen, str | list):
        return []
    length = common_prefix_length(chosen, rejected)
    if isinstance(chosen, str) and chosen[length - 1 : length] == " ":
        length -= 1
    return chosen[:length]
