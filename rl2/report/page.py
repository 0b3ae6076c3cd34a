"""report.html: curves and answers of runs in one file, which a browser opens without a network.

A browser cannot hold all answers of a long run. The page has a sample of steps, groups and answers,
and says how many there are and in which files.
"""

import os
import re
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from rl2.report.answers import (
    SharedStart,
    compare_evaluations,
    describe_group,
    prompt_of,
    reward_of,
)
from rl2.report.learning import find_lack_of_learning
from rl2.report.saved import Record, find_steps, read_lines, read_yaml, spread, step_of, to_json
from rl2.report.summary import summarize
from rl2.report.token_texts import SavedTokens, find_tokenizer
from rl2.run.records import NOT_METRICS
from rl2.run.success import saved_score

MAX_LINES = 2000  # of a metrics.jsonl
MAX_STEPS = 60  # of the training data and of each test set, whose answers are shown
MAX_WARNED_STEPS = 20  # that are listed of a warning
ROLLOUT_BYTES = 16_000_000  # of the answers of all runs
COMPARED_SHARE = 0.25  # of these bytes, for evaluations side by side


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
    config = read_yaml(folder / "config.yaml")
    if not lines and config is None:
        raise ValueError(
            f"{folder} is not the folder of a run: it has neither config.yaml nor a line in "
            "metrics.jsonl. Give the trainer.save_dir of a run"
        )
    lines.sort(key=lambda line: line["step"])
    shown = spread(lines, MAX_LINES)
    record = read_yaml(folder / "run.json")  # JSON is YAML
    names = {name: None for line in lines for name in line if name not in NOT_METRICS}
    return {
        "folder": str(folder.resolve()),
        "num_steps": len(lines),
        "num_broken": num_broken,
        "metrics": {name: [line.get(name) for line in shown] for name in names},
        "config": config,
        "record": record,
        "summary": summarize(lines, config, record),
        "warnings": _gather_warnings(lines),
        "rollouts": _read_rollouts(folder, config, num_bytes),
    }


def _gather_warnings(lines: list[Record]) -> list[Record]:
    """Returns each kind of warning with its first reason and its steps.

    What the evaluations of the whole run say is a warning of its last step.
    """
    reasons: dict[str, str] = {}
    steps = defaultdict(list)
    for line in lines:
        for name, reason in line.get("warnings", {}).items():
            reasons.setdefault(name, reason)
            steps[name].append(line["step"])
    for problem in find_lack_of_learning(lines):
        reasons[problem.name] = problem.reason
        steps[problem.name].append(lines[-1]["step"])
    return [
        {
            "name": name,
            "reason": reason,
            "num_steps": len(steps[name]),
            "steps": spread(steps[name], MAX_WARNED_STEPS),
        }
        for name, reason in reasons.items()
    ]


def _read_rollouts(folder: Path, config: Any, num_bytes: int) -> Record:
    """Returns the steps that are shown, how many each split has, and compared evaluations."""
    splits = {path.name: find_steps(path) for path in sorted(folder.glob("rollouts/*/"))}
    splits = {split: files for split, files in splits.items() if files}
    shared = {split: _find_shared_start(files[0]) for split, files in splits.items()}
    comparisons = _compare(splits, saved_score(config), int(COMPARED_SHARE * num_bytes))
    num_bytes -= len(to_json(comparisons))
    files: list[Path] = []
    for steps in splits.values():
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
        shown.append(_read_step(path, share, shared[path.parent.name], tokens))
        num_bytes -= len(to_json(shown[-1]))
    return {
        "num_steps": {split: len(steps) for split, steps in splits.items()},
        "shared": {split: start.to_page() for split, start in shared.items()},
        "steps": shown,
        "comparisons": comparisons,
        "tokens_note": note,
    }


def _find_shared_start(path: Path) -> SharedStart:
    """Returns what the prompts of a step begin with; those of the other steps are alike."""
    records, _ = read_lines(path)
    return SharedStart.find([prompt_of(record) for record in records])


def _compare(splits: dict[str, list[Path]], part: str | None, num_bytes: int) -> list[Record]:
    """Returns what changed from the first to the last evaluation of each test set.

    `part` is rollout.score.
    """
    evaluated = {s: files for s, files in splits.items() if s != "train" and len(files) > 1}
    comparisons = []
    for split, files in evaluated.items():
        found = compare_evaluations(files[0], files[-1], part, num_bytes // len(evaluated))
        steps = {"before": step_of(files[0]), "after": step_of(files[-1])}
        comparisons.append({"split": split, **steps, **found})
    return comparisons


def _read_step(
    path: Path, num_bytes: int, shared: SharedStart, tokens: SavedTokens | None
) -> Record:
    """Returns the groups of a step that fit into `num_bytes`.

    Those with the best and the worst answer come first, and then the others in their order.
    """
    records, _ = read_lines(path)
    ranked = sorted(records, key=reward_of, reverse=True)
    groups = defaultdict(list)  # each from its best answer to its worst
    for record in ranked:
        groups[record.get("group")].append(record)
    shown: list[Record] = []
    order = [*ranked[:1], *ranked[-1:], *records]
    for number in dict.fromkeys(record.get("group") for record in order):
        group = describe_group(groups[number], shared, tokens)
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
