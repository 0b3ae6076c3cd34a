"""Functions with which a part reports its figures."""

import json
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager


class Skip(Exception):
    """The part cannot run on this machine. The message is the reason."""


def record(**figures) -> None:
    """Prints figures and writes them to the file at once, so that a later failure loses none."""
    rounded = {}
    for name, value in figures.items():
        rounded[name] = float(f"{value:.4g}") if isinstance(value, float) else value
    print(rounded, flush=True)
    with open(os.environ["RL2_GPU_FIGURES"], "a") as file:
        file.write(json.dumps(rounded) + "\n")


class Steps:
    """The steps of a part whose start is expensive: a step that fails does not stop the others."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Keeps a failed check for `finish`. Other errors end the part: the engine may be dead."""
        try:
            yield
        except AssertionError as error:
            traceback.print_exc()
            self.failures.append(f"{name}: {error}")

    def finish(self) -> None:
        """AssertionError with the failed checks of all steps, if there are any."""
        assert not self.failures, "; ".join(self.failures)
