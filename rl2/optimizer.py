"""A worker: one sharded model with what it does. The actor, the reference and the critic are workers.

It knows no loss, no engine and no rollout. Every process calls the same methods with the same Batch; only the forward
and backward inside are split.
"""

import math


def schedule(done: int, total: int, warmup_ratio: float, kind: str) -> float:
    """The learning rate's factor after `done` of `total` updates: a linear rise to 1, then constant, linear or cosine to 0."""
    warmup = math.ceil(warmup_ratio * total)
    if done < warmup:
        return (done + 1) / warmup
    progress = (done - warmup) / max(1, total - warmup)
    return {
        "constant": 1.0,
        "linear": 1 - progress,
        "cosine": (1 + math.cos(math.pi * progress)) / 2,
    }[kind]
