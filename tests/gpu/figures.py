"""How a part tells what it found."""

import json
import os


class Skip(Exception):
    """The part cannot be run here, and why."""


def record(**figures) -> None:
    """Prints figures and keeps them, whatever comes after."""
    shown = {name: float(f"{x:.4g}") if isinstance(x, float) else x for name, x in figures.items()}
    print(shown, flush=True)
    with open(os.environ["RL2_GPU_FIGURES"], "a") as file:
        file.write(json.dumps(shown) + "\n")


def goal(name: str, value: float, wanted: float) -> None:
    """A figure with what it should reach; missing a goal is told and fails nothing."""
    record(**{name: f"{value:.3g} (goal {wanted:g}{'' if value >= wanted else ': missed'})"})
