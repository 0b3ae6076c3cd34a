"""`rl2 ls [FOLDER ...]`: the runs below folders, one line each.

It reads the small files of the run folders (docs/run_folder.md). What is damaged or half-written is
named below the table, and the rest is shown.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from rl2.error_report import print_answer
from rl2.report.saved import Record
from rl2.run.lock import Holding, look_at_lock
from rl2.run.records import DamagedFile, read_object
from rl2.run.success import REWARD, held_out_results, saved_score, training_metric

TITLES = ("RUN", "TRAINER", "MODEL", "STEPS", "LAST", "HELD OUT", "STATE", "WRITTEN", "CHECKPOINTS")
NOTHING = "-"


class State(StrEnum):
    RUNNING = "running"
    FINISHED = "finished"  # all steps are done and model/ is there
    STOPPED = "stopped"  # by Ctrl-C or SIGTERM, with model/ of its last step
    FAILED = "failed"  # ended by an error, or by Ctrl-C before its first step
    KILLED = "killed"  # its process is gone without having ended
    UNKNOWN = "unknown"


@dataclass
class Summary:
    """A run, as `--json` prints it. None is what its files do not say."""

    run: str  # its folder
    state: State = State.UNKNOWN
    trainer: str | None = None  # ppo, sft, dpo or rm
    model: str | None = None
    step: int | None = None  # the last one that is done
    num_steps: int | None = None  # of the whole run
    metric: str | None = None  # of success in PPO, the loss of the others
    value: float | None = None  # of the metric in the last step
    held_out: dict[str, float | None] = field(default_factory=dict)  # of the last evaluation
    held_out_step: int | None = None
    best_step: int | None = None  # with trainer.save_best, that of best_model/
    written: str = ""  # when the run last wrote to its folder, in local time
    checkpoint_bytes: int = 0
    problems: list[str] = field(default_factory=list)


def main() -> None:
    """Prints the runs, the one that wrote last at the end. Exits with status 2 without a folder."""
    parser = argparse.ArgumentParser(
        prog="rl2 ls",
        description="Lists the runs below folders, the one that wrote last at the end: steps, last "
        "reward or loss, last held-out result, state, and the size of the checkpoints.",
    )
    parser.add_argument(
        "folders",
        nargs="*",
        metavar="FOLDER",
        type=Path,
        default=[Path("runs")],
        help="where to look; runs by default",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per run")
    arguments = parser.parse_args()
    for folder in arguments.folders:
        if not folder.is_dir():
            remedy = "give the folder of your runs, rl2 ls FOLDER"
            parser.exit(2, f"rl2 ls: {folder}: there is no such folder; {remedy}\n")
    folders = dict.fromkeys(run for top in arguments.folders for run in find_runs(top))
    runs = sorted(map(summarise, folders), key=lambda run: (run.written, run.run))
    if arguments.json:
        lines = [json.dumps(asdict(run)) for run in runs]
    elif runs:
        lines = format_table(runs)
    else:
        lines = [
            f"no runs in {', '.join(map(str, arguments.folders))}: a run writes to "
            "trainer.save_dir, by default runs/NAME with trainer.experiment_name=NAME"
        ]
    if lines:
        print_answer("\n".join(lines))


def find_runs(top: Path) -> Iterator[Path]:
    """Yields the folders of runs at or below `top`, without the branches inside of runs.

    Folders that cannot be read are named on stderr.
    """
    seen = set()  # a link may lead back to where it is

    def note(error: OSError) -> None:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)

    for path, folders, files in os.walk(top, onerror=note, followlinks=True):
        real = os.path.realpath(path)
        has_lock = "lock" in folders and any(Path(path, "lock").glob("[0-9]*.json"))
        is_run = has_lock or "run.json" in files or "metrics.jsonl" in files
        if is_run and real not in seen:
            yield Path(path)
        if is_run or real in seen:
            folders.clear()
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))


def summarise(folder: Path) -> Summary:
    """Returns what the files of a run say. What cannot be read is among its problems."""
    run = Summary(str(folder))
    config = read(folder / "config.yaml", run)
    record = read(folder / "run.json", run)
    trainer = part(record, "identity").get("trainer")
    if isinstance(trainer, str):
        run.trainer = trainer.removesuffix("Config").lower()
    worker = "critic" if run.trainer == "rm" else "actor"
    model = part(config, worker).get("model_name")
    run.model = model if isinstance(model, str) else None
    starts = record.get("starts")
    if isinstance(starts, list) and starts and isinstance(starts[-1], dict):
        num_steps = starts[-1].get("num_steps")
        run.num_steps = num_steps if isinstance(num_steps, int) else None
    best_step = part(record, "best").get("step")
    run.best_step = best_step if isinstance(best_step, int) else None
    read_results(folder / "metrics.jsonl", saved_score(config), run)
    holding = look_at_lock(folder)
    run.state = find_state(run, record, holding, part(config, "trainer").get("eval_only") is True)
    if not record and not config and holding is Holding.NEVER:
        run.problems.append("this is no run of rl2, or its config.yaml and run.json are lost")
    run.written = last_written(folder)
    run.checkpoint_bytes = size_of(folder / "checkpoints")
    return run


def read(path: Path, run: Summary) -> Record:
    """Returns a file of keys and values; {} without one, or with a problem if it is damaged."""
    try:
        return read_object(path)
    except DamagedFile as error:
        run.problems.append(f"{path.name} is damaged: {error.reason}")
        return {}


def part(values: Record, name: str) -> Record:
    """Returns the section `name`, {} if there is none."""
    section = values.get(name)
    return section if isinstance(section, dict) else {}


def read_results(path: Path, score: str | None, run: Summary) -> None:
    """Adds the last step with its reward or loss, and the last evaluation.

    `score` is rollout.score. Files may be long, so only the lines that are needed are parsed.
    """
    try:
        lines = path.read_bytes().splitlines() if path.exists() else []
    except OSError as error:
        run.problems.append(f"{path.name} cannot be read: {error.strerror}")
        return
    if lines and parse_line(lines[-1]) is None:
        run.problems.append(f"the last line of {path.name} is cut or broken")
    last = find_last(lines, b"")
    run.step = last.get("step")
    for metric in (training_metric(score), REWARD, "actor/loss", "critic/loss"):
        if run.metric is None and metric in last:
            run.metric, run.value = metric, last[metric]
    tested = find_last(lines, b'"test/')
    run.held_out = held_out(tested, score)
    run.held_out_step = tested.get("step")


def find_last(lines: list[bytes], mark: bytes) -> Record:
    """Returns the last line with the bytes `mark` that is whole; {} if there is none."""
    for line in reversed(lines):
        if mark in line and (found := parse_line(line)):
            return found
    return {}


def parse_line(text: bytes) -> Record | None:
    """Returns the line of a step; None if it is none."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) else None


