"""The option of a trainer that is answered before it is imported: --help.

A trainer imports torch and transformers, which takes seconds. Nothing here does.
"""

import sys
from typing import NoReturn

from rl2.config.help import describe
from rl2.config.schema import TRAINER_CONFIGS
from rl2.error_report import print_answer
from rl2.output import outlive_readers
from rl2.parallel.rank import is_first_of_node, is_first_rank


def answer_early(root: type, argv: list[str]) -> None:
    """Answers --help, if it is among the arguments, and ends the program then.

    `root` is the config class of a trainer or a subclass of one.
    """
    if "-h" in argv or "--help" in argv:
        print_and_exit(describe(root, argv))


def answer_trainer(name: str) -> None:
    """Does so for the trainer `name`, such as ppo, and the arguments of the process.

    From here on the process outlives the readers of its output.
    """
    answer_early(TRAINER_CONFIGS[name], sys.argv[1:])
    outlive_readers(is_told=is_first_of_node())


def print_and_exit(text: str) -> NoReturn:
    """Prints the answer to an option such as --help, on rank 0, and ends the program."""
    if is_first_rank():
        print_answer(text.rstrip("\n"))
    sys.exit(0)
