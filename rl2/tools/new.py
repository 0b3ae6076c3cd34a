"""`rl2 new NAME`: a folder with an environment, rows and a command, which work as they are."""

import argparse
import shlex
import shutil
from pathlib import Path

TASK = Path(__file__).parent / "task"  # what is copied


def main() -> None:
    """Makes the folder and prints what to type next. Exits with status 2 if that is impossible."""
    parser = argparse.ArgumentParser(
        prog="rl2 new",
        description="Makes a folder for a task of your own: an environment, three rows, two test "
        "rows and a script that trains on them. All of it works as it is, on a CPU.",
    )
    parser.add_argument("folder", metavar="NAME", type=Path, help="the folder, a new one")
    arguments = parser.parse_args()
    try:
        make_task(arguments.folder)
    except (OSError, ValueError) as error:
        parser.exit(2, f"rl2 new: {error}\n")
    print(describe(arguments.folder))


def make_task(folder: Path) -> None:
    """Copies the files of a task into the new folder.

    ValueError if something is there already, OSError if the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        raise ValueError(f"{folder} is there already: give the name of a new folder") from error
    for source in sorted(TASK.iterdir()):
        if source.is_file():
            shutil.copyfile(source, folder / source.name)


def describe(folder: Path) -> str:
    """Returns what is in the folder and what to type next."""
    return "\n".join(
        [
            f"{folder}: env.py (the reward), train.jsonl and test.jsonl (rows), run.sh (training)",
            "",
            f"cd {shlex.quote(str(folder))}",
            "rl2 env env.py data.path=train.jsonl   # tries the reward without a model",
            "bash run.sh                            # trains a small model of the hub on a CPU",
        ]
    )
