"""Whether the engine applies LoRA's adapters, or is sent weights that have them merged in."""

from typing import Any

from rl2.config.conditions import count_samplers
from rl2.config.engines import choose_engine, has_gpu


def adapter_obstacle(config: Any) -> str | None:
    """Why the engine of this config needs merged weights, in words; None if it does not."""
    if config.actor.quantize_base:
        return "the engine has read the files of the base, and the trainer's base is in 4 bits"
    engine = choose_engine(config.rollout.engine)[0]
    if engine != "local":
        return f"{engine} is sent whole weights only; the embedded engine applies adapters"
    if has_gpu() and not count_samplers(config):
        return (
            "the embedded engine gives its weights' memory of a GPU to the trainer in every step, "
            "and is sent all of them again; it keeps them with rollout.num_processes"
        )
    return None


def sends_adapters(config: Any) -> bool:
    """Whether the engine applies LoRA's adapters, so that they alone are sent after an update."""
    return bool(config.actor.lora_rank) and adapter_obstacle(config) is None
