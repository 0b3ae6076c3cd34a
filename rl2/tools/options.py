"""Options of the tools that import torch. It takes seconds, and --help needs only these parsers."""

import argparse
import os
import sys


def env_parser() -> argparse.ArgumentParser:
    """The options of `rl2 env`; the other words are those of ppo."""
    usage = "rl2 env FILE data.path=ROWS [--rows N] [--form TEXT] key=value ..."
    about = "Tries a file or a ready-made env; the keys are those of PPO. See docs/environments.md."
    parser = argparse.ArgumentParser(usage=usage, description=about)
    help_rows = "how many rows to use, the first (8)"
    parser.add_argument("--rows", type=positive_int, default=8, help=help_rows)
    form = "one more form of an answer, such as 'Result: {}'"
    parser.add_argument("--form", action="append", default=[], help=form)
    return parser


def plan_parser() -> argparse.ArgumentParser:
    """The options of `rl2 plan`; the other words are those of a trainer."""
    parser = argparse.ArgumentParser(
        prog="rl2 plan",
        usage="%(prog)s [ppo | sft | dpo | rm] [--gpus N] [--gpu-memory GIB] key=value ...",
        description="Predicts the memory of each phase of a job. It needs no GPU, no weights and "
        "no data; the model is its config.json. docs/gpus.md has a table of what fits on 24, 48 "
        "and 80 GB.",
        allow_abbrev=False,
    )
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    parser.add_argument(
        "--gpus", type=positive_int, default=world_size, help="processes of the job"
    )
    # None: that of the GPU here or, without one, of a usual GPU.
    parser.add_argument("--gpu-memory", type=positive, help="GiB of one GPU")
    return parser


def positive(text: str) -> float:
    """Reads a number. ValueError unless it is above 0."""
    number = float(text)
    if not number > 0:
        raise ValueError
    return number


def positive_int(text: str) -> int:
    """Reads a whole number. ValueError unless it is above 0."""
    return int(positive(str(int(text))))


PARSERS = {"env": env_parser, "plan": plan_parser}


def answer_tool(name: str) -> None:
    """Prints the help of the tool `name` and ends the program, if --help is among its arguments."""
    if "-h" in sys.argv or "--help" in sys.argv:
        PARSERS[name]().parse_known_args()
