"""Shared code of the benchmarks that train, most of them beside TRL.

The data are word problems of reasoning-gym's gsm_symbolic. With --data FILE they are the first and
the last message of its rows, as those of GSM8K. Each library runs in its own process. The first
step is a warm-up and does not count. Arguments key=value are further keys of rl2.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

LIBRARIES = ("trl", "rl2")


def make_problems(count: int, file: Path | None) -> list[tuple[str, str]]:
    """Returns word problems and their worked answers."""
    if file is not None:
        conversations = [row["messages"] for row in read_rows(file)[:count]]
        assert len(conversations) == count, f"{file} has {len(conversations)} of {count} rows"
        return [(messages[0]["content"], messages[-1]["content"]) for messages in conversations]
    import reasoning_gym

    problems = reasoning_gym.create_dataset("gsm_symbolic", size=count, seed=0)
    return [(item["question"], item["metadata"]["answer_cot"]) for item in problems]


def read_rows(file: Path) -> list[dict]:
    with open(file, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def train(
    trainer: str, folder: Path, arguments: list[str], num_processes: int = 1
) -> list[dict[str, float]]:
    """Train on the rows in `folder`. Returns the metrics of each step."""
    launcher = ["-m", "torch.distributed.run", "--standalone"]
    launcher += [f"--nproc_per_node={num_processes}"]
    command = [
        sys.executable,
        *(launcher if num_processes > 1 else []),
        "-m",
        f"rl2.trainer.{trainer}",
        f"data.path={folder / 'rows.jsonl'}",
        f"trainer.save_dir={folder}",
        "trainer.disable_wandb=true",
        *arguments,
    ]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return read_rows(folder / "metrics.jsonl")


def train_rl2(trainer: str, folder: Path, arguments: list[str], tokens_key: str) -> list[dict]:
    """Train on the rows in `folder`. Returns the seconds and the tokens of each step.

    `tokens_key` is the name of the metric that counts the tokens.
    """
    lines = train(trainer, folder, arguments)
    return [{"seconds": line["time/step"], "tokens": line[tokens_key]} for line in lines]


def make_parser(description: str, **sizes: int) -> argparse.ArgumentParser:
    """A parser with the model, an option for each of `sizes`, and the options of the child."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    for name, default in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("keys", nargs="*", help="key=value of rl2")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=LIBRARIES)
    parser.add_argument("--only", choices=LIBRARIES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser


def measure_steps(library: str, rows: list[dict]) -> list[dict]:
    """Run this script in a child process for one library. Returns its steps after the warm-up.

    The child gets --only and --folder, and prints its steps as JSON on its last line.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = [sys.executable, *sys.argv, "--only", library, "--folder", folder]
        output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(output.splitlines()[-1])[1:]
