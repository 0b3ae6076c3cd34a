"""The checks of a config before a model is loaded: those of single keys, and checks between keys.

Every check returns its problems as messages, so that the user sees all of them at once.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rl2.config.key import schema_keys
from rl2.config.key_rules import Checked, check_keys, get_value, non_default_keys
from rl2.config.schema import (
    WITH_SGLANG,
    DPOConfig,
    PPOConfig,
    RMConfig,
    SFTConfig,
    estimator_inputs,
    needs_critic,
    worker_names,
)
from rl2.engine.select import choose_engine, is_installed
from rl2.env.contract import find_env_file

DATA_SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")
LENGTH_LIMITS = ("max_length_per_device", "max_inference_length_per_device")
INTERVAL_CORRECTIONS = ("token_mask", "geometric_mask")  # they keep ratios in [1 / cap, cap]


def validate_ppo(config: PPOConfig, set_keys: set[str], world_size: int) -> Checked:
    """(problems, warnings) of a config whose keys, types and choices are right.

    `set_keys` are the keys that the user set. Without them no key is reported as unused.
    """
    workers = ["actor", "critic"] if needs_critic(config.adv.estimator) else ["actor"]
    problems, warnings = check_keys(config, set_keys)
    problems += [
        *check_paths(config),
        *check_env(config.rollout.env_path),
        *check_trajectory_lengths(config, workers),
        *check_step_sizes(config),
        *check_pairs(config),
        *check_engine(config.rollout),
    ]
    for name in workers:
        problems += check_worker(config, name, world_size)
    warnings += ppo_warnings(config, set_keys) + freeze_warnings(config)
    warnings += hardware_warnings(config, set_keys)
    return without_repeats(problems), warnings


def without_repeats(problems: list[str]) -> list[str]:
    """The problems without those of the critic that the actor has too: it follows the actor."""
    kept = []
    for problem in problems:
        as_actor = problem.replace("critic.", "actor.")
        if as_actor == problem or as_actor not in problems:
            kept.append(problem)
    return kept


def validate_sft(config: SFTConfig, set_keys: set[str], world_size: int) -> Checked:
    """(problems, warnings) of a config whose keys, types and choices are right."""
    return _validate_offline(config, set_keys, world_size, rows_together=1)


def validate_dpo(config: DPOConfig, set_keys: set[str], world_size: int) -> Checked:
    """(problems, warnings) of a config whose keys, types and choices are right."""
    return _validate_offline(config, set_keys, world_size, rows_together=2)


def validate_rm(config: RMConfig, set_keys: set[str], world_size: int) -> Checked:
    """(problems, warnings) of a config whose keys, types and choices are right."""
    return _validate_offline(config, set_keys, world_size, rows_together=2)


def _validate_offline(
    config: Any, set_keys: set[str], world_size: int, rows_together: int
) -> Checked:
    """The checks of a trainer without rollouts. `rows_together` rows must fit one micro-batch."""
    problems, warnings = check_keys(config, set_keys)
    problems += check_paths(config)
    for name in worker_names(config):
        problems += check_worker(config, name, world_size)
        problems += check_row_lengths(config, name, rows_together)
    return problems, warnings + hardware_warnings(config, set_keys)


VALIDATORS: dict[type, Callable[[Any, set[str], int], Checked]] = {
    PPOConfig: validate_ppo,
    SFTConfig: validate_sft,
    DPOConfig: validate_dpo,
    RMConfig: validate_rm,
}


# Checks between keys.


def check_worker(config: Any, name: str, world_size: int) -> list[str]:
    """The problems of one worker's section."""
    worker = getattr(config, name)
    problems = check_layout(name, worker, world_size)
    if worker.save_freq is not None and worker.save_dir is None:
        problems.append(f"{name}.save_freq={worker.save_freq} needs {name}.save_dir")
    adapters = f"{name}.lora_rank={worker.lora_rank}"
    if worker.lora_rank > 0 and worker.tp_size > 1:
        problems.append(
            f"{adapters} with {name}.tp_size={worker.tp_size}: adapters are not cut into parts; "
            f"set {name}.tp_size=1, fsdp_size and sp_size divide the work as well"
        )
    if worker.lora_rank > 0 and not is_installed("peft"):
        problems.append(f"{adapters} needs peft, which is not installed; pip install peft")
    return problems


def check_layout(name: str, worker: Any, world_size: int) -> list[str]:
    """Whether the parallel sizes of a worker divide the processes.

    Sequences and models are split over the processes that tensor parallelism leaves.
    """
    problems = check_divides(f"{name}.tp_size", worker.tp_size, world_size)
    tp_size = worker.tp_size if worker.tp_size > 0 and not problems else 1
    rest = world_size // tp_size
    remark = f" that {name}.tp_size={tp_size} leaves" if tp_size > 1 else ""
    problems += check_divides(f"{name}.sp_size", worker.sp_size, rest, remark)
    problems += check_divides(f"{name}.fsdp_size", worker.fsdp_size, rest, remark, " or 0")
    return problems


