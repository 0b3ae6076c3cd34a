"""How much of a GPU the engine takes: `rollout.gpu_memory_utilization`, also where it is auto.

SGLang or vLLM takes a share of the memory that is free when it starts, for its weights, keys and
values. The trainer's weights and optimizer are there already, and it needs room to send weights.
"""

import torch

from rl2.engine.base import EngineSettings, TrainerMemory
from rl2.parallel.device import GIB
from rl2.parallel.mesh import all_gather_objects

# Parts of a GPU that the engine needs besides: for activations, graphs and CUDA while it generates,
# and what remains of that while it loads weights. SGLang reserves about as much (13 of 80 GB).
GENERATING_SHARE = 0.15
LOADING_SHARE = 0.05
BUCKETS_BYTES = 2**30  # two, see sglang.py: one is gathered after the other
SHARE_ON_CPU = 0.5


def engine_bytes(trainer: TrainerMemory, total: int, free: int) -> int:
    """Bytes for the engine's weights, keys and values on a GPU that has `total` bytes.

    `free` are free when it starts. Keys and values stay while weights are loaded at the start, and
    wherever they are only compared.
    """
    generating = int(GENERATING_SHARE * total)
    loading = trainer.sending + BUCKETS_BYTES + int(LOADING_SHARE * total)
    return free - max(generating, loading)


def choose_share(settings: EngineSettings) -> float:
    """The share of the free memory that the engine may take. All ranks call; rank 0 prints why.

    RuntimeError if it has no room beside the trainer.
    """
    if not isinstance(settings.gpu_memory_utilization, str):
        return settings.gpu_memory_utilization
    if settings.device.type == "cpu":
        share, reason = SHARE_ON_CPU, "of the free memory"
    else:
        share, reason = _share_beside_trainer(settings.trainer, settings.device)
    if settings.rank == 0:
        print(f"rollout.gpu_memory_utilization=auto: {share} {reason}")
    return share


def _share_beside_trainer(trainer: TrainerMemory, device: torch.device) -> tuple[float, str]:
    """(share, the words that follow it) by the GPU that has the least room."""
    free, total = torch.cuda.mem_get_info(device)
    room = engine_bytes(trainer, total, free)
    room, free = min(all_gather_objects((room, free)))
    weights, kept = trainer.engine_weights / GIB, torch.cuda.memory_allocated(device) / GIB
    if room <= trainer.engine_weights:
        raise RuntimeError(
            f"rollout.gpu_memory_utilization=auto: the trainer keeps {kept:.1f} GiB of each GPU "
            f"while the engine generates. {max(room, 0) / GIB:.1f} GiB remain for its weights "
            f"({weights:.1f} GiB), keys and values. Set actor.offload_model=true, "
            "actor.offload_optimizer=true or a larger rollout.tp_size, or use more GPUs."
        )
    share = int(1000 * room / free) / 1000  # rounded down
    return share, (
        f"of the free memory, {room / GIB:.1f} GiB of each GPU for the engine's weights "
        f"({weights:.1f} GiB), keys and values; the trainer keeps {kept:.1f} GiB meanwhile"
    )
