"""`rl2 plan [ppo | sft | dpo | rm] key=value ...`: the memory that a job will need.

The trainer's own workers run on a device without memory (planned_device.py) with the
choices of a GPU. Every micro-batch is full. There are no formulas of memory: what the code
allocates is counted.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoConfig

from rl2.batch import Batch
from rl2.config.adapters import sends_adapters
from rl2.config.conditions import compares_pairs, count_samplers, has_full_kl
from rl2.config.parse import parse
from rl2.config.problem import Problem
from rl2.config.rules import check_lengths, loaded_models
from rl2.config.schema import TRAINER_CONFIGS, DPOConfig, PPOConfig, SFTConfig, worker_names
from rl2.engine.base import TrainerMemory
from rl2.engine.share import engine_bytes
from rl2.model.folder import check_config
from rl2.model.load import FILES, HuggingFaceFiles
from rl2.model.towers import language_model_class
from rl2.optimizer import make_optimizer
from rl2.parallel.device import GIB, PLANNED_DEVICE
from rl2.rounding import ceil_div, round_up
from rl2.run.signals import user_errors
from rl2.tools.options import plan_parser
from rl2.tools.planned_device import MemoryTracker, ModelsWithoutValues, planned_device
from rl2.trainer.dpo import needs_reference, preference_loss
from rl2.trainer.ppo import actor_loss, critic_loss, needs_entropy, needs_old_logps
from rl2.trainer.ppo_run import make_ppo_workers
from rl2.trainer.rm import reward_loss
from rl2.trainer.sft import sft_loss
from rl2.worker import Loss, Reference, Worker

# Keys of what need not be on this machine.
ELSEWHERE = (
    "data",
    "rollout.env_path",
    "rollout.engine",
    "rollout.engine_args",
    "trainer.resume",
)
# What a GPU holds besides tensors: contexts of CUDA and NCCL, SGLang's graphs, gaps between
# tensors. An estimate that has not been measured.
OUTSIDE_BYTES = 3 * GIB
FEW_LAYERS = (2, 4)  # of two plans that give that of all layers
USUAL_GPU_GIB = 79.2  # of an H100 or A100 that is sold with 80 GB


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

    @property
    def trainer(self) -> TrainerMemory:
        """What the engine's share follows from."""
        return TrainerMemory(max(0, self.sync - self.steady), self.engine_weights)


class PhasedOptimizer:
    """The optimizer that `make_optimizer` makes. It calls `on_step()` before each step."""

    def __init__(self, on_step: Callable[[], None], *arguments: Any):
        self.optimizer = make_optimizer(*arguments)
        self.state_dict = self.optimizer.state_dict
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
        self.plan = Plan()
        self.phase = "load"
        # The step of a worker's optimizer begins the phase step.
        new_optimizer = partial(PhasedOptimizer, partial(self.enter, "step"))
        self.new_worker = partial(Worker, source=source, new_optimizer=new_optimizer)

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


def predict(config: Any, num_gpus: int) -> Plan:
    """Plans a trainer with this config. The process must not have a process group.

    Bytes are linear in the number of layers that are alike, so that plans with few of them give
    that with all.
    """
    models = [model.model_name for model in loaded_models(config).values() if model.model_name]
    num_layers = {count_equal_layers(name) for name in dict.fromkeys(models)}
    counts_layers = any(
        type(getattr(config, name).gradient_checkpointing) is int for name in worker_names(config)
    )
    if counts_layers or len(num_layers) > 1 or max(num_layers) <= max(FEW_LAYERS):
        return plan_layers(config, num_gpus)
    few, more = (asdict(plan_layers(config, num_gpus, number)) for number in FEW_LAYERS)
    steps = (num_layers.pop() - FEW_LAYERS[0]) / (FEW_LAYERS[1] - FEW_LAYERS[0])

    def extend(number: Any, other: Any) -> Any:
        if isinstance(number, dict):
            return {key: extend(number[key], other[key]) for key in number}
        return round(number + steps * (other - number))

    return Plan(**extend(few, more))


def plan_layers(config: Any, num_gpus: int, num_layers: int | None = None) -> Plan:
    """Plans models that are cut to `num_layers` layers; None: with all of them.

    Compiled layers are planned as they are written, which needs no compiler and no less memory.
    Weights are not dithered: it takes memory only while they load, and most of the time here.
    """
    config = deepcopy(config)
    for name in worker_names(config):
        section = getattr(config, name)
        section.compile = section.dither_weights = False
    with planned_device(num_gpus) as memory:
        source = ModelsWithoutValues(memory, num_layers)
        return run_phases(config, memory, PLANNED_DEVICE, source)


def count_equal_layers(name: str) -> int:
    """Returns how many layers the model has if they are alike, 0 if they are not."""
    config = AutoConfig.from_pretrained(name)
    text = config.get_text_config()
    with init_empty_weights():
        model = language_model_class(config).from_config(config)
    for part in model.modules():
        if isinstance(part, nn.ModuleList) and len(part) == text.num_hidden_layers:
            shapes = {
                str([(key, x.shape) for key, x in layer.named_parameters()]) for layer in part
            }
            types = set(getattr(text, "layer_types", None) or [])
            return len(part) if len(shapes) == 1 and len(types) <= 1 else 0
    return 0


