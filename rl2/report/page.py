"""report.html: curves and answers of runs in one file, which a browser opens without a network.

A browser cannot hold all answers of a long run. The page has a sample of steps, groups and answers,
and says how many there are and in which files. A prompt is there once for all its answers, and
equal answers once with their count.
"""

import json
import math
import os
import re
import time
from collections import defaultdict
from itertools import chain
from pathlib import Path
from typing import Any

from rl2.data.messages import common_prefix_length
from rl2.report.learning import find_lack_of_learning
from rl2.run.records import NOT_METRICS, Record, find_steps, read_lines, read_object, step_of
from rl2.run.success import REWARD, held_out_results, saved_score, training_metric

MAX_HEADLINES = 6  # with more test sets, the others are among the curves
MAX_LINES = 2000  # of a metrics.jsonl
MAX_STEPS = 60  # of the training data and of each test set, whose answers are shown
ROLLOUT_BYTES = 16_000_000  # of the answers of all runs
MAX_CHARACTERS = 40_000  # of all messages of an answer
MAX_ANSWERS = 16  # of a group: different ones
# What the page shows of an answer, beside its messages.
COLUMNS = ("reward", "rewards", "advantage", "finish_reason", "length")


def write_page(folders: list[Path], path: Path) -> None:
    """Writes the report of the runs in `folders` to `path`. A kill leaves the old file or the new.

    ValueError if a folder holds no run, OSError if a file cannot be read or written.
    """
    runs = [_read_run(folder, ROLLOUT_BYTES // len(folders)) for folder in folders]
    data = to_json({"written": time.strftime("%Y-%m-%d %H:%M"), "runs": runs})
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
    config = read_object(folder / "config.yaml")
    if not lines and not config:
        raise ValueError(
            f"{folder} is not the folder of a run: it has neither config.yaml nor a line in "
            "metrics.jsonl. Give the trainer.save_dir of a run"
        )
    lines.sort(key=lambda line: line["step"])
    shown = spread(lines, MAX_LINES)
    names = [name for name in dict.fromkeys(chain.from_iterable(lines)) if name not in NOT_METRICS]
    splits = {path.name: find_steps(path) for path in sorted(folder.glob("rollouts/*/"))}
    return {
        "folder": str(folder.resolve()),
        "num_steps": len(lines),
        "num_broken": num_broken,
        "metrics": {name: [line.get(name) for line in shown] for name in names},
        "config": config,
        "record": read_object(folder / "run.json"),
        "headlines": find_headlines(lines, saved_score(config)),
        "warnings": _gather_warnings(lines),
        "num_rollouts": {split: len(files) for split, files in splits.items() if files},
        "rollouts": _read_rollouts(splits, num_bytes),
    }


def find_headlines(lines: list[Record], score: str | None) -> dict[str, str]:
    """Returns the metrics to show large, and what a person calls them. `score` is rollout.score."""
    known = {}  # the metrics that have a number in some line
    for line in lines:
        for name, value in line.items():
            if name not in NOT_METRICS and value is not None and math.isfinite(value):
                known[name] = value
    trained = (training_metric(score), REWARD, "actor/loss", "critic/loss")
    found = [name for name in trained if name in known]
    headlines = dict.fromkeys(found[:1], "in training")
    for test_set, metric in held_out_results(known, score):
        name = f"test/{test_set}/{metric}" if test_set else f"test/{metric}"
        headlines[name] = f"on {test_set or 'held-out rows'}"
    return dict(list(headlines.items())[:MAX_HEADLINES])


def _gather_warnings(lines: list[Record]) -> list[Record]:
    """Returns each kind of warning with its first reason and its steps.

    What the evaluations of the whole run say is a warning of its last step.
    """
    found: dict[str, Record] = {}
    for line in lines:
        for name, reason in line.get("warnings", {}).items():
            warning = found.setdefault(name, {"name": name, "reason": reason, "steps": []})
            warning["steps"].append(line["step"])
    for problem in find_lack_of_learning(lines):
        steps = [lines[-1]["step"]]
        found[problem.name] = {"name": problem.name, "reason": problem.reason, "steps": steps}
    return list(found.values())


def _read_rollouts(splits: dict[str, list[Path]], num_bytes: int) -> list[Record]:
    """Returns a sample of the steps of each split, with at most `num_bytes` in all."""
    files: list[Path] = []
    for steps in splits.values():
        files += spread(steps, MAX_STEPS)
    shown: list[Record] = []
    for path in files:
        share = num_bytes // (len(files) - len(shown))  # small steps leave room for others
        shown.append(_read_step(path, share))
        num_bytes -= len(to_json(shown[-1]))
    return shown


def _read_step(path: Path, num_bytes: int) -> Record:
    """Returns the groups of a step that fit into `num_bytes`.

    Those with the best and the worst answer come first, and then the others in their order.
    """
    records, _ = read_lines(path)
    ranked = sorted(records, key=reward_of, reverse=True)
    groups = defaultdict(list)  # each from its best answer to its worst
    for record in ranked:
        groups[record.get("group")].append(record)
    shown: list[Record] = []
    order = ranked[:1] + ranked[-1:] + records
    for number in dict.fromkeys(record.get("group") for record in order):
        group = describe_group(groups[number])
        num_bytes -= len(to_json(group))
        if num_bytes < 0:
            break
        shown.append(group)
    return {
        "split": path.parent.name,
        "step": step_of(path),
        "num_answers": len(records),
        "groups": shown,
    }


def spread(items: list, most: int) -> list:
    """Returns at most `most` of the items, evenly spaced, with the first and the last one."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def to_json(value: object) -> str:
    """Returns the value as short JSON: long texts are cut, and NaN is null."""
    return json.dumps(cut(value, 2 * MAX_CHARACTERS), separators=(",", ":"), default=str)


def cut(value: object, limit: int) -> Any:
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
    prompt = prompt_of(records[0])
    for record in records:
        prompt = prompt[: common_prefix_length(prompt, prompt_of(record))]
    return {
        "group": records[0].get("group"),
        "size": len(records),
        "row": records[0].get("row"),
        "prompt": _cut_messages(prompt),
        "answers": _describe_answers(records, len(prompt)),
    }


def _cut_messages(messages: list[Record]) -> list[Record]:
    return cut(messages, MAX_CHARACTERS // max(1, len(messages)))


def _describe_answers(records: list[Record], start: int) -> list[Record]:
    """Returns a sample of the different answers: their messages from `start`, and their `count`."""
    different: dict[str, Record] = {}
    for record in records:
        answer = {name: record[name] for name in COLUMNS if name in record}
        answer["messages"] = _cut_messages(record.get("messages", [])[start:])
        seen = different.setdefault(json.dumps(answer, sort_keys=True), answer | {"count": 0})
        seen["count"] += 1
    return spread(list(different.values()), MAX_ANSWERS)
