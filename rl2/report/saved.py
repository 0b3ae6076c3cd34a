"""Reads the files of a run for commands, and cuts texts to what a page can hold."""

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

from rl2.run.records import DamagedFile, read_object

MAX_CHARACTERS = 40_000  # of all messages of an answer

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


def step_of(path: Path) -> int:
    """The step of a file of `find_steps`."""
    return int(path.stem.removeprefix("step_"))


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