def run_phases(
    config: Any,
    memory: MemoryTracker,
    device: torch.device,
    source: HuggingFaceFiles = FILES,
) -> Plan:
    """Loads the workers of the trainer and runs each of its phases, while `memory` counts."""
    recorder = PlanRecorder(memory, source)
    run = run_ppo if isinstance(config, PPOConfig) else run_offline
    run(config, recorder, device)
    recorder.enter("end")
    return recorder.plan


def run_ppo(config: PPOConfig, recorder: PlanRecorder, device: torch.device) -> None:
    """Runs the phases of PPO."""
    num_updates = {"actor": 1, "critic": 1}
    workers, frozen = make_ppo_workers(config, device, num_updates, recorder.new_worker)
    actor = workers["actor"]
    recorder.plan.loaded = recorder.memory.bytes
    rows = config.data.prompts_per_rollout * config.data.responses_per_prompt
    make_batch = partial(full_batch, longest=longest_row(config), rows=rows)
    recorder.enter("infer")
    teacher = frozen["teacher_logps"] if has_full_kl(config) else None
    for worker in frozen.values():
        if worker is not teacher:
            worker.infer(make_batch(worker, inference=True))
    if needs_old_logps(config) or config.actor.log_entropy:
        rollout = make_batch(actor, inference=True)
        actor.infer(rollout, with_entropy=config.actor.log_entropy)
    if critic := workers.get("critic"):
        critic.infer(make_batch(critic, inference=True))
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
        num_bytes += sum(weight.nbytes for _, weight in actor.iter_adapters(actor.dtype))
    recorder.plan.engine_weights = num_bytes // config.rollout.tp_size
    recorder.plan.steady = recorder.memory.bytes


def run_offline(config: Any, recorder: PlanRecorder, device: torch.device) -> None:
    """Runs the phases of SFT, DPO and the reward model."""
    loss: Loss
    [name] = worker_names(config)
    worker = recorder.new_worker(
        getattr(config, name), device, critic=name == "critic", num_updates=1
    )
    reference = None
    if isinstance(config, DPOConfig) and needs_reference(config.dpo):
        reference = worker.reference()
    if isinstance(config, SFTConfig):
        loss, row_multiple = sft_loss, 1
    elif isinstance(config, DPOConfig):
        loss = partial(preference_loss, config.dpo)
        row_multiple = 2 if compares_pairs(config) else 1
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
        recorder.enter("infer")
        reference.infer(make_batch(inference=True))
    recorder.update(worker, make_batch(), loss, keep_groups_together=row_multiple > 1)
    recorder.enter("save")
    for _, weight in worker.iter_full_weights(worker.dtype):
        del weight
    recorder.plan.steady = recorder.memory.bytes


def longest_row(config: Any) -> int:
    """Tokens of the longest sequence that the trainer may run."""
    length: int = config.data.max_length
    if isinstance(config, PPOConfig):
        length += config.rollout.max_turns * config.rollout.train_sampling_params.max_new_tokens
    return length


