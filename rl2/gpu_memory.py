"""What `auto` of the keys that fit a job into memory means: numbers, chosen once, at the start.

Everything after reads the numbers: workers, packs, limits of trajectories, the run folder.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from rl2.config.conditions import (
    compares_pairs,
    count_samplers,
    has_full_kl,
    longest_row,
    needs_reference,
)
from rl2.config.rules import loaded_models
from rl2.config.schema import Config, PPOConfig, WorkerConfig, model_name, worker_names
from rl2.model.attachment import ModelSettings
from rl2.model.footprint import HEAD_BYTES, Footprint
from rl2.parallel.device import GIB, PLANNED_DEVICE, compute_dtype
from rl2.parallel.mesh import all_gather_objects
from rl2.parallel.rank import is_first_rank
from rl2.rounding import ceil_div

AUTO = "auto"
# What a GPU holds besides tensors: contexts of CUDA and NCCL, SGLang's graphs, gaps between
# tensors. An estimate: an H100 had 1.2 to 1.8 GiB without SGLang's.
OUTSIDE_BYTES = 3 * GIB
# Of a GPU, that `auto` leaves free beside these: running out of memory costs more than a layer.
MARGIN = 0.05
# max_length_per_device=auto: the longest that fits on a GPU, the last one elsewhere.
LENGTHS = (32768, 16384, 8192)


def choose_for_device(config: Config, device: torch.device) -> None:
    """Puts numbers in the place of `auto`, the same on all processes, which must call.

    On GPUs they are chosen for the smallest one. What other programs hold there does not count: a
    run that resumes on GPUs of the same size has the same numbers.
    """
    gpu_bytes = None
    if device.type == "cuda":
        gpu_bytes = min(all_gather_objects(torch.cuda.get_device_properties(device).total_memory))
    for line in choose(config, dist.get_world_size(), gpu_bytes):
        if is_first_rank():
            print(line)


def choose(config: Config, num_processes: int, gpu_bytes: int | None) -> list[str]:
    """Puts numbers in the place of `auto` in the sections of the models that are trained.

    Returns in words what was chosen for GPUs of `gpu_bytes`. None is a CPU, where all layers run
    again.
    """
    lines: list[str] = []
    trained: dict[str, Footprint] = {}
    frozen = 0
    sections = {name: getattr(config, name) for name in worker_names(config)}
    is_open = any(
        AUTO in (x.gradient_checkpointing, x.max_length_per_device, x.keep_gathered)
        for x in sections.values()
    )
    if gpu_bytes is not None and is_open and not config.trainer.eval_only:
        try:
            trained, frozen = measure(config, num_processes - count_samplers(config))
        except Exception as error:  # admission will say what is wrong with the model
            reason = str(error).partition("\n")[0]
            lines.append(f"auto cannot tell what fits, so all layers run again: {reason}")
    rows_together = 2 if compares_pairs(config) else 1
    for name, section in sections.items():
        longest = ceil_div(longest_row(config) * rows_together, section.sp_size)
        if gpu_bytes is not None and name in trained:
            others = frozen + sum(trained[other].resting for other in trained if other != name)
            lines += fit(name, section, trained[name], longest, others, gpu_bytes)
        if section.max_length_per_device == AUTO:
            section.max_length_per_device = max(LENGTHS[-1], longest)
        if section.gradient_checkpointing == AUTO:
            section.gradient_checkpointing = True
    return lines


def measure(config: Config, num_processes: int) -> tuple[dict[str, Footprint], int]:
    """Returns what each trained model takes, and the bytes of the frozen ones in an update."""
    trained: dict[str, Footprint] = {}
    frozen = 0
    for name, section in loaded_models(config).items():
        is_trained = isinstance(section, WorkerConfig)
        dtype = compute_dtype(section.dtype, PLANNED_DEVICE)
        model: Any = replace(section, model_name=model_name(config, name))
        settings = ModelSettings(model, dtype, critic=name == "critic", trainable=is_trained)
        footprint = Footprint(settings, num_processes)
        if is_trained:
            trained[name] = footprint
        elif isinstance(config, PPOConfig) and has_full_kl(config):
            # The teacher runs in the update; the KL is a second head with a gradient of its weight.
            frozen += footprint.weights + footprint.copies + footprint.outside.copy + HEAD_BYTES
        else:
            frozen += footprint.resting
    actor = trained.get("actor")
    if actor is not None and needs_reference(config) and not actor.settings.freezes_base:
        settings = replace(actor.settings, trainable=False)
        frozen += Footprint(settings, num_processes).resting
    return trained, frozen


def fit(
    name: str, section: WorkerConfig, model: Footprint, longest: int, others: int, gpu_bytes: int
) -> list[str]:
    """Chooses for a section what fits beside the `others`. Returns it in words.

    Packs are the longest with which no layer runs again, since a host pays for packs and layers and
    not for tokens. If there are none, they are the shortest, and as few layers as possible run
    again. Weights stay gathered if there is room beside that. `longest` tokens a process must fit.
    """
    tokens, again = section.max_length_per_device, section.gradient_checkpointing
    lengths = [tokens] if isinstance(tokens, int) else [max(x, longest) for x in LENGTHS]
    num_layers = len(model.layers)
    counts = [*range(num_layers + 1)]
    if not isinstance(again, str):
        counts = [min(again, num_layers) if type(again) is int else num_layers * again]
    cases = [(length, counts[0]) for length in lengths] + [(lengths[-1], x) for x in counts]
    room = int((1 - MARGIN) * gpu_bytes) - OUTSIDE_BYTES - others
    is_kept = section.keep_gathered is True
    fitting = (case for case in cases if model.updating(*case, is_kept) <= room)
    length, count = next(fitting, cases[-1])
    words = []
    if again == AUTO:
        section.gradient_checkpointing = {0: False, num_layers: True}.get(count, count)
        share = f"{count} of {num_layers} layers run again"
        words.append(f"{name}.gradient_checkpointing=auto: {share}")
    if tokens == AUTO:
        section.max_length_per_device = length
        words.append(f"{name}.max_length_per_device=auto: {length} tokens")
    if section.keep_gathered == AUTO:
        is_kept = section.keep_gathered = model.updating(length, count, True) <= room
        words.append(f"{name}.keep_gathered=auto: {str(is_kept).lower()}")
    total = (others + model.updating(length, count, is_kept)) / GIB
    words.append(f"tensors of an update take about {total:.1f} of {gpu_bytes / GIB:.1f} GiB")
    return ["; ".join(words)] if len(words) > 1 else []