def check_divides(
    key: str, size: int, num_processes: int, remark: str = "", also: str = ""
) -> list[str]:
    """The problem of a size that does not divide the processes; the range is checked elsewhere."""
    if size <= 0 or num_processes % size == 0:
        return []
    divisors = [str(n) for n in range(1, num_processes + 1) if num_processes % n == 0]
    processes = f"{num_processes} process{'es' if num_processes > 1 else ''}{remark}"
    choices = f"{', '.join(divisors)}{also}"
    return [f"{key}={size} does not divide the {processes}: choose {choices}"]


def check_paths(config: Any) -> list[str]:
    """The files and folders that are missing, of the data, the workers and the checkpoint."""
    problems = check_data(config, "data.path") + check_data(config, "data.test_path")
    for name in worker_names(config):
        worker = getattr(config, name)
        problems += check_model(f"{name}.model_name", worker.model_name)
        if worker.optimizer_dir and not Path(worker.optimizer_dir).is_dir():
            problems.append(f"{name}.optimizer_dir={worker.optimizer_dir}: no such folder")
    template = config.data.chat_template
    if template not in (None, "plain") and not Path(template).expanduser().is_file():
        problems.append(f"data.chat_template={template}: choose plain or the path of a Jinja file")
    resume = config.trainer.resume
    folder = resume.removeprefix("force:")
    if resume not in ("auto", "off", "force") and not Path(folder).is_dir():
        problems.append(
            f"trainer.resume={resume}: choose auto, off, force or the folder of a checkpoint"
        )
    return problems


def check_data(config: Any, key: str) -> list[str]:
    """Whether the rows exist, unless they are a dataset of the hub."""
    path = get_value(config, key) or ""
    is_local = path.endswith(DATA_SUFFIXES) or path.startswith(("/", ".", "~"))
    if is_local and not Path(path).expanduser().exists():
        return [f"{key}={path}: no such file or folder"]
    return []


def check_model(key: str, name: str | None) -> list[str]:
    """Whether the folder holds a model. A missing name is reported elsewhere."""
    if not name:
        return []
    if Path(name).is_dir():
        is_model = Path(name, "config.json").exists()
        return [] if is_model else [f"{key}={name}: this folder holds no model (no config.json)"]
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        return [f"{key}={name}: no such folder; a model of the hub is owner/name"]
    return []


def check_env(path: str) -> list[str]:
    """Whether the env file exists. A missing path is reported elsewhere."""
    if not path:
        return []
    try:
        file = find_env_file(path)
    except ValueError as error:
        return [str(error)]
    is_python = file.suffix == ".py"
    return [] if is_python else [f"rollout.env_path={path}: this is no Python file (.py)"]


def check_trajectory_lengths(config: PPOConfig, workers: list[str]) -> list[str]:
    """Whether the longest trajectory fits one micro-batch of each worker."""
    turns = config.rollout.max_turns
    answer = config.rollout.train_sampling_params.max_new_tokens
    prompt = config.data.max_length
    total = prompt + turns * answer
    problems: list[str] = []
    if min(turns, answer, prompt) <= 0:  # their ranges are checked elsewhere
        return problems
    for name in workers:
        worker = getattr(config, name)
        for limit in LENGTH_LIMITS:
            tokens = getattr(worker, limit)
            if tokens and 0 < tokens * worker.sp_size < total:
                problems.append(
                    f"{name}.{limit}={tokens} is shorter than a trajectory may get: "
                    f"data.max_length {prompt} + {turns} x max_new_tokens {answer} = {total}; "
                    "raise it, or lower the others"
                )
    return problems


def check_row_lengths(config: Any, name: str, rows_together: int) -> list[str]:
    """Whether the longest rows fit one micro-batch: `rows_together` in training, one elsewhere."""
    worker = getattr(config, name)
    problems = []
    for limit, num_rows in zip(LENGTH_LIMITS, (rows_together, 1), strict=True):
        tokens = getattr(worker, limit)
        total = config.data.max_length * num_rows
        if tokens and 0 < tokens * worker.sp_size < total:
            problems.append(
                f"{name}.{limit}={tokens} is shorter than a row may get: {total} = data.max_length "
                f"x {num_rows}; raise it, or lower data.max_length"
            )
    return problems


def check_step_sizes(config: PPOConfig) -> list[str]:
    """Whether a step has enough trajectories for its groups and its mini-batches."""
    data = config.data
    problems = []
    estimator = config.adv.estimator
    compares_group = "group" in estimator_inputs(estimator)
    if compares_group and data.responses_per_prompt == 1:
        problems.append(
            f"data.responses_per_prompt=1 leaves adv.estimator={estimator} no group to compare "
            "with: every advantage would be 0; sample 2 or more, or use adv.estimator=gae"
        )
    num_trajectories = data.prompts_per_rollout * data.responses_per_prompt
    for name in worker_names(config):
        updates = getattr(config, name).update_per_rollout
        if 0 < num_trajectories < updates:
            problems.append(
                f"{name}.update_per_rollout={updates} is more than the {num_trajectories} "
                "trajectories of a step"
            )
    return problems


