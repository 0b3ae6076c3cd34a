"""Two stages of training: SFT teaches the form of an answer, then RL trains from its model.

For word_problems.py, tool_use.py and coding_agent.py.
"""

import shutil
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rows import read_rows
from run_queue import DTYPE, train_in

# As when the rates of SFT here were chosen.
STORED = "actor.dither_weights=false"
# How RL starts, with the rate at which such weights learn best (dither.py).
RL_WEIGHTS = {
    "stored": [STORED, "actor.lr=3e-5"],
    "dithered": ["actor.dither_weights=true", "actor.lr=1e-5"],
}


def add_weights(run: ArgumentParser, one: ArgumentParser) -> None:
    """Adds the kinds of RL_WEIGHTS to both commands of a study. `run` compares several."""
    run.add_argument("--weights", nargs="*", choices=RL_WEIGHTS, default=["stored"])
    one.add_argument("weights", choices=RL_WEIGHTS)


def train_stages(
    arguments: Any,
    suffix: str,
    sft_rows: Path,
    sft_keys: list[str],
    rl_keys: list[str],
) -> tuple[Path, dict[str, float]]:
    """SFT on `sft_rows`, then RL on rl.jsonl in arguments.folder, with tests on test.jsonl.

    `arguments` has the model, the folder and the seed. Returns the run folder of RL and the CPU
    seconds of both. Their models are removed.
    """
    folder, seed = arguments.folder, arguments.seed
    sft, rl = folder / f"sft-{suffix}", folder / f"rl-{suffix}"
    sft_seconds = train_in(
        sft,
        "sft",
        *sft_keys,
        STORED,
        f"actor.dtype={DTYPE}",
        f"data.path={sft_rows}",
        f"data.seed={seed}",
        f"actor.model_name={arguments.model}",
    )
    rl_seconds = train_in(
        rl,
        "ppo",
        *rl_keys,
        f"actor.dtype={DTYPE}",
        f"data.path={folder / 'rl.jsonl'}",
        f"data.test_path={folder / 'test.jsonl'}",
        f"data.seed={seed}",
        f"trainer.seed={seed}",
        f"actor.model_name={sft / 'model'}",
    )
    for run_folder in (sft, rl):  # 270 MB each
        shutil.rmtree(run_folder / "model")
    return rl, {"sft_cpu_seconds": sft_seconds, "rl_cpu_seconds": rl_seconds}


def summarize_stages(
    rl: Path, num_steps: int, summarize: Callable[[list[dict]], dict]
) -> dict[str, Any]:
    """What `summarize` returns of the trajectories: of both tests, and of each step of RL."""

    def read(split: str, step: int) -> dict:
        return summarize(read_rows(rl / "rollouts" / split / f"step_{step}.jsonl"))

    return {
        "after_sft": read("test", 0),
        "after_rl": read("test", num_steps),
        "sampled": [read("train", step + 1) for step in range(num_steps)],
    }


def summarize(records: list[dict]) -> dict:
    """How many of the trajectories are right, and their mean length."""
    return {
        "trajectories": len(records),
        "right": sum(record["reward"] for record in records),
        "turns": sum(record["num_turns"] for record in records) / len(records),
        "tokens": sum(record["length"] for record in records) / len(records),
    }


def print_stages(
    runs: list[dict],
    run_columns: Mapping[str, Callable[[dict], str]],
    test_columns: Mapping[str, Callable[[dict], str]],
) -> None:
    """Prints a row for each test, in Markdown. The columns come from the run and from the test."""
    print(f"{runs[0]['date']} to {runs[-1]['date']}, {runs[0]['machine']}\n")
    columns = [*run_columns, "", "right, %", *test_columns, "turns", "tokens", "CPU s"]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for run in runs:
        for stage in ("sft", "rl"):
            test = run[f"after_{stage}"]
            cells = [
                *(cell(run) for cell in run_columns.values()),
                f"after {stage.upper()}",
                percentage(test, "right"),
                *(cell(test) for cell in test_columns.values()),
                f"{test['turns']:.2f}",
                f"{test['tokens']:.1f}",
                f"{run[f'{stage}_cpu_seconds']:.0f}",
            ]
            print(f"| {' | '.join(cells)} |")


def percentage(test: dict, key: str) -> str:
    """The share of the trajectories that `key` counts."""
    return f"{100 * test[key] / test['trajectories']:.0f}"


def right_by_step(run: dict) -> str:
    """The percentages of right trajectories in the steps of RL."""
    return ", ".join(percentage(step, "right") for step in run["sampled"])
