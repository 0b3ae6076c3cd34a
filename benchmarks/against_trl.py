"""What the benchmarks against TRL share: word problems of reasoning-gym's gsm_symbolic, and each
side in a process of its own, where the first step warms up and is not counted."""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

SIDES = ("trl", "rl2")


def problems(count: int):
    import reasoning_gym

    return reasoning_gym.create_dataset("gsm_symbolic", size=count, seed=0)


def read_rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def train(trainer: str, folder: Path, arguments: list[str], tokens: str) -> list[dict]:
    """Seconds and tokens (the metric of that name) of each step of an rl2 trainer on the rows in
    `folder`."""
    given = [
        f"data.path={folder / 'rows.jsonl'}",
        f"trainer.save_dir={folder}",
        "trainer.disable_wandb=true",
    ]
    subprocess.run(
        [sys.executable, "-m", f"rl2.trainer.{trainer}", *given, *arguments],
        check=True,
        stdout=sys.stderr,
    )
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{"seconds": line["time/step"], "tokens": line[tokens]} for line in lines]


def parser(doc: str, **sizes: int) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("model")
    for name, default in sizes.items():
        options.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    options.add_argument("--only", choices=SIDES, help=argparse.SUPPRESS)
    options.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return options


def steps_of(side: str, rows: list[dict]) -> list[dict]:
    """The steps that count, of this script started again with --only and --folder, which prints all
    of them as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = [sys.executable, *sys.argv, "--only", side, "--folder", folder]
        out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(out.splitlines()[-1])[1:]
