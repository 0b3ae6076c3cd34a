"""Functions with which a part reports its figures."""

import json
import os


class Skip(Exception):
    """The part cannot run on this machine. The message is the reason."""


def record(**figures) -> None:
    """Prints figures and writes them to the file at once, so that a later failure loses none."""
    shown = {name: float(f"{x:.4g}") if isinstance(x, float) else x for name, x in figures.items()}
    print(shown, flush=True)
    with open(os.environ["RL2_GPU_FIGURES"], "a") as file:
        file.write(json.dumps(shown) + "\n")


def goal(name: str, value: float, wanted: float) -> None:
    """Records a figure with its goal. A missed goal is reported, but the part does not fail."""
    record(**{name: f"{value:.3g} (goal {wanted:g}{'' if value >= wanted else ': missed'})"})
