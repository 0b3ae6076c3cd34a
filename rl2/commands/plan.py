"""`python -m rl2 plan [ppo | sft | dpo | rm] key=value ...`: the memory that a job will need.

The trainer's own workers run on a device without memory (parallel/planned_device.py) with the
choices of a GPU. Every micro-batch is full. There are no formulas: what the code allocates is
counted.
"""

import argparse
import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rl2.batch import Batch
from rl2.config.parse import parse
from rl2.config.schema import DPOConfig, PPOConfig, RMConfig, SFTConfig, worker_names
from rl2.engine.share import engine_bytes
from rl2.memory_plan import (
    GIB,
    Plan,
    automatic_sections,
    recomputed_layers,
    with_checkpointing,
    write_plan,
)
from rl2.parallel import offload
from rl2.parallel.planned_device import PLANNED_DEVICE, MemoryTracker, PlannedDevice
from rl2.trainer.build import make_ppo_workers
from rl2.trainer.dpo import preference_loss
from rl2.trainer.ppo import actor_loss, critic_loss, needs_entropy, needs_old_logps
from rl2.trainer.rm import reward_loss
from rl2.trainer.sft import sft_loss
from rl2.worker import Loss, Worker

TRAINERS: dict[str, type] = {"ppo": PPOConfig, "sft": SFTConfig, "dpo": DPOConfig, "rm": RMConfig}
# Keys of what need not be on this machine.
ELSEWHERE = ("data.", "rollout.env_path", "rollout.engine", "trainer.resume")
# What a GPU holds besides tensors: contexts of CUDA and NCCL, SGLang's graphs, gaps between
# tensors. An estimate that has not been measured.
OUTSIDE_BYTES = 3 * GIB
USUAL_GPU_GIB = 79.2  # of an H100 or A100 that is sold with 80 GB