def check_pairs(config: PPOConfig) -> list[str]:
    """Keys that need each other, and keys that exclude each other."""
    actor = config.actor
    kl = config.kl
    problems = []
    if config.rollout.partial and config.trainer.deterministic:
        problems.append(
            "trainer.deterministic=true: partial rollouts depend on time; leave it or "
            "rollout.partial out"
        )
    if kl.coef >= 0 and (kl.coef > 0) != (kl.type is not None):
        problems.append(
            f"kl.coef={kl.coef} and kl.type={kl.type} need each other: choose reward or loss"
        )
    if actor.correction in INTERVAL_CORRECTIONS and actor.correction_cap == 1:
        problems.append(
            f"actor.correction_cap=1: actor.correction={actor.correction} masks all ratios outside "
            "[1 / cap, cap], which leaves nothing to train; the default is 2"
        )
    if (actor.average == "constant") != (actor.average_constant is not None):
        problems.append(
            f"actor.average={actor.average} and actor.average_constant={actor.average_constant} "
            "need each other"
        )
    return problems


def check_engine(rollout: Any) -> list[str]:
    """Whether SGLang is installed and its size divides the processes of a node."""
    if choose_engine(rollout.engine)[0] != "sglang":
        return []
    if not is_installed("sglang"):
        return [
            "rollout.engine=sglang: it is not installed; pip install sglang, or set "
            "rollout.engine=local"
        ]
    processes_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return [
        *check_divides("rollout.tp_size", rollout.tp_size, processes_per_node, " of a node"),
        *check_allocator(),
    ]


def check_allocator() -> list[str]:
    """Whether torch's memory is of a kind that SGLang can take over and give back."""
    problems = []
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        value = os.environ.get(name, "")
        is_set = re.search(r"expandable_segments\s*:\s*true", value, re.IGNORECASE)
        if is_set and torch.cuda.is_available():
            problems.append(
                f"{name}={value}: SGLang cannot give its memory to the trainer with "
                "expandable_segments; take it out of the variable, or set rollout.engine=local"
            )
    return problems


# Warnings.


def ppo_warnings(config: PPOConfig, set_keys: set[str]) -> list[str]:
    """Settings that are allowed but easily misunderstood."""
    actor = config.actor
    params = config.rollout.train_sampling_params
    warnings = []
    if config.rollout.partial and actor.correction == "none":
        warnings.append(
            "rollout.partial=true: tokens that older weights sampled are trained as if the current "
            "ones had; actor.correction=token_tis weighs them by their recorded log-probabilities"
        )
    if params.top_p < 1 or params.top_k != -1:
        warnings.append(
            "rollout.train_sampling_params: the policy's log-probabilities are from before top_p "
            "and top_k: the trainer does not see what these cut off"
        )
    clips = sorted(
        {"actor.clip", "actor.clip_high", "actor.dual_clip"} & non_default_keys(config, set_keys)
    )
    if clips and actor.update_per_rollout == 1 and actor.loss == "ppo":
        warnings.append(
            f"{', '.join(clips)}: with actor.update_per_rollout=1 the ratio is exactly 1 and never "
            "clipped"
        )
    if config.kl.type == "loss" and config.kl.loss_estimator == "k1":
        warnings.append(
            "kl.loss_estimator=k1: the gradient of k1 in a loss is 0 on average; k2 has that of "
            "the KL"
        )
    return warnings


def freeze_warnings(config: PPOConfig) -> list[str]:
    """Workers that are frozen for the whole run."""
    warnings = []
    for name in ("actor", "critic"):
        freeze_steps = getattr(config, name).freeze_steps
        if config.trainer.max_steps and freeze_steps >= config.trainer.max_steps:
            warnings.append(
                f"{name}.freeze_steps={freeze_steps}: {name} is not updated in any of the "
                f"{config.trainer.max_steps} steps"
            )
    return warnings


def hardware_warnings(config: Any, set_keys: set[str]) -> list[str]:
    """The user's keys that have no effect on this machine."""
    known = schema_keys(type(config))
    changed = sorted(non_default_keys(config, set_keys))
    gpu_keys = [name for name in changed if name in known and known[name].needs_gpu]
    warnings = []
    if gpu_keys and not torch.cuda.is_available():
        warnings.append(f"{', '.join(gpu_keys)}: nothing to do without a GPU")
    sections = tuple(name for name, key in known.items() if key.only_if is WITH_SGLANG)
    sglang_keys = [name for name in changed if name.startswith(sections)]
    if sglang_keys and config.rollout.engine == "auto":
        warnings += _sglang_warning(sglang_keys)
    return warnings


def _sglang_warning(sglang_keys: list[str]) -> list[str]:
    engine, reason = choose_engine("auto")
    if engine == "sglang":
        return []
    return [f"{', '.join(sglang_keys)}: nothing to do with the {engine} engine ({reason})"]
