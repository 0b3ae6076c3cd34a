"""The prompts and answers of transcripts, without what repeats itself.

A prompt is there once for all its answers, and equal answers once with their count.
"""

import json
from itertools import takewhile

from rl2.report.saved import MAX_CHARACTERS, Record, cut, spread

MAX_ANSWERS = 16  # of a group: different ones
# What the page shows of an answer, beside its messages.
COLUMNS = ("reward", "rewards", "advantage", "finish_reason", "length")


def prompt_of(record: Record) -> list[Record]:
    """Returns the messages before the first sampled turn; examples in a prompt have turns too."""
    messages = record.get("messages", [])
    turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    num_sampled = record.get("num_turns", len(turns))
    return messages[: turns[-num_sampled]] if 0 < num_sampled <= len(turns) else messages


def reward_of(record: Record) -> float:
    return record.get("reward") or 0.0


def describe_group(records: list[Record]) -> Record:
    """Returns the messages with which all answers begin, and a sample of the answers."""
    columns = zip(*map(prompt_of, records), strict=False)
    prompt = [first for first, *_ in takewhile(_are_equal, columns)]
    return {
        "group": records[0].get("group"),
        "size": len(records),
        "row": records[0].get("row"),
        "prompt": _cut_messages(prompt),
        "answers": _describe_answers(records, len(prompt)),
    }


def _are_equal(messages: tuple[Record, ...]) -> bool:
    return all(message == messages[0] for message in messages)


def _cut_messages(messages: list[Record]) -> list[Record]:
    return cut(messages, MAX_CHARACTERS // max(1, len(messages)))


def _describe_answers(records: list[Record], start: int) -> list[Record]:
    """Returns a sample of the different answers: their messages from `start`, and their `count`."""
    different: dict[str, Record] = {}
    for record in records:
        answer = {name: record[name] for name in COLUMNS if name in record}
        answer["messages"] = _cut_messages(record.get("messages", [])[start:])
        seen = different.setdefault(json.dumps(answer, sort_keys=True), {**answer, "count": 0})
        seen["count"] += 1
    return spread(list(different.values()), MAX_ANSWERS)