@contextmanager
def planned_device(num_gpus: int, kind: str = "cuda") -> Iterator[PlannedDevice]:
    """A context in which this process is rank 0 of `num_gpus` on a device without memory.

    Models get weights without values. `kind` is the device whose choices the code makes.
    """
    make_tensor = torch.tensor

    def tensor(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
        # torch.tensor does not pass through dispatch modes; `to` does.
        made = make_tensor(data, **options)
        return made if device is None else made.to(device)

    def from_pretrained(cls: Any, name: str, *, config: Any, dtype: torch.dtype, **_: Any) -> Any:
        with init_empty_weights(include_buffers=False):
            hf = cls.from_config(config, dtype=dtype)
        with memory.fake:
            return hf.to_empty(device="cpu"), {"missing_keys": []}

    make_empty = offload.empty_on_host

    def empty_on_host(likes: Any) -> list[torch.Tensor]:
        with memory.fake:
            return make_empty(likes)

    def all_gather_object(values: list[Any], value: Any, group: Any = None) -> None:
        values[:] = [value] * len(values)

    dist.init_process_group("fake", rank=0, world_size=num_gpus, store=FakeStore())
    memory = PlannedDevice(kind)
    loader = classmethod(from_pretrained)
    fsdp_device = "torch.distributed.fsdp._fully_shard._fully_shard._get_device_from_mesh"
    with ExitStack() as stack:
        for patch in (
            mock.patch("torch.tensor", tensor),
            mock.patch.object(AutoModelForCausalLM, "from_pretrained", loader),
            mock.patch.object(AutoModelForSequenceClassification, "from_pretrained", loader),
            mock.patch("rl2.model.load.admit", lambda *model: None),
            mock.patch("rl2.parallel.attention._activate_flash_attention_3", lambda: None),
            mock.patch.object(offload, "empty_on_host", empty_on_host),
            mock.patch("torch.distributed.all_gather_object", all_gather_object),
            mock.patch(fsdp_device, lambda mesh: PLANNED_DEVICE),
            mock.patch("rl2.parallel.device.planned_kind", kind),
            memory,
        ):
            stack.enter_context(patch)
        stack.callback(dist.destroy_process_group)
        yield memory


class PhasePeaks:
    """The peak of memory in each phase. A phase may be entered several times."""

    def __init__(self, memory: MemoryTracker):
        self.memory = memory
        self.phase = "load"
        self.bytes: dict[str, int] = {}
        self.between_steps: list[int] = []  # bytes before the first step and after each one

    def enter(self, phase: str) -> None:
        """Ends the current phase and begins this one."""
        self.bytes[self.phase] = max(self.memory.peak, self.bytes.get(self.phase, 0))
        self.memory.reset_peak()
        self.phase = phase

    def end_step(self) -> None:
        """Between steps only what stays is in memory: an engine generates now."""
        self.between_steps.append(self.memory.bytes)

    def update(self, worker: Worker, *arguments: Any, **options: Any) -> None:
        """An update of the worker, in the phases update and step."""
        self.enter("update")
        step = worker.optimizer.step

        def enter_and_step(lr: float) -> None:
            self.enter("step")
            step(lr)

        with mock.patch.object(worker.optimizer, "step", enter_and_step):
            worker.update(*arguments, **options)


def predict(config: Any, num_gpus: int, kind: str = "cuda") -> Plan:
    """The plan of the trainer whose config this is, in a process without a process group.

    Compiled parts are planned as they are written, which needs no compiler and no less memory.
    """
    config = deepcopy(config)
    for name in worker_names(config):
        getattr(config, name).compile = False
    with planned_device(num_gpus, kind) as memory:
        return run_phases(config, memory, PLANNED_DEVICE)


def run_phases(config: Any, memory: MemoryTracker, device: torch.device) -> Plan:
    """Loads the workers of the trainer and runs each of its phases, while `memory` counts."""
    peaks = PhasePeaks(memory)
    if isinstance(config, PPOConfig):
        engine_weights = run_ppo(config, peaks, device)
    else:
        engine_weights = 0
        run_offline(config, peaks, device)
    peaks.enter("end")
    return Plan(
        num_gpus=dist.get_world_size(),
        peaks=peaks.bytes,
        loaded=peaks.between_steps[0],
        steady=peaks.between_steps[-1],
        engine_weights=engine_weights,
    )


def run_ppo(config: PPOConfig, peaks: PhasePeaks, device: torch.device) -> int:
    """PPO's phases. Returns the bytes of the engine's weights."""
    workers, frozen = make_ppo_workers(config, device, num_steps=1)
    actor = workers["actor"]
    peaks.end_step()
    rows = config.data.prompts_per_rollout * config.data.responses_per_prompt
    make_batch = partial(full_batch, longest=longest_row(config), rows=rows)
    peaks.enter("infer")
    for worker in frozen.values():
        worker.infer(make_batch(worker, inference=True))
    if needs_old_logps(config):
        actor.infer(make_batch(actor, inference=True))
    if critic := workers.get("critic"):
        critic.infer(make_batch(critic, inference=True))
        peaks.update(critic, make_batch(critic), partial(critic_loss, config.critic))
    peaks.update(
        actor,
        make_batch(actor),
        partial(actor_loss, config.actor, config.kl),
        with_entropy=needs_entropy(config.actor),
    )
    peaks.enter("sync")
    weights = actor.iter_full_weights(actor.dtype)
    engine_weights = sum(weight.nbytes for _, weight in weights) // config.rollout.tp_size
    peaks.end_step()
    return engine_weights


def run_offline(config: Any, peaks: PhasePeaks, device: torch.device) -> None:
    """The phases of SFT, DPO and the reward model."""
    loss: Loss
    is_critic = isinstance(config, RMConfig)
    worker = Worker(config.critic if is_critic else config.actor, device, is_critic, num_updates=1)
    reference = worker.reference() if isinstance(config, DPOConfig) else None
    peaks.end_step()
    if isinstance(config, SFTConfig):
        loss, row_multiple = sft_loss, 1
    elif isinstance(config, DPOConfig):
        loss, row_multiple = partial(preference_loss, config.dpo), 2
    else:
        loss, row_multiple = partial(reward_loss, config.rm.center), 2
    make_batch = partial(
        full_batch,
        worker,
        longest=longest_row(config),
        rows=config.data.batch_size * row_multiple,
        row_multiple=row_multiple,
    )
    if reference is not None:
        peaks.enter("infer")
        reference.infer(make_batch(inference=True))
    peaks.update(worker, make_batch(), loss, keep_groups_together=row_multiple > 1)
    peaks.enter("save")
    for _, weight in worker.iter_full_weights(worker.model.export_dtype):
        del weight
    peaks.end_step()


def longest_row(config: Any) -> int:
    """Tokens of the longest sequence that the trainer may run."""
    length: int = config.data.max_length
    if isinstance(config, PPOConfig):
        length += config.rollout.max_turns * config.rollout.train_sampling_params.max_new_tokens
    return length


def full_batch(
    worker: Worker,
    longest: int,
    rows: int,
    row_multiple: int = 1,
    inference: bool = False,
) -> Batch:
    """Rows that fill two micro-batches of the worker on each process; all tokens are trained.

    In the second one the gradients of the first one are there.

    No row is longer than `longest`, and there are at most `rows`, those of a step. `row_multiple`
    rows follow each other as a group.
    """
    config = worker.config
    budget = inference and config.max_inference_length_per_device or config.max_length_per_device
    budget *= config.sp_size
    in_micro_batch = -(-budget // longest // row_multiple) * row_multiple
    length = min(longest, budget // in_micro_batch)
    count = min(rows, 2 * in_micro_batch * worker.mesh.dp_size)
    columns = torch.zeros(count, length)
    mask = torch.ones(count, length, dtype=torch.int8)
    return Batch(
        tokens=torch.ones(count, length + 1, dtype=torch.int32),
        mask=mask,
        engine_logps=columns,
        rewards=columns,
        group=torch.arange(count) // row_multiple,
        trajectory=torch.arange(count),
        old_logps=columns,
        ref_logps=columns,
        teacher_logps=columns,
        values=columns,
        advantages=columns,
        returns=columns,
        token_weights=mask.float(),
        pair_margin=torch.zeros(count),
    )


def totals(config: Any, plan: Plan, gpu_bytes: int) -> dict[str, tuple[int, int]]:
    """Phase -> bytes of (the trainer, the engine) on a GPU."""
    phases = {phase: (size, 0) for phase, size in plan.peaks.items()}
    if isinstance(config, PPOConfig):
        share = config.rollout.gpu_memory_utilization
        engine = plan.engine_weights
        if config.rollout.engine != "local" and isinstance(share, str):
            engine = max(
                engine, engine_bytes(plan, gpu_bytes, gpu_bytes - plan.loaded, plan.loaded)
            )
        elif config.rollout.engine != "local":  # a share of what is free when SGLang starts
            engine = int(share * (gpu_bytes - OUTSIDE_BYTES - plan.loaded))
        phases["rollout"] = (plan.steady, engine)
        phases["sync"] = (plan.sync, plan.engine_weights)
    return phases


def free_bytes(phases: dict[str, tuple[int, int]], gpu_bytes: int) -> int:
    """What the highest phase leaves of a GPU. It is negative if the job does not fit."""
    return gpu_bytes - OUTSIDE_BYTES - max(map(sum, phases.values()))


def describe(phases: dict[str, tuple[int, int]], gpu_bytes: int) -> str:
    """The highest phase, and whether it fits."""
    phase = max(phases, key=lambda name: sum(phases[name]))
    peak = sum(phases[phase])
    free = free_bytes(phases, gpu_bytes)
    verdict = f"fits, {free / GIB:.1f} free" if free >= 0 else f"{-free / GIB:.1f} too many"
    return f"{peak / GIB:.1f} GiB in {phase}: {verdict}"


def near_settings(config: Any, num_gpus: int) -> Iterator[tuple[str, Any, int]]:
    """(in words, config, GPUs) of settings that need less memory, the nearest ones first."""
    names = worker_names(config)
    sections = [getattr(config, name) for name in names]
    rows_together = 2 if isinstance(config, DPOConfig | RMConfig) else 1
    longest = rows_together * longest_row(config)
    half = min(section.max_length_per_device for section in sections) // 2
    shorter: dict[str, Any] = {}
    if half * min(section.sp_size for section in sections) >= longest:
        shorter = {"max_length_per_device": half}
    offload = {"offload_optimizer": True}
    offload_all = {**offload, "offload_model": True}
    tried = [config]
    for keys in (shorter, offload, offload_all, {**offload_all, **shorter}):
        changed = deepcopy(config)
        for name in names:
            vars(getattr(changed, name)).update(keys)
        if changed not in tried:
            tried.append(changed)
            # The critic follows the actor.
            words = [f"{names[0]}.{key}={str(value).lower()}" for key, value in keys.items()]
            yield " ".join(words), changed, num_gpus
    for factor in (2, 4, 8):
        yield f"--gpus {num_gpus * factor}", config, num_gpus * factor


def show(phases: dict[str, tuple[int, int]], num_gpus: int, gpu_bytes: int) -> None:
    """Prints the table."""
    print(f"GiB on each of {num_gpus} GPUs of {gpu_bytes / GIB:.1f} GiB, predicted:")
    print("phase      trainer   engine      sum")
    for phase, (trainer, engine) in phases.items():
        numbers = (trainer, engine, trainer + engine)
        print(f"{phase:8}" + "".join(f"{number / GIB:9.1f}" for number in numbers))
    print(f"Add about {OUTSIDE_BYTES / GIB:.0f} for what is not a tensor: contexts, graphs, gaps.")
    print(describe(phases, gpu_bytes), flush=True)


def main() -> None:
    """Prints the plan. Exits with status 1 if the job does not fit."""
    arguments, words = read_options(sys.argv[1:])
    trainer = words.pop(0) if words and words[0] in TRAINERS else "ppo"
    os.environ["WORLD_SIZE"] = str(arguments.gpus)
    config = parse(TRAINERS[trainer], words, elsewhere=ELSEWHERE)
    gpu_bytes = int(arguments.gpu_memory * GIB)
    if automatic_sections(config):
        num_layers = recomputed_layers(config, arguments.gpus, gpu_bytes)
        config = with_checkpointing(config, num_layers)
    phases = totals(config, predict(config, arguments.gpus), gpu_bytes)
    show(phases, arguments.gpus, gpu_bytes)
    if free_bytes(phases, gpu_bytes) >= 0:
        return
    print("Nearest settings, each predicted anew:")
    for words_of_settings, changed, num_gpus in near_settings(config, arguments.gpus):
        phases = totals(changed, predict(changed, num_gpus), gpu_bytes)
        print(f"  {words_of_settings}: {describe(phases, gpu_bytes)}", flush=True)
        if free_bytes(phases, gpu_bytes) >= 0:
            break
    sys.exit(1)


def read_options(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of this command, and all other arguments, which are those of a trainer."""
    parser = argparse.ArgumentParser(
        prog="python -m rl2 plan",
        usage="%(prog)s [ppo | sft | dpo | rm] [--gpus N] [--gpu-memory GIB] key=value ...",
        description="Predicts the memory of each phase of a job. It needs no GPU, no weights and "
        "no data; the model is its config.json.",
        allow_abbrev=False,
    )
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    gib = USUAL_GPU_GIB
    if torch.cuda.is_available():
        gib = torch.cuda.get_device_properties(0).total_memory / GIB
    parser.add_argument("--gpus", type=int, default=world_size, help="processes of the job")
    parser.add_argument("--gpu-memory", type=float, default=gib, help="GiB of one GPU")
    return parser.parse_known_args(words)


if __name__ == "__main__":  # of Prediction
    write_plan(predict(*pickle.load(sys.stdin.buffer)))
