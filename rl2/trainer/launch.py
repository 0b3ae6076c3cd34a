"""The main of every trainer: config, signals, training, and the final model."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from rl2.config.arguments import read_arguments
from rl2.config.parse import accept, let_hydra_answer
from rl2.config.schema import Config
from rl2.error_report import Diverged
from rl2.in_process import train_job
from rl2.recorder import Recorder
from rl2.run.signals import guard


class Run(Protocol):
    """What a `train` works with."""

    recorder: Recorder

    def finish(self) -> None:
        """Saves the final model and ends the process group."""


def launch(root: type, start: Callable[[Any], None]) -> None:
    """The main of a trainer: start(config) trains as the arguments of the process say.

    `root` is the class of its config.
    """
    arguments = read_arguments(root, sys.argv[1:])
    if arguments.options:
        let_hydra_answer(root, arguments, partial(train_job, start))
    config: Config = accept(root, arguments)
    with guard(config.trainer.watchdog):
        start(config)


def train_and_finish(run: Run, train: Callable[[Any], None]) -> None:
    """Trains the run and saves its model. `Diverged` comes with advice."""
    try:
        train(run)
    except Diverged as error:
        advice = run.recorder.health.advise_after_divergence("actor")
        raise Diverged(f"{error}. {advice}") from error
    run.finish()
