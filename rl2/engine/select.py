"""Makes the engine that the config names."""

import pkgutil

from rl2.config.engines import ENGINES, choose_engine
from rl2.engine.base import Engine, EngineSettings


def make_engine(name: str, settings: EngineSettings) -> Engine:
    """The engine that `choose_engine(name)` names. All ranks call; rank 0 prints the choice."""
    kind, reason = choose_engine(name)
    if settings.rank == 0:
        print(f"rollout engine: {kind}, {reason}")
    engine: Engine = pkgutil.resolve_name(ENGINES[kind])(settings)
    return engine
