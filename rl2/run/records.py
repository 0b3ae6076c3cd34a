"""The small files of a run: a kill leaves the old or the new one, and damage is named."""

import json
import math
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from rl2.error_report import writing

Record = dict[str, Any]  # an object of JSON: a line of metrics.jsonl, or a trajectory
NOT_METRICS = {"weights", "warnings"}  # what a line has beside numbers
NO_STEP = -1  # below all steps
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # that of libyaml is ten times as fast


class DamagedFile(ValueError):
    """A file that is not what the run wrote. The message names it."""

    def __init__(self, path: Path, reason: str):
        self.path = path
        self.reason = " ".join(reason.split())
        super().__init__(f"{path} is damaged: {self.reason}")


def step_of(path: Path) -> int:
    """The N of a file or folder step_N, whatever its ending; NO_STEP for other names."""
    match = re.fullmatch(r"step_(\d+)", path.name.partition(".")[0])
    return int(match[1]) if match else NO_STEP


def read_object(path: Path) -> Record:
    """Returns the content of a JSON or YAML file, {} without the file.

    DamagedFile if it is not a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else yaml.load(text, YAML_LOADER)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DamagedFile(path, str(error)) from error
    if not isinstance(content, dict):
        got = "it is empty" if content is None else f"got {str(content)[:40]!r}"
        raise DamagedFile(path, f"expected keys and values, {got}")
    return content


def write_object(path: Path, content: Record) -> None:
    """Replaces a JSON file."""
    write_text(path, json.dumps(content, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replaces the file. A kill leaves the old one or the new one."""
    partial = path.with_suffix(".partial")
    with writing(path):
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # or a power failure may leave an empty file with this name
        partial.replace(path)


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


class MetricsFile:
    """metrics.jsonl in the run folder: one object a step."""

    def __init__(self, folder: Path):
        self.path = folder / "metrics.jsonl"

    def write(
        self,
        metrics: dict[str, float],
        hashes: dict[str, str],
        warnings: dict[str, str] | None = None,
    ) -> None:
        """Adds the line of a step, with the hash of each worker's weights.

        `warnings` says what went wrong in the step, and why.
        """
        line: Record = {name: _to_json_number(value) for name, value in metrics.items()}
        if hashes:
            line["weights"] = hashes
        if warnings:
            line["warnings"] = warnings
        with writing(self.path), open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            # A checkpoint of this step may follow, and must not reach the disk before the line.
            os.fsync(file.fileno())

    def read(self) -> list[Record]:
        """All lines, [] without the file.

        A last line that a kill cut short is left out: its step is repeated. DamagedFile if there is
        another line that is not a step.
        """
        lines: list[Record] = []
        texts = self.path.read_bytes().split(b"\n") if self.path.exists() else []
        for number, text in enumerate(texts, 1):
            if not text.strip():
                continue
            problem = "it has no step"
            try:
                line = json.loads(text)
            except ValueError as error:
                line, problem = None, str(error)
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                lines.append(line)
            elif number < len(texts):  # what follows the last line feed is the torn line
                raise DamagedFile(
                    self.path, f"line {number}: {problem}; restore or delete this line"
                )
        return lines

    def replace(self, lines: list[Record]) -> None:
        """Writes these lines in place of all others."""
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in lines))

    def complete(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Adds the metrics to the line of the step, if it has one. Returns all its metrics."""
        lines = self.read()
        completed: Record = {"step": step}
        for line in lines:
            if line["step"] == step:
                line |= {name: _to_json_number(value) for name, value in metrics.items()}
                completed = line
        self.replace(lines)
        numbers = {name: completed[name] for name in completed if name not in NOT_METRICS}
        return {name: math.nan if value is None else value for name, value in numbers.items()}


def _to_json_number(value: float) -> float | None:
    """A number that JSON can hold: None for NaN and infinities."""
    if not isinstance(value, int):
        value = float(value)
    return value if math.isfinite(value) else None
