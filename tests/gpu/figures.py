"""Functions with which a part reports its figures."""

import json
import os


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