def full_batch(
    worker: Worker | Reference,
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
    budget = config.max_length_per_device
    if inference and config.max_inference_length_per_device:
        budget = config.max_inference_length_per_device
    budget *= config.sp_size
    in_micro_batch = round_up(ceil_div(budget, longest), row_multiple)
    length = min(longest, budget // in_micro_batch)
    count = min(rows, 2 * in_micro_batch * worker.mesh.dp_size)
    names = Batch.__annotations__.keys() - {"candidates", "experts", "hinted"}
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
    return batch


def totals(config: Any, plan: Plan, gpu_bytes: int) -> dict[str, tuple[int, int]]:
    """Phase -> bytes of (the trainer, the engine) on a GPU."""
    phases = {phase: (size, 0) for phase, size in plan.peaks.items()}
    if isinstance(config, PPOConfig) and not count_samplers(config):
        share = config.rollout.gpu_memory_utilization
        free = gpu_bytes - plan.loaded  # when SGLang starts
        if config.rollout.engine == "local":
            engine = plan.engine_weights
        elif isinstance(share, str):  # auto
            engine = max(plan.engine_weights, engine_bytes(plan.trainer, gpu_bytes, free))
        else:
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


def near_settings(config: Any, num_gpus: int) -> Iterator[tuple[str, Any, int]]:
    """Yields (in words, config, GPUs) of settings that need less memory, the nearest ones first.

    Each has the keys of the one before it too, until more GPUs take their place.
    """
    names = worker_names(config)
    half = min(getattr(config, name).max_length_per_device for name in names) // 2
    smaller = config
    words = []
    for key, value in (
        ("max_length_per_device", half),
        ("offload_optimizer", True),
        ("offload_model", True),
    ):
        changed = deepcopy(smaller)
        problems: list[Problem] = []
        for name in names:
            section = getattr(changed, name)
            setattr(section, key, value)
            problems += check_lengths(changed, name, section)
        if changed != smaller and not problems:
            smaller = changed
            words.append(f"{names[0]}.{key}={str(value).lower()}")  # the critic follows the actor
            yield " ".join(words), smaller, num_gpus
    for factor in (2, 4, 8):
        num_more = num_gpus * factor
        yield f"--gpus {num_more + count_samplers(config)}", config, num_more


def show(phases: dict[str, tuple[int, int]], num_gpus: int, gpu_bytes: int) -> bool:
    """Prints the table. Returns whether the job fits."""
    print(f"GiB on each of {num_gpus} GPUs of {gpu_bytes / GIB:.1f} GiB, predicted:")
    print("phase      trainer   engine      sum")
    for phase, (trainer, engine) in phases.items():
        numbers = (trainer, engine, trainer + engine)
        print(f"{phase:8}" + "".join(f"{number / GIB:9.1f}" for number in numbers))
    print(f"Add about {OUTSIDE_BYTES / GIB:.0f} for what is not a tensor: contexts, graphs, gaps.")
    fits, verdict = judge(phases, gpu_bytes)
    print(verdict, flush=True)
    return fits


def main() -> None:
    """Prints the plan. Exits with status 1 if the job does not fit."""
    arguments, words = plan_parser().parse_known_args()
    trainer = "ppo"
    if words and re.fullmatch(r"\w+", words[0]):
        trainer = words.pop(0)
    if trainer not in TRAINER_CONFIGS:
        print(f"rl2 plan {trainer}: choose {', '.join(TRAINER_CONFIGS)}", file=sys.stderr)
        sys.exit(2)
    os.environ["WORLD_SIZE"] = str(arguments.gpus)
    config = parse(TRAINER_CONFIGS[trainer], words, elsewhere=ELSEWHERE)
    with user_errors():
        for name, model in loaded_models(config).items():
            if model.model_name:  # a critic's may be the actor's
                check_config(f"{name}.model_name", model.model_name)
        fits = print_plan(config, arguments)
    sys.exit(0 if fits else 1)


def default_gpu_memory() -> float:
    """Returns the GiB of the GPU here or, without one, of a usual GPU."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory / GIB
    return USUAL_GPU_GIB


def print_plan(config: Any, arguments: argparse.Namespace) -> bool:
    """Prints the plan and, if the job does not fit, settings that may. Returns whether it fits."""
    gpu_bytes = int((arguments.gpu_memory or default_gpu_memory()) * GIB)
    num_samplers = count_samplers(config)
    num_trainers = arguments.gpus - num_samplers
    plan = predict(config, num_trainers)
    if num_samplers:
        weights = plan.engine_weights / GIB
        print(
            f"{num_samplers} of the {arguments.gpus} GPUs only sample: an engine's weights take "
            f"{weights:.1f} GiB of each, and the rest is for keys and values"
        )
    fits = show(totals(config, plan, gpu_bytes), num_trainers, gpu_bytes)
    if fits:
        describe_checkpointing(config, plan, num_trainers, gpu_bytes)
        return True
    print("Nearest settings, each with its own prediction:")
    for words_of_settings, changed, num_gpus in near_settings(config, num_trainers):
        phases = totals(changed, predict(changed, num_gpus), gpu_bytes)
        fits, verdict = judge(phases, gpu_bytes)
        print(f"  {words_of_settings}: {verdict}", flush=True)
        if fits:
            break
    return False


def describe_checkpointing(config: Any, plan: Plan, num_gpus: int, gpu_bytes: int) -> None:
    """Prints how few layers have to be recomputed, if all are.

    The peak of an update is convex in the number of layers, so it is not above the line between
    the plans for all and for none.
    """
    names = [name for name in worker_names(config) if checkpoints_all(config, name)]
    if not names:
        return
    keeping = deepcopy(config)
    for name in names:
        getattr(keeping, name).gradient_checkpointing = False
    least, most = plan.peaks["update"], predict(keeping, num_gpus).peaks["update"]
    model_name = getattr(config, names[0]).model_name
    num_layers = AutoConfig.from_pretrained(model_name).get_text_config().num_hidden_layers
    share = (gpu_bytes - OUTSIDE_BYTES - least) / max(1, most - least)
    kept = int(num_layers * min(1.0, share))
    if kept > 0:
        keys = " ".join(f"{name}.gradient_checkpointing={num_layers - kept}" for name in names)
        print(f"{keys}: fits too, and is faster: {kept} of {num_layers} layers are not recomputed")


def checkpoints_all(config: Any, name: str) -> bool:
    """Whether the worker recomputes all layers in its backward pass."""
    section = getattr(config, name)
    return section.gradient_checkpointing is True and bool(section.model_name)


if __name__ == "__main__":
    main()
