"""Options of the tools that import torch. It takes seconds, and --help needs only these parsers."""

import argparse
import os
import sys
from pathlib import Path


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


def prove_parser() -> argparse.ArgumentParser:
    """The options of `rl2 prove`; the other words are those of ppo."""
    parser = argparse.ArgumentParser(
        prog="rl2 prove",
        usage="%(prog)s [--processes N] key=value ...",
        description="Compares rl2 with transformers, packs, layouts, engine, template and "
        "export, on your model. The keys are those of ppo. It needs no GPU, no network and no "
        "data; rows of data.path are tried where it is given.",
        allow_abbrev=False,
    )
    world_size = int(os.environ.get("WORLD_SIZE", "2"))
    text = "processes of the run; the keys say its layout (default: %(default)s)"
    parser.add_argument("--processes", type=int, default=world_size, help=text)
    return parser


def replay_parser() -> argparse.ArgumentParser:
    """The options of `rl2 replay`."""
    parser = argparse.ArgumentParser(
        prog="rl2 replay",
        description="Runs a recorded step again, from the checkpoint before it, and says whether "
        "rollouts, rewards, advantages, metrics and weights are those that were recorded.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of a run; it is only read")
    parser.add_argument("--step", type=int, required=True, help="the step, 1 or more")
    parser.add_argument(
        "--rollouts",
        choices=("again", "saved"),
        default="again",
        help="again: the answers are sampled again; saved: those that trainer.save_tokens kept "
        "are taken (PPO only)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="a new folder for the records of the replay; by default they are deleted",
    )
    return parser


PARSERS = {
    "env": env_parser,
    "plan": plan_parser,
    "prove": prove_parser,
    "replay": replay_parser,
}


def answer_tool(name: str) -> None:
    """Prints the help of the tool `name` and ends the program, if --help is among its arguments."""
    if "-h" in sys.argv or "--help" in sys.argv:
        PARSERS[name]().parse_known_args()
