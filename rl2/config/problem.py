"""What is wrong with a config, as data, and how it is printed."""

import sys
import time
from dataclasses import dataclass
from typing import NoReturn

from rl2.error_report import report_error
from rl2.parallel.rank import is_first_rank

SECONDS_FOR_FIRST_RANK = 1.0  # to print the problems, which all find at about the same time


@dataclass(frozen=True)
class Problem:
    """Something wrong with the value of a key, in words.

    If several keys do not fit together, the message begins with one of them, and that is `key`. An
    unknown key, an option such as --config-name and an environment variable have their own names;
    what belongs to none has "".
    """

    key: str
    text: str  # the whole message: the key and its value, what is wrong, and what to do

    def __str__(self) -> str:
        return self.text


def describe(problems: list[Problem]) -> str:
    """The problems as one message."""
    plural = "s" if len(problems) > 1 else ""
    lines = [f"{len(problems)} problem{plural} in the configuration:"]
    lines += [f"  - {problem}" for problem in problems]
    return "\n".join(lines)


def refuse(problems: list[Problem]) -> NoReturn:
    """Prints the problems on rank 0, and exits with status 2."""
    if is_first_rank():
        report_error(describe(problems))
    else:  # torchrun ends the first rank as soon as another one ends
        time.sleep(SECONDS_FOR_FIRST_RANK)
    sys.exit(2)
