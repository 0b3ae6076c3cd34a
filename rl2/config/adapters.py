"""What PPO's rollout.lora means for a config: whether the engine applies adapters."""

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


def choose_lora(config: Any) -> tuple[str, str]:
    """(merged or adapter, reason) for the config's `rollout.lora`."""
    if config.rollout.lora != "auto":
        return config.rollout.lora, "as rollout.lora says"
    obstacle = adapter_obstacle(config)
    if obstacle is not None:
        return "merged", obstacle
    return "adapter", "the embedded engine applies them as the trainer does"


def sends_adapters(config: Any) -> bool:
    """Whether the engine applies LoRA's adapters, so that they alone are sent after an update."""
    return bool(config.actor.lora_rank) and choose_lora(config)[0] == "adapter"
