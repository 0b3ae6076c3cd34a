"""The main of every trainer: config, signals, training, and the final model."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from rl2.config.parse import accept, compose, let_hydra_answer, read_command
from rl2.error_report import Diverged
from rl2.run.signals import guard
from rl2.trainer.inside import Trainer, train_job
from rl2.trainer.recorder import Recorder


class Run(Protocol):
    """What a `train` works with."""

    recorder: Recorder

    def finish(self) -> None:
        """Saves the final model and ends the process group."""


def launch(trainer: Trainer) -> None:
    """The main of a trainer: trains as the arguments of the process say."""
    root = trainer.config_class
    arguments = read_command(root, sys.argv[1:])
    if arguments.options:
        let_hydra_answer(root, arguments, partial(train_job, trainer))
    config: Any = accept(compose(root, arguments))
    with guard(config.trainer.watchdog):
        trainer.start(config)


def train_and_finish(run: Run, train: Callable[[Any], None]) -> None:
    """Trains the run and saves its model. `Diverged` comes with advice."""
    try:
        train(run)
    except Diverged as error:
        raise Diverged(run.recorder.explain_divergence(str(error))) from error
    run.finish()
