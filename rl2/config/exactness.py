"""What PPO's rollout.exact means for a config: whether engine and trainer can have equal bits."""

from typing import Any

from rl2.attention.pages import MIN_ROWS
from rl2.config.conditions import count_samplers
from rl2.config.engines import choose_engine, has_gpu
from rl2.model.exact import Exactness


def exact_obstacles(config: Any) -> list[str]:
    """With what engine and trainer cannot have equal bits, and what to choose instead."""
    actor, rollout, trainer = config.actor, config.rollout, config.trainer
    obstacles = (
        (has_gpu(), "a GPU", "CUDA_VISIBLE_DEVICES= hides it"),
        (
            choose_engine(rollout.engine)[0] != "local",
            f"rollout.engine={rollout.engine}",
            "set rollout.engine=local",
        ),
        (
            rollout.max_running is not None and rollout.max_running < MIN_ROWS,
            f"rollout.max_running={rollout.max_running}",
            f"set at least {MIN_ROWS}: kernels sum fewer rows in another order",
        ),
        (rollout.partial, "rollout.partial=true", "older weights sample a part of its tokens"),
        (
            trainer.deterministic is False,
            "trainer.deterministic=false",
            "leave it out: the engine's calls have a constant shape then",
        ),
        (actor.tp_size > 1, f"actor.tp_size={actor.tp_size}", "set 1"),
        (actor.sp_size > 1, f"actor.sp_size={actor.sp_size}", "set 1"),
        (
            actor.quantize_base is not None,
            f"actor.quantize_base={actor.quantize_base}",
            "the engine multiplies with merged weights",
        ),
        (
            actor.lora_rank == 1 and actor.dtype != "bfloat16",
            f"actor.lora_rank=1 and actor.dtype={actor.dtype}",
            "set a rank of at least 2: float32 kernels of one column sum rows in other orders",
        ),
        (actor.compile, "actor.compile=true", "compiled kernels round in other places"),
    )
    return [f"{setting}: {advice}" for is_there, setting, advice in obstacles if is_there]


def choose_exactness(config: Any) -> Exactness:
    """Returns what PPO's rollout.exact means for its actor, teacher and engine."""
    if config.rollout.exact:
        return Exactness.DEMANDED
    if config.rollout.exact is not None or exact_obstacles(config):
        return Exactness.OFF
    has_other_weights = config.trainer.rollouts_from or count_samplers(config)
    return Exactness.ASSUMED if has_other_weights else Exactness.TRIED
