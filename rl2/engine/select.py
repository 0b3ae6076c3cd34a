"""Makes the engine that the config names."""

import pkgutil

import torch

from rl2.config.engines import ENGINES, choose_engine
from rl2.engine.base import Engine, EngineSettings

# Sequences that an engine decodes at a time. A step of SGLang or vLLM on a GPU hardly takes longer
# with four times as many, and those that have no room for their keys and values wait. The embedded
# engine has that room for all of them from the start.
MAX_RUNNING = 64
MAX_RUNNING_ON_GPU = 256


def default_max_running(name: str, device: torch.device) -> int:
    """`rollout.max_running` where it is not set; `name` is the config's `rollout.engine`."""
    if choose_engine(name)[0] != "local" and device.type != "cpu":
        return MAX_RUNNING_ON_GPU
    return MAX_RUNNING


def make_engine(name: str, settings: EngineSettings) -> Engine:
    """The engine that `choose_engine(name)` names. All ranks call; rank 0 prints the choice."""
    kind, reason = choose_engine(name)
    if settings.rank == 0:
        print(f"rollout engine: {kind}, {reason}")
    engine: Engine = pkgutil.resolve_name(ENGINES[kind])(settings)
    return engine
