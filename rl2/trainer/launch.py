"""The main of every trainer: config, signals, training, and the final model."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from rl2.config.parse import FindProblems, parse
from rl2.config.problem import Problem
from rl2.error_report import Diverged
from rl2.run.signals import guard
from rl2.trainer.recorder import Recorder


class Run(Protocol):
    """What a `train` works with."""

    recorder: Recorder

    def finish(self) -> None:
        """Saves the final model and ends the process group."""


@dataclass(frozen=True)
class Trainer:
    """A trainer of rl2, as `launch` and `rl2.train` start it."""

    config_class: type
    start: Callable[..., None]  # trains with a config
    find_problems: Callable[..., list[Problem]]  # tries what a config names, see `parse`


def launch(
    kind: type,
    start: Callable[[Any], None],
    find_problems: FindProblems | None = None,
) -> None:
    """Parses the arguments of the process as a config of the class `kind`, and calls `start` on it.

    `find_problems(config)` tries what the config names, see `parse`.
    """
    config: Any = parse(kind, sys.argv[1:], find_problems)
    with guard(config.trainer.watchdog):
        start(config)


def train_and_finish(run: Run, train: Callable[[Any], None]) -> None:
    """Trains the run and saves its model. `Diverged` comes with advice."""
    try:
        train(run)
    except Diverged as error:
        raise Diverged(run.recorder.explain_divergence(str(error))) from error
    run.finish()