def held_out(line: Record, score: str | None) -> dict[str, float | None]:
    """Returns success or the loss on each test set, by its name, "" without one."""
    return {name: value for (name, _), value in held_out_results(line, score).items()}


def find_state(run: Summary, record: Record, holding: Holding, is_evaluation: bool) -> State:
    """Returns what became of a run with this run.json and lock."""
    if holding is Holding.HELD:
        return State.RUNNING
    has_model = Path(run.run, "model").is_dir() and record.get("model_step") == run.step
    if run.step is not None and (has_model or is_evaluation):
        is_complete = is_evaluation or record.get("is_complete") is True
        return State.FINISHED if is_complete else State.STOPPED
    endings = {Holding.RELEASED: State.FAILED, Holding.ABANDONED: State.KILLED}
    return endings.get(holding, State.UNKNOWN)


def last_written(folder: Path) -> str:
    """Returns the time of the newest of the small files. A run touches its lock while it lives."""
    newest = 0.0
    for path in (*folder.glob("*.json*"), *folder.glob("*.yaml"), *folder.glob("lock/*.json")):
        try:
            newest = max(newest, path.stat().st_mtime)
        except OSError:  # deleted in between
            continue
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(newest)) if newest else ""


def size_of(folder: Path) -> int:
    """Returns the bytes of all files below the folder, 0 without it."""
    num_bytes = 0
    for path, _, files in os.walk(folder):
        for name in files:
            try:
                num_bytes += os.lstat(os.path.join(path, name)).st_size
            except OSError:  # an old checkpoint is deleted when a new one is there
                continue
    return num_bytes


def format_table(runs: list[Summary]) -> list[str]:
    """Returns a line for each run, and below them what is wrong with some."""
    rows = [TITLES, *map(to_cells, runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    lines += [f"{run.run}: {problem}" for run in runs for problem in run.problems]
    return lines


def to_cells(run: Summary) -> tuple[str, ...]:
    """Returns the cells of a run, in the order of TITLES."""
    steps = f"{show(run.step)}/{show(run.num_steps)}"
    last = NOTHING
    if run.metric is not None:
        name = "reward" if run.metric == REWARD else run.metric.rpartition("/")[2]
        last = f"{name} {show(run.value)}"
    held_out = " ".join(f"{name} {show(x)}".strip() for name, x in run.held_out.items())
    if held_out:
        best = "" if run.best_step is None else f", best {run.best_step}"
        held_out += f" (step {run.held_out_step}{best})"
    return (
        run.run,
        run.trainer or NOTHING,
        shorten(run.model) if run.model else NOTHING,
        steps,
        last,
        held_out or NOTHING,
        run.state,
        run.written[:-3] or NOTHING,  # without the seconds
        show_bytes(run.checkpoint_bytes),
    )


def show(value: Any) -> str:
    """Formats a number of a run; metrics.jsonl has null for a value that is not finite."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value) if isinstance(value, int) else NOTHING


def shorten(model: str) -> str:
    """Returns the last two parts of a path; a name on the hub has no more."""
    return "/".join(Path(model).parts[-2:])


def show_bytes(number: int) -> str:
    """Formats a size in decimal units, as `rl2 report` does."""
    if not number:
        return NOTHING
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number / 1e3:.0f} kB"
