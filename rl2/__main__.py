"""Runs `python -m rl2 COMMAND ...` and the console script `rl2`."""

import difflib
import importlib
import importlib.metadata
import platform
import sys
from typing import NamedTuple

import rl2
from rl2.config.dropped import explain_dropped
from rl2.config.help import answer_trainer
from rl2.config.schema import TRAINER_CONFIGS
from rl2.output import outlive_readers


class Command(NamedTuple):
    module: str  # with a function `main`, which reads sys.argv
    summary: str


COMMANDS = {
    "ppo": Command(
        "rl2.trainer.ppo",
        "PPO, GRPO and relatives: samples answers that an environment rewards",
    ),
    "sft": Command("rl2.trainer.sft", "supervised fine-tuning on conversations"),
    "dpo": Command("rl2.trainer.dpo", "direct preference optimization on pairs of replies"),
    "rm": Command("rl2.trainer.rm", "reward models from pairs of replies"),
    "new": Command("rl2.tools.new", "makes a folder with an environment, rows and a script"),
    "env": Command("rl2.tools.env", "tries an environment: exploits, failures, determinism"),
    "ls": Command("rl2.tools.ls", "lists runs: trainer, steps, success, state"),
    "chat": Command("rl2.tools.chat", "talks to the model of a run, or of any model folder"),
    "report": Command("rl2.tools.report", "writes curves and answers of runs into one HTML file"),
    "compare": Command(
        "rl2.tools.compare", "says whether two recipes differ, by test questions and seeds"
    ),
    "replay": Command("rl2.tools.replay", "runs a recorded step again and compares"),
    "plan": Command("rl2.tools.plan", "predicts the memory of a job, phase by phase; needs no GPU"),
}


def describe_commands() -> str:
    """Returns the commands, one line each, and how to start them."""
    lines = ["rl2 COMMAND ...    or: python -m rl2 COMMAND ...", ""]
    lines += [f"  {name:8}{command.summary}" for name, command in COMMANDS.items()]
    lines += [
        "",
        "rl2 COMMAND --help explains the arguments of a command; rl2 --version prints versions.",
        "Several processes: torchrun --nproc_per_node=N -m rl2 COMMAND key=value ...",
    ]
    return "\n".join(lines)


def describe_version() -> str:
    """Returns a line with the versions of rl2, Python and the packages that numbers depend on."""
    versions = [f"rl2 {rl2.__version__}", f"Python {platform.python_version()}"]
    for package in ("torch", "transformers"):
        versions.append(f"{package} {importlib.metadata.version(package)}")
    return ", ".join(versions)


def main() -> None:
    """Runs the command that the first argument names; without one it lists the commands."""
    outlive_readers()  # such as `head`
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(describe_commands())
        return
    if name in ("-V", "--version"):
        print(describe_version())
        return
    options = [word.partition("=")[0] for word in arguments]
    for used in [f"rl2 {name}"] + [f"rl2 {name} {option}" for option in options]:
        if dropped := explain_dropped(used):
            print(dropped, file=sys.stderr)
            sys.exit(2)
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        print(
            f"rl2 {name}: no such command; {hint}there are {', '.join(COMMANDS)}", file=sys.stderr
        )
        sys.exit(2)
    command = COMMANDS[name]
    sys.argv = [f"rl2 {name}"] + arguments
    if name in TRAINER_CONFIGS:
        answer_trainer(name)  # --help, before the import below, which takes seconds
    importlib.import_module(command.module).main()


if __name__ == "__main__":
    main()
