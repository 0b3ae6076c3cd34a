"""report.html: curves and answers of runs in one file, which a browser opens without a network.

A browser cannot hold all answers of a long run. The page has a sample of steps, groups and answers,
and says how many there are and in which files.
"""

import json
import math
import os
import re
import time
from collections import defaultdict
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from rl2.report.token_texts import SavedTokens, find_tokenizer
from rl2.run.records import NOT_METRICS

MAX_LINES = 2000  # of a metrics.jsonl
MAX_STEPS = 60  # of the training data and of each test set, whose answers are shown
MAX_ANSWERS = 16  # of a group
MAX_CHARACTERS = 40_000  # of all messages of an answer
ROLLOUT_BYTES = 16_000_000  # of the answers of all runs

Record = dict[str, Any]  # an object of JSON


def write_page(folders: list[Path], path: Path) -> None:
    """Writes the report of the runs in `folders` to `path`. A kill leaves the old file or the new.

    ValueError if a folder holds no run, OSError if a file cannot be read or written.
    """
    runs = [_read_run(folder, ROLLOUT_BYTES // len(folders)) for folder in folders]
    data = _to_json({"written": time.strftime("%Y-%m-%d %H:%M"), "runs": runs})
    # A browser ends a script at the first "</script", also inside a text of JSON.
    parts = {"data": data.replace("<", "\\u003c")}
    here = Path(__file__).parent
    for name in ("page.css", "page.js"):
        parts[name] = (here / name).read_text(encoding="utf-8")
    page = (here / "page.html").read_text(encoding="utf-8")
    page = re.sub(r"/\* (data|page\.\w+) \*/", lambda place: parts[place[1]], page)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(page, encoding="utf-8")
    os.replace(partial, path)


def _read_run(folder: Path, num_bytes: int) -> Record:
    """Returns what the page has of a run, with at most `num_bytes` of answers."""
    lines, num_broken = read_lines(folder / "metrics.jsonl")
    config = read_yaml(folder / "config.yaml")
    if not lines and config is None:
        raise ValueError(
            f"{folder} is not the folder of a run: it has neither config.yaml nor a line in "
            "metrics.jsonl. Give the trainer.save_dir of a run"
        )
    lines.sort(key=lambda line: line["step"])
    shown = spread(lines, MAX_LINES)
    names = {name: None for line in lines for name in line if name not in NOT_METRICS}
    return {
        "folder": str(folder.resolve()),
        "num_steps": len(lines),
        "num_broken": num_broken,
        "metrics": {name: [line.get(name) for line in shown] for name in names},
        "config": config,
        "record": read_yaml(folder / "run.json"),  # JSON is YAML
        "rollouts": _read_rollouts(folder, config, num_bytes),
    }


def spread(items: list, most: int) -> list:
    """Returns at most `most` of the items, evenly spaced, with the first and the last one."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


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


def read_yaml(path: Path) -> Any:
    """Returns the content of the file; None if there is none, or if it is broken."""
    with suppress(OSError, ValueError, yaml.YAMLError):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else None
    return None


def _read_rollouts(folder: Path, config: Any, num_bytes: int) -> Record:
    """Returns the steps that are shown, and how many each split has."""
    files: list[Path] = []
    num_steps = {}
    for split in sorted(folder.glob("rollouts/*/")):
        steps = sorted(split.glob("step_*.jsonl"), key=_step_of)
        num_steps[split.name] = len(steps)
        files += spread(steps, MAX_STEPS)
    tokenizer, note = None, "Tokens are shaded in runs with trainer.save_tokens=true."
    if any(path.with_suffix(".safetensors").exists() for path in files):
        tokenizer = find_tokenizer(folder, config)
        note = "" if tokenizer else "Tokens are not shaded: the tokenizer was not on this machine."
    shown: list[Record] = []
    for path in files:
        tokens = None
        saved = path.with_suffix(".safetensors")
        if tokenizer and saved.exists():
            try:
                tokens = SavedTokens(saved, tokenizer)
            except ValueError as error:
                problem = f"{error}: its tokens are not shaded. "
                print(f"warning: {problem}")
                note += problem
        share = num_bytes // (len(files) - len(shown))  # small steps leave room for others
        shown.append(_read_step(path, share, tokens))
        num_bytes -= len(_to_json(shown[-1]))
    return {"num_steps": num_steps, "steps": shown, "tokens_note": note}


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step_"))


def _read_step(path: Path, num_bytes: int, tokens: SavedTokens | None) -> Record:
    """Returns the groups of a step that fit into `num_bytes`.

    Those with the best and the worst answer come first, and then the others in their order.
    """
    records, _ = read_lines(path)
    ranked = sorted(records, key=_reward, reverse=True)
    groups = defaultdict(list)  # each from its best answer to its worst
    for record in ranked:
        groups[record.get("group")].append(record)
    shown: list[Record] = []
    order = [*ranked[:1], *ranked[-1:], *records]
    for number in dict.fromkeys(record.get("group") for record in order):
        group = _describe_group(groups[number], tokens)
        num_bytes -= len(_to_json(group))
        if num_bytes < 0:
            break
        shown.append(group)
    return {
        "split": path.parent.name,
        "step": _step_of(path),
        "num_answers": len(records),
        "groups": shown,
    }


def _reward(record: Record) -> float:
    return record.get("reward") or 0.0


def _describe_group(records: list[Record], tokens: SavedTokens | None) -> Record:
    """Returns the messages with which all answers begin, and a sample of the answers."""
    prompts = zip(*map(prompt_of, records), strict=False)
    prompt = [first for first, *others in takewhile(_are_equal, prompts)]
    answers = []
    for record in spread(records, MAX_ANSWERS):
        messages = _cut_messages(record.get("messages", [])[len(prompt) :])
        if tokens is not None:
            tokens.add_to(messages, record["id"])
        answers.append(record | {"messages": messages, "row": None})
    return {
        "group": records[0].get("group"),
        "size": len(records),
        "row": records[0].get("row"),
        "prompt": _cut_messages(prompt),
        "answers": answers,
    }


def prompt_of(record: Record) -> list[Record]:
    """Returns the messages before the first sampled turn; examples in a prompt have turns too."""
    messages = record.get("messages", [])
    turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    num_sampled = record.get("num_turns", len(turns))
    return messages[: turns[-num_sampled]] if 0 < num_sampled <= len(turns) else messages


def _are_equal(messages: tuple[Record, ...]) -> bool:
    return all(message == messages[0] for message in messages)


def _cut_messages(messages: list[Record]) -> list[Record]:
    return _cut(messages, MAX_CHARACTERS // max(1, len(messages)))


def _cut(value: Any, limit: int) -> Any:
    """Returns a copy for JSON: texts of at most about `limit` characters, and null for NaN."""
    if isinstance(value, dict):
        return {str(name): _cut(part, limit) for name, part in value.items()}
    if isinstance(value, list):
        return [_cut(part, limit) for part in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, str) and len(value) > limit:
        half = limit // 2
        num_left_out = len(value) - 2 * half
        return f"{value[:half]} [... {num_left_out:,} characters left out ...] {value[-half:]}"
    return value


def _to_json(value: Any) -> str:
    return json.dumps(_cut(value, 2 * MAX_CHARACTERS), separators=(",", ":"), default=str)
