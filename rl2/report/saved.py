"""Reads the files of a run for commands, and cuts them to what a page can hold.

A prompt is there once for all its answers, and equal answers once with their count.
"""

import json
import math
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from rl2.run.records import DamagedFile, read_object, step_of

MAX_CHARACTERS = 40_000  # of all messages of an answer
MAX_ANSWERS = 16  # of a group: different ones
# What the page shows of an answer, beside its messages.
COLUMNS = ("reward", "rewards", "advantage", "finish_reason", "length")

Record = dict[str, Any]  # an object of JSON


def read_lines(path: Path) -> tuple[list[Record], int]:
    """Returns the objects of a JSONL file, and how many lines are broken, as after a kill."""
    records = []
    lines = path.read_bytes().splitlines() if path.is_file() else []
    for line in lines:
        with suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict):
                records.append(record)
    return records, len(lines) - len(records)


def find_steps(split: Path) -> list[Path]:
    """Returns the transcripts of a split, such as rollouts/train, in the order of their steps."""
    return sorted(split.glob("step_*.jsonl"), key=step_of)


def read_yaml(path: Path) -> Record | None:
    """Returns the content of config.yaml or run.json; None if it is missing or broken."""
    with suppress(DamagedFile):
        return read_object(path) or None
    return None


def spread(items: list, most: int) -> list:
    """Returns at most `most` of the items, evenly spaced, with the first and the last one."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def to_json(value: Any) -> str:
    """Returns the value as short JSON: long texts are cut, and NaN is null."""
    return json.dumps(cut(value, 2 * MAX_CHARACTERS), separators=(",", ":"), default=str)


def cut(value: Any, limit: int) -> Any:
    """Returns a copy for JSON: texts of at most about `limit` characters, and null for NaN."""
    if isinstance(value, dict):
        return {str(name): cut(part, limit) for name, part in value.items()}
    if isinstance(value, list):
        return [cut(part, limit) for part in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, str) and len(value) > limit:
        half = limit // 2
        num_left_out = len(value) - 2 * half
        return f"{value[:half]} [... {num_left_out:,} characters left out ...] {value[-half:]}"
    return value


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
