"""`rl2 ls [FOLDER ...]`: the runs below folders, one line each.

It reads the small files of the run folders (docs/run_folder.md). What is damaged or half-written is
named below the table, and the rest is shown.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rl2.run.lock import Holding, look_at_lock
from rl2.run.records import Record, read_lines, read_object
from rl2.run.success import REWARD, held_out_results, saved_score, training_metric

# What became of a run that has not ended with the model of its last step.
ENDINGS: dict[Holding, str] = {"released": "failed", "abandoned": "killed"}


@dataclass
class Summary:
    """A run. What its files do not say is None or empty."""

    folder: Path
    trainer: str = ""  # ppo, sft, dpo or rm
    step: int | None = None  # the last one that is done
    num_steps: int | None = None  # of the whole run
    success: list[str] = field(default_factory=list)  # names and values: last step, last evaluation
    state: str = "unknown"  # or running, finished, stopped, failed, killed
    problem: str = ""

    def cells(self) -> list[str]:
        """Returns the cells of the table's line."""
        shown = ["-" if number is None else str(number) for number in (self.step, self.num_steps)]
        success = ", ".join(self.success) or "-"
        return [str(self.folder), self.trainer or "-", "/".join(shown), success, self.state]


def main() -> None:
    """Prints the runs, by their names. Exits with status 2 without a folder."""
    parser = argparse.ArgumentParser(
        prog="rl2 ls",
        description="Lists the runs below folders: trainer, steps, success (or loss) of the last "
        "step and on held-out rows, and state.",
    )
    parser.add_argument("folders", nargs="*", metavar="FOLDER", type=Path, default=[Path("runs")])
    folders = parser.parse_args().folders
    for folder in folders:
        if not folder.is_dir():
            parser.exit(2, f"rl2 ls: {folder}: there is no such folder; give that of your runs\n")
    runs = [summarise(run) for top in folders for run in find_runs(top)]
    names = ", ".join(map(str, folders))
    nothing = f"no runs in {names}: a run writes to trainer.save_dir, by default runs/NAME with "
    nothing += "trainer.experiment_name=NAME"
    print("\n".join(format_table(runs)) if runs else nothing)


def find_runs(top: Path) -> Iterator[Path]:
    """Yields the folders of runs at or below `top`, without the branches inside of runs.

    Folders that cannot be read are named on stderr.
    """

    def note(error: OSError) -> None:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)

    for path, folders, files in os.walk(top, onerror=note):
        has_lock = "lock" in folders and any(Path(path, "lock").glob("*.json"))
        is_run = has_lock or "run.json" in files or "metrics.jsonl" in files
        if is_run:
            yield Path(path)
            folders.clear()
        folders[:] = sorted(name for name in folders if not name.startswith("."))


def summarise(folder: Path) -> Summary:
    """Returns what the files of a run say. If one of them cannot be read, that is its problem."""
    run = Summary(folder)
    try:
        config = read_object(folder / "config.yaml")
        record = read_object(folder / "run.json")
        if record:
            run.trainer = record["identity"]["trainer"].removesuffix("Config").lower()
            run.num_steps = record["starts"][-1].get("num_steps")
        lines, num_broken = read_lines(folder / "metrics.jsonl")
        steps = [line for line in lines if "step" in line]
        if steps:
            run.step = steps[-1]["step"]
            run.success = find_success(steps, saved_score(config))
        is_evaluation = config.get("trainer", {}).get("eval_only") is True
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        run.problem = f"its files are damaged, or not those of a run: {error!r}"
        return run
    if num_broken:
        run.problem = f"metrics.jsonl has {num_broken} broken lines"
    run.state = find_state(run, record, look_at_lock(folder), is_evaluation)
    return run


def find_success(lines: list[Record], score: str | None) -> list[str]:
    """Returns success or the loss of the last step and of the last evaluation, in words.

    `score` is rollout.score.
    """
    found = []
    for metric in (training_metric(score), REWARD, "actor/loss", "critic/loss"):
        if metric in lines[-1]:
            name = "reward" if metric == REWARD else metric.rpartition("/")[2]
            found.append(f"{name} {show(lines[-1][metric])}")
            break
    for line in reversed(lines):
        results = held_out_results(line, score)
        for (name, _), value in results.items():
            found.append(f"{f'test/{name}' if name else 'test'} {show(value)}")
        if results:
            break
    return found


def show(value: float | None) -> str:
    """Formats a metric; metrics.jsonl has null for a value that is not finite."""
    return "-" if value is None else f"{value:.4g}"


def find_state(run: Summary, record: Record, holding: Holding, is_evaluation: bool) -> str:
    """Returns what became of a run with this run.json and lock."""
    if holding == "held":
        return "running"
    has_model = (run.folder / "model").is_dir() and record.get("model_step") == run.step
    if run.step is not None and (has_model or is_evaluation):
        return "finished" if is_evaluation or record.get("is_complete") else "stopped"
    return ENDINGS.get(holding, "unknown")


def format_table(runs: list[Summary]) -> list[str]:
    """Returns a line for each run, and below them what is wrong with some."""
    rows = [["RUN", "TRAINER", "STEP", "SUCCESS", "STATE"]] + [run.cells() for run in runs]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines + [f"{run.folder}: {run.problem}" for run in runs if run.problem]
