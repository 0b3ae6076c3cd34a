"""The checks of a model's section: its folder, its layout on the processes, its longest rows."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from rl2.config.conditions import compares_pairs, count_samplers
from rl2.config.engines import installed_version, is_installed, release_numbers
from rl2.config.problem import Problem, wrong_value
from rl2.config.schema import ModelConfig, PPOConfig, WorkerConfig
from rl2.model.adapter_folder import read_adapter_config

TORCH_OF_4_BITS = (2, 13)  # FSDP2 of torch 2.11 fails at parameters of bytes; 2.12 is not tried


def check_model(config: Any, name: str, model: ModelConfig) -> Iterator[Problem]:
    """The problems of the section `name`, which is `model`."""
    yield from check_model_name(f"{name}.model_name", model.model_name or "")
    yield from check_layout(name, model, count_samplers(config))
    yield from check_lengths(config, name, model)
    if isinstance(model, WorkerConfig):
        yield from check_worker(name, model)


def check_model_name(key: str, name: str) -> Iterator[Problem]:
    """Whether the folder holds a model. A missing name is reported elsewhere."""
    is_local = name.startswith(("/", ".", "~")) or name.count("/") > 1
    if name and Path(name).is_dir():
        if not Path(name, "config.json").exists():
            yield wrong_value(key, name, "this folder holds no model (no config.json)")
    elif is_local:
        yield wrong_value(key, name, "no such folder; a model of the hub is owner/name")


def check_layout(name: str, model: ModelConfig, num_samplers: int) -> Iterator[Problem]:
    """Whether the parallel sizes of a model divide the processes that train.

    Sequences and models are split over the processes that tensor parallelism leaves.
    `num_samplers` of the job do not train.
    """
    num_processes = int(os.environ.get("WORLD_SIZE", "1")) - num_samplers
    if num_processes < 1:
        return  # the number of samplers is wrong
    tp_size = model.tp_size
    yield from check_divides(f"{name}.tp_size", tp_size, num_processes)
    remark = ""
    if tp_size > 1 and num_processes % tp_size == 0:
        num_processes //= tp_size
        remark = f" that {name}.tp_size={tp_size} leaves"
    yield from check_divides(f"{name}.sp_size", model.sp_size, num_processes, remark)
    yield from check_divides(f"{name}.fsdp_size", model.fsdp_size, num_processes, remark, " or 0")


def check_divides(
    key: str, size: int, num_processes: int, remark: str = "", also: str = ""
) -> Iterator[Problem]:
    """The problem of a size that does not divide the processes; the range is checked elsewhere."""
    if size > 0 and num_processes % size:
        divisors = [str(n) for n in range(1, num_processes + 1) if num_processes % n == 0]
        processes = f"{num_processes} process{'es' if num_processes > 1 else ''}{remark}"
        choices = f"{', '.join(divisors)}{also}"
        message = f"{key}={size} does not divide the {processes}: choose {choices}"
        yield Problem(key, size, message)


def check_lengths(config: Any, name: str, model: ModelConfig) -> Iterator[Problem]:
    """Whether the longest sequences fit one micro-batch of a model.

    In training the two rows of a pair are together, in inference they are not.
    """
    length = config.data.max_length
    num_rows = 2 if compares_pairs(config) else 1
    for limit, tokens, rows_together in (
        ("max_length_per_device", model.max_length_per_device, num_rows),
        ("max_inference_length_per_device", model.max_inference_length_per_device, 1),
    ):
        total = length * rows_together
        longest = f"a row may get: data.max_length {length} x {rows_together}"
        if isinstance(config, PPOConfig):
            turns = config.rollout.max_turns
            answer = config.rollout.train_sampling_params.max_new_tokens
            total = length + turns * answer
            longest = (
                f"a trajectory may get: data.max_length {length} + {turns} x max_new_tokens "
                f"{answer}"
            )
        if tokens and 0 < tokens * model.sp_size < total:
            key = f"{name}.{limit}"
            message = f"{key}={tokens} is shorter than {longest} = {total}"
            yield Problem(key, tokens, f"{message}; raise it, or lower the others")


def check_worker(name: str, worker: WorkerConfig) -> Iterator[Problem]:
    """The problems of what only a trained model has."""
    if len(worker.betas) != 2:
        reason = "give two rates, of the gradient's mean and of its square's, as [0.9,0.999]"
        yield wrong_value(f"{name}.betas", worker.betas, reason)
    if worker.quantize_base and not is_installed("bitsandbytes"):
        reason = "it needs bitsandbytes, which is not installed; pip install 'rl2[bitsandbytes]'"
        yield wrong_value(f"{name}.quantize_base", worker.quantize_base, reason)
    torch_version = installed_version("torch") or "0"
    if worker.quantize_base and release_numbers(torch_version) < TORCH_OF_4_BITS:
        reason = f"it needs torch 2.13 or later, and this is {torch_version}"
        yield wrong_value(f"{name}.quantize_base", worker.quantize_base, reason)
    if worker.quantize_base and worker.tp_size > 1:
        reason = "tensor parallelism would cut rows inside their 4-bit blocks"
        advice = f"set {name}.tp_size=1; FSDP divides the memory of the base too"
        yield wrong_value(f"{name}.quantize_base", worker.quantize_base, f"{reason}; {advice}")
    if worker.optimizer_dir and not Path(worker.optimizer_dir).is_dir():
        yield wrong_value(f"{name}.optimizer_dir", worker.optimizer_dir, "no such folder")
    if worker.lora_rank > 0 or worker.adapter:
        yield from check_lora(name, worker)


def find_base_warnings(config: Any, name: str, worker: WorkerConfig) -> Iterator[Problem]:
    """Whether the adapters of the section `name` were trained on another model than its own.

    One model may have a name on the hub and be in a folder, so only the last parts of the names
    count. A run exports the merged model with the adapter in a folder below: together they would
    apply it twice.
    """
    if not worker.adapter:
        return
    with suppress(ValueError):  # which `check_lora` reports
        base = read_adapter_config(worker.adapter).get("base_model_name_or_path")
        model = worker.model_name or config.actor.model_name
        is_merged = Path(worker.adapter).resolve().parent == Path(model).resolve()
        if base and base != model and (is_merged or Path(base).name != Path(model).name):
            reason = f"these adapters were trained on {base}, and the base here is {model}"
            if is_merged:
                reason += ", which has them merged in if a run has exported it"
            advice = f"give their base as {name}.model_name, or leave {name}.adapter out"
            yield wrong_value(f"{name}.adapter", worker.adapter, f"{reason}; {advice}")


def check_lora(name: str, worker: WorkerConfig) -> Iterator[Problem]:
    """Whether there can be adapters."""
    if worker.adapter:
        try:
            settings = read_adapter_config(worker.adapter)
        except ValueError as error:
            yield wrong_value(f"{name}.adapter", worker.adapter, str(error))
            return
        if name == "actor" and settings.get("modules_to_save"):
            reason = "they are of a reward model or a critic, with its head: give critic.adapter"
            yield wrong_value("actor.adapter", worker.adapter, reason)
        rank = settings["r"]
        if worker.lora_rank != rank:
            reason = f"the adapters in {worker.adapter} have rank {rank}; leave the key out"
            yield wrong_value(f"{name}.lora_rank", worker.lora_rank, reason)
    key = f"{name}.lora_rank"
    given = f"{key}={worker.lora_rank}"
    if not is_installed("peft"):
        message = f"{given} needs peft, which is not installed; pip install peft"
        yield Problem(key, worker.lora_rank, message)
