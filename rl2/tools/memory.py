"""The memory that a job will need, phase by phase.

The trainer's own workers run on a device without memory (planned_process.py) with the
choices of a GPU. Every micro-batch is full. There are no formulas of memory: what the code
allocates is counted.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from rl2.batch import Batch
from rl2.config.conditions import (
    compares_pairs,
    count_samplers,
    has_full_kl,
    longest_row,
    needs_reference,
    sends_adapters,
)
from rl2.config.schema import Config, DPOConfig, OfflineConfig, PPOConfig, SFTConfig, worker_names
from rl2.engine.base import SHARE_BESIDE_TRAINER
from rl2.gpu_memory import OUTSIDE_BYTES
from rl2.model.load import FILES, HuggingFaceFiles
from rl2.optimizer import AdamW, Muon
from rl2.parallel.device import GIB, PLANNED_DEVICE
from rl2.parallel.planned_device import MemoryTracker
from rl2.rounding import ceil_div, round_up
from rl2.tools.planned_process import ModelsWithoutValues, planned_process
from rl2.trainer.dpo import preference_loss
from rl2.trainer.ppo import actor_loss, critic_loss, needs_entropy, needs_old_logps
from rl2.trainer.ppo_run import make_models
from rl2.trainer.rm import reward_loss
from rl2.trainer.sft import sft_loss
from rl2.worker import Loss, SharedReference, Worker


@dataclass
class Plan:
    """Bytes of tensors on rank 0's GPU, the fullest one. An engine's own memory is not counted."""

    # The most in each phase: load, infer, update, step, sync or save.
    peaks: dict[str, int] = field(default_factory=dict)
    loaded: int = 0  # after loading, when an engine starts
    steady: int = 0  # between steps, while an engine generates
    engine_weights: int = 0  # of the engine's own weights, on each of its GPUs

    @property
    def sync(self) -> int:
        """The most while weights are sent to the engine."""
        return self.peaks.get("sync", 0)


class PhasedOptimizer:
    """An optimizer that calls `on_step()` before each step."""

    def __init__(self, optimizer: AdamW | Muon, on_step: Callable[[], None]):
        self.optimizer = optimizer
        self.on_step = on_step

    def step(self, lr: float) -> None:
        self.on_step()
        self.optimizer.step(lr)


class PlanRecorder:
    """Fills `plan` while the phases of a job run. A phase may be entered several times.

    `memory` counts, and `source` gives the models.
    """

    def __init__(self, memory: MemoryTracker, source: HuggingFaceFiles):
        self.memory = memory
        self.source = source
        self.plan = Plan()
        self.phase = "load"

    def new_worker(self, config: Any, device: torch.device, **options: Any) -> Worker:
        """Makes a worker. The step of its optimizer begins the phase step."""
        worker = Worker(config, device, source=self.source, **options)
        if worker.optimizer is not None:
            worker.optimizer = PhasedOptimizer(worker.optimizer, partial(self.enter, "step"))
        return worker

    def enter(self, phase: str) -> None:
        """Ends the current phase and begins this one."""
        peaks = self.plan.peaks
        peaks[self.phase] = max(self.memory.peak, peaks.get(self.phase, 0))
        self.memory.reset_peak()
        self.phase = phase

    def update(self, worker: Worker, *arguments: Any, **options: Any) -> None:
        """Updates the worker, in the phases update and step."""
        self.enter("update")
        worker.update(*arguments, **options)


def predict(config: Config, num_gpus: int) -> Plan:
    """Plans a trainer with this config. The process must not have a process group.

    Compiled layers are planned as they are written, which needs no compiler and no less memory.
    Weights are not dithered: it takes memory only while they load, and most of the time here.
    """
    config = deepcopy(config)
    for name in worker_names(config):
        section = getattr(config, name)
        section.compile = section.dither_weights = False
    with planned_process(num_gpus) as memory:
        return run_phases(config, memory, PLANNED_DEVICE, ModelsWithoutValues(memory))


def run_phases(
    config: Config,
    memory: MemoryTracker,
    device: torch.device,
    source: HuggingFaceFiles = FILES,
) -> Plan:
    """Loads the workers of the trainer and runs each of its phases, while `memory` counts."""
    recorder = PlanRecorder(memory, source)
    if isinstance(config, PPOConfig):
        run_ppo(config, recorder, device)
    else:
        run_offline(config, recorder, device)
    recorder.enter("end")
    return recorder.plan


def run_ppo(config: PPOConfig, recorder: PlanRecorder, device: torch.device) -> None:
    """Runs the phases of PPO."""
    num_updates = {"actor": 1, "critic": 1}
    models = make_models(config, device, num_updates, recorder.new_worker)
    actor, critic = models.actor, models.critic
    recorder.plan.loaded = recorder.memory.bytes
    rows = config.data.trajectories_per_rollout
    make_batch = partial(full_batch, longest=longest_row(config), rows=rows)
    recorder.enter("infer")
    teacher = models.teacher if has_full_kl(config) else None
    for worker in (models.reference, models.teacher):
        if worker is not None and worker is not teacher:
            worker.score(make_batch(worker, inference=True))
    if needs_old_logps(config) or config.actor.log_entropy:
        rollout = make_batch(actor, inference=True)
        actor.score(rollout, with_entropy=config.actor.log_entropy)
    if critic is not None:
        critic.score(make_batch(critic, inference=True))
        recorder.update(critic, make_batch(critic), partial(critic_loss, config.critic))
    recorder.update(
        actor,
        make_batch(actor),
        partial(actor_loss, config.actor, config.kl),
        with_entropy=needs_entropy(config.actor),
        teacher=teacher,
    )
    recorder.enter("sync")
    weights = actor.iter_full_weights(actor.dtype)
    num_bytes = sum(weight.nbytes for _, weight in weights)
    if sends_adapters(config):  # which the engine has beside these
        num_bytes += sum(weight.nbytes for _, weight in actor.iter_trained_weights(actor.dtype))
    recorder.plan.engine_weights = num_bytes // config.rollout.tp_size
    recorder.plan.steady = recorder.memory.bytes


def run_offline(config: OfflineConfig, recorder: PlanRecorder, device: torch.device) -> None:
    """Runs the phases of SFT, DPO and the reward model."""
    loss: Loss
    [name] = worker_names(config)
    worker = recorder.new_worker(
        getattr(config, name), device, critic=name == "critic", num_updates=1
    )
    reference = None
    if needs_reference(config):
        reference = worker.reference()
    if isinstance(config, SFTConfig):
        loss, row_multiple = sft_loss, 1
    elif isinstance(config, DPOConfig):
        loss = partial(preference_loss, config.dpo)
        row_multiple = 2 if compares_pairs(config) else 1
    else:
        loss, row_multiple = reward_loss, 2
    make_batch = partial(
        full_batch,
        worker,
        longest=longest_row(config),
        rows=config.data.batch_size * row_multiple,
        row_multiple=row_multiple,
    )
    if reference is not None:
        recorder.enter("infer")
        reference.score(make_batch(inference=True))
    recorder.update(worker, make_batch(), loss, keep_groups_together=row_multiple > 1)
    recorder.enter("save")
    for _, weight in worker.iter_full_weights(worker.dtype):
        del weight
    recorder.plan.steady = recorder.memory.bytes


def full_batch(
    worker: Worker | SharedReference,
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
    config: Any = worker.config
    budget = config.max_length_per_device
    if inference and config.max_inference_length_per_device:
        budget = config.max_inference_length_per_device
    budget *= config.sp_size
    in_micro_batch = round_up(ceil_div(budget, longest), row_multiple)
    length = min(longest, budget // in_micro_batch)
    count = min(rows, 2 * in_micro_batch * worker.mesh.dp_size)
    names = Batch.__annotations__.keys() - {"candidates", "experts"}
    columns: dict[str, Any] = dict.fromkeys(names, torch.zeros(count, length))
    batch = Batch(**columns)
    # Rows differ, since two equal answers to a prompt have no gradient in DPO.
    token_of_row = torch.arange(count, dtype=torch.int32) % 2
    batch.tokens = token_of_row[:, None].repeat(1, length + 1)
    batch.mask = torch.ones(count, length, dtype=torch.int8)
    batch.token_weights = batch.mask.float()
    batch.trajectory = torch.arange(count)
    batch.group = batch.trajectory // row_multiple
    batch.pair_margin = torch.zeros(count)
    batch.label = torch.zeros(count)
    batch.reference_point = torch.zeros(count)
    return batch


def totals(config: Config, plan: Plan, gpu_bytes: int) -> dict[str, tuple[int, int]]:
    """Phase -> bytes of (the trainer, the engine) on a GPU."""
    phases = {phase: (size, 0) for phase, size in plan.peaks.items()}
    if isinstance(config, PPOConfig) and not count_samplers(config):
        share = config.rollout.gpu_memory_utilization
        free = gpu_bytes - plan.loaded  # when SGLang starts
        if config.rollout.engine == "server":
            return phases
        if config.rollout.engine == "local":
            engine = plan.engine_weights
        else:
            share = SHARE_BESIDE_TRAINER if share == "auto" else share
            engine = int(share * (free - OUTSIDE_BYTES))
        phases["rollout"] = (plan.steady, engine)
        phases["sync"] = (plan.sync, plan.engine_weights)
    return phases


def judge(phases: dict[str, tuple[int, int]], gpu_bytes: int) -> tuple[bool, str]:
    """Returns (whether the job fits, its highest phase and what that leaves of a GPU in words)."""
    phase = max(phases, key=lambda name: sum(phases[name]))
    peak = sum(phases[phase])
    free = gpu_bytes - OUTSIDE_BYTES - peak
    verdict = f"fits, {free / GIB:.1f} GiB free"
    if free < 0:
        verdict = f"does not fit, {-free / GIB:.1f} GiB are missing"
    return free >= 0, f"{peak / GIB:.1f} GiB in {phase}: {verdict}"
