"""The checks of a config before a model is loaded: those of single keys, and checks between keys.

A check yields its problems as messages, so that the user sees all of them at once.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rl2.config.conditions import estimator_inputs, has_test_data, needs_critic
from rl2.config.key_rules import Checked, check_choices, check_keys, non_default_keys
from rl2.config.schema import DPOConfig, PPOConfig, RMConfig, worker_names
from rl2.engine.select import choose_engine, is_installed
from rl2.env.contract import find_env_file

DATA_SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")
INTERVAL_CORRECTIONS = ("token_mask", "geometric_mask")  # they keep ratios in [1 / cap, cap]


def validate(config: Any, set_keys: set[str]) -> Checked:
    """(problems, warnings) of a config whose keys and types are right.

    `set_keys` are the keys that the user set.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    problems = check_choices(config)
    if problems:  # which may be why other keys seem to have no effect
        set_keys = set()
    key_problems, warnings = check_keys(config, set_keys)
    problems += [*key_problems, *check_paths(config)]
    workers = worker_names(config)
    if isinstance(config, PPOConfig):
        if not needs_critic(config.adv.estimator):
            workers.remove("critic")
        if config.teacher.model_name:
            problems += check_model("teacher.model_name", config.teacher.model_name)
            problems += check_layout("teacher", config.teacher, world_size)
            problems += check_lengths(config, "teacher")
        problems += check_env(config.rollout.env_path)
        problems += check_step_sizes(config)
        problems += check_pairs(config)
        problems += check_rewards(config.rollout)
        problems += check_kind_of_run(config)
        problems += check_engine(config.rollout)
        warnings += [*rollout_warnings(config), *evaluation_warnings(config)]
        warnings += [*loss_warnings(config, set_keys), *freeze_warnings(config)]
    for name in workers:
        problems += check_worker(config, name, world_size)
        problems += check_lengths(config, name)
    return without_repeats(problems), warnings


def without_repeats(problems: list[str]) -> list[str]:
    """The problems without those of critic and teacher that the actor has too: they follow it."""
    kept = []
    for problem in problems:
        as_actor = problem.replace("critic.", "actor.").replace("teacher.", "actor.")
        if as_actor == problem or as_actor not in problems:
            kept.append(problem)
    return kept


# Checks between keys.


def check_worker(config: Any, name: str, world_size: int) -> Iterator[str]:
    """The problems of one worker's section."""
    worker = getattr(config, name)
    yield from check_layout(name, worker, world_size)
    if worker.save_freq is not None and worker.save_dir is None:
        yield f"{name}.save_freq={worker.save_freq} needs {name}.save_dir"
    adapters = f"{name}.lora_rank={worker.lora_rank}"
    if worker.lora_rank > 0 and worker.tp_size > 1:
        yield (
            f"{adapters} with {name}.tp_size={worker.tp_size}: adapters are not cut into parts; "
            f"set {name}.tp_size=1, fsdp_size and sp_size divide the work as well"
        )
    if worker.lora_rank > 0 and not is_installed("peft"):
        yield f"{adapters} needs peft, which is not installed; pip install peft"


def check_layout(name: str, worker: Any, world_size: int) -> Iterator[str]:
    """Whether the parallel sizes of a worker divide the processes.

    Sequences and models are split over the processes that tensor parallelism leaves.
    """
    yield from check_divides(f"{name}.tp_size", worker.tp_size, world_size)
    tp_size = max(1, worker.tp_size)
    if world_size % tp_size:
        tp_size = 1
    rest = world_size // tp_size
    remark = f" that {name}.tp_size={tp_size} leaves" if tp_size > 1 else ""
    yield from check_divides(f"{name}.sp_size", worker.sp_size, rest, remark)
    yield from check_divides(f"{name}.fsdp_size", worker.fsdp_size, rest, remark, " or 0")


def check_divides(
    key: str, size: int, num_processes: int, remark: str = "", also: str = ""
) -> Iterator[str]:
    """The problem of a size that does not divide the processes; the range is checked elsewhere."""
    if size > 0 and num_processes % size:
        divisors = [str(n) for n in range(1, num_processes + 1) if num_processes % n == 0]
        processes = f"{num_processes} process{'es' if num_processes > 1 else ''}{remark}"
        choices = f"{', '.join(divisors)}{also}"
        yield f"{key}={size} does not divide the {processes}: choose {choices}"


def check_paths(config: Any) -> Iterator[str]:
    """The files and folders that are missing, of the data, the workers and the checkpoint."""
    for key, path in {"data.path": config.data.path, **config.data.test_paths}.items():
        yield from check_data(key, path)
    if config.data.test_ratio and config.data.test_path:
        yield (
            f"data.test_ratio={config.data.test_ratio}: data.test_path has the test rows already; "
            "leave one of the two out"
        )
    for name in worker_names(config):
        worker = getattr(config, name)
        yield from check_model(f"{name}.model_name", worker.model_name)
        if worker.optimizer_dir and not Path(worker.optimizer_dir).is_dir():
            yield f"{name}.optimizer_dir={worker.optimizer_dir}: no such folder"
    template = config.data.chat_template
    if template not in (None, "plain") and not Path(template).expanduser().is_file():
        yield f"data.chat_template={template}: choose plain or the path of a Jinja file"
    resume = config.trainer.resume
    folder = resume.removeprefix("force:")
    if resume not in ("auto", "off", "force") and not Path(folder).is_dir():
        yield f"trainer.resume={resume}: choose auto, off, force or the folder of a checkpoint"


def check_data(key: str, path: Any) -> Iterator[str]:
    """Whether the rows exist, unless they are a dataset of the hub or the path is missing."""
    if not isinstance(path, str):
        yield f"{key}={path}: expected a path, or {key}.NAME=PATH for each of several sets"
        return
    is_local = path.endswith(DATA_SUFFIXES) or path.startswith(("/", ".", "~"))
    if is_local and not Path(path).expanduser().exists():
        yield f"{key}={path}: no such file or folder"


def check_model(key: str, name: str | None) -> Iterator[str]:
    """Whether the folder holds a model. A missing name is reported elsewhere."""
    name = name or ""
    is_local = name.startswith(("/", ".", "~")) or name.count("/") > 1
    if name and Path(name).is_dir():
        if not Path(name, "config.json").exists():
            yield f"{key}={name}: this folder holds no model (no config.json)"
    elif is_local:
        yield f"{key}={name}: no such folder; a model of the hub is owner/name"


def check_env(path: str) -> Iterator[str]:
    """Whether the env file exists. A missing path is reported elsewhere."""
    if not path:
        return
    try:
        file = find_env_file(path)
    except ValueError as error:
        yield str(error)
    else:
        if file.suffix != ".py":
            yield f"rollout.env_path={path}: this is no Python file (.py)"


def check_lengths(config: Any, name: str) -> Iterator[str]:
    """Whether the longest sequences fit one micro-batch of a worker: in training, where the two
    rows of a pair are together, and in inference.
    """
    worker = getattr(config, name)
    length = config.data.max_length
    num_rows = 2 if isinstance(config, DPOConfig | RMConfig) else 1
    for limit, rows_together in (
        ("max_length_per_device", num_rows),
        ("max_inference_length_per_device", 1),
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
        tokens = getattr(worker, limit)
        if tokens and 0 < tokens * worker.sp_size < total:
            yield (
                f"{name}.{limit}={tokens} is shorter than {longest} = {total}; raise it, or lower "
                "the others"
            )


def check_step_sizes(config: PPOConfig) -> Iterator[str]:
    """Whether a step has enough trajectories for its groups and its mini-batches."""
    data = config.data
    estimator = config.adv.estimator
    compares_group = "group" in estimator_inputs(estimator)
    if compares_group and data.responses_per_prompt == 1:
        yield (
            f"data.responses_per_prompt=1 leaves adv.estimator={estimator} no group to compare "
            "with: every advantage would be 0; sample 2 or more, or use "
            "adv.estimator=reinforce_plus_plus or gae"
        )
    num_trajectories = data.prompts_per_rollout * data.responses_per_prompt
    for name in worker_names(config):
        updates = getattr(config, name).update_per_rollout
        if 0 < num_trajectories < updates:
            yield (
                f"{name}.update_per_rollout={updates} is more than the {num_trajectories} "
                "trajectories of a step"
            )


def check_pairs(config: PPOConfig) -> Iterator[str]:
    """Keys that need each other, and keys that exclude each other."""
    actor = config.actor
    kl = config.kl
    if config.rollout.partial and config.trainer.deterministic:
        yield (
            "trainer.deterministic=true: partial rollouts depend on time; leave it or "
            "rollout.partial out"
        )
    if kl.coef >= 0 and (kl.coef > 0) != (kl.type is not None):
        yield (f"kl.coef={kl.coef} and kl.type={kl.type} need each other: choose reward or loss")
    if kl.update_freq and actor.lora_rank > 0:
        yield (
            f"kl.update_freq={kl.update_freq}: with actor.lora_rank={actor.lora_rank} the "
            "reference is the actor without its adapters, which stays the start model; leave one "
            "of them out"
        )
    estimator = config.adv.estimator
    if "teacher_logps" in estimator_inputs(estimator) and not config.teacher.model_name:
        yield f"adv.estimator={estimator} needs the key teacher.model_name"
    if actor.correction in INTERVAL_CORRECTIONS and actor.correction_cap == 1:
        yield (
            f"actor.correction_cap=1: actor.correction={actor.correction} masks all ratios outside "
            "[1 / cap, cap], which leaves nothing to train; the default is 2"
        )
    if (actor.average == "constant") != (actor.average_constant is not None):
        yield (
            f"actor.average={actor.average} and actor.average_constant={actor.average_constant} "
            "need each other"
        )


def check_rewards(rollout: Any) -> Iterator[str]:
    """Whether the ranges of rewards and lengths are ranges."""
    bounds = rollout.filter
    if bounds and (len(bounds) != 2 or not bounds[0] < bounds[1]):
        yield f"rollout.filter={bounds}: give a low and a high bound of the mean reward, as [0,1]"
    buffer, answer = rollout.overlong_buffer, rollout.train_sampling_params.max_new_tokens
    if buffer and buffer > answer:
        yield (
            f"rollout.overlong_buffer={buffer} is more than "
            f"rollout.train_sampling_params.max_new_tokens={answer}: lower it, e.g. to a fifth"
        )


def check_kind_of_run(config: PPOConfig) -> Iterator[str]:
    """Whether there is what an evaluation, or a run on saved rollouts, works on."""
    saved = config.trainer.rollouts_from
    if config.trainer.eval_only and not has_test_data(config):
        yield "trainer.eval_only=true needs data.test_path or data.test_ratio"
    if config.trainer.eval_only and saved:
        yield "trainer.eval_only=true trains on no rollouts: leave trainer.rollouts_from out"
    elif saved and not Path(saved).is_dir():
        yield f"trainer.rollouts_from={saved}: no such folder"


def check_engine(rollout: Any) -> Iterator[str]:
    """Whether SGLang is installed, its size divides the processes of a node, and torch's memory is
    of a kind that it can take over and give back.
    """
    if choose_engine(rollout.engine)[0] != "sglang":
        return
    if not is_installed("sglang"):
        yield (
            "rollout.engine=sglang: it is not installed; pip install sglang, or set "
            "rollout.engine=local"
        )
        return
    processes_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    yield from check_divides("rollout.tp_size", rollout.tp_size, processes_per_node, " of a node")
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        value = os.environ.get(name, "")
        is_set = re.search(r"expandable_segments\s*:\s*true", value, re.IGNORECASE)
        if is_set and torch.cuda.is_available():
            yield (
                f"{name}={value}: SGLang cannot give its memory to the trainer with "
                "expandable_segments; take it out of the variable, or set rollout.engine=local"
            )


# Warnings.


def rollout_warnings(config: PPOConfig) -> Iterator[str]:
    """Settings of the rollout that are allowed but easily misunderstood."""
    params = config.rollout.train_sampling_params
    if config.rollout.partial and config.actor.correction == "none":
        yield (
            "rollout.partial=true: tokens that older weights sampled are trained as if the current "
            "ones had; actor.correction=token_tis weighs them by their recorded log-probabilities"
        )
    if params.top_p < 1 or params.top_k != -1:
        yield (
            "rollout.train_sampling_params: the policy's log-probabilities are from before top_p "
            "and top_k: the trainer does not see what these cut off"
        )
    if config.trainer.rollouts_from and config.data.test_path:
        yield "data.test_path: nothing is sampled with trainer.rollouts_from, not even a test"


def loss_warnings(config: PPOConfig, set_keys: set[str]) -> Iterator[str]:
    """Settings of the loss that are allowed but easily misunderstood."""
    actor = config.actor
    clips = sorted(
        {"actor.clip", "actor.clip_high", "actor.dual_clip"} & non_default_keys(config, set_keys)
    )
    is_on_policy = actor.updates_per_step == 1 and not config.trainer.rollouts_from
    if clips and is_on_policy and actor.loss == "ppo":
        yield (
            f"{', '.join(clips)}: with actor.update_per_rollout=1 and actor.epochs_per_rollout=1 "
            "the ratio is exactly 1 and never clipped"
        )
    if actor.updates_per_step > 1 and actor.loss == "reinforce":
        yield (
            f"actor.loss=reinforce: after the first of the {actor.updates_per_step} updates of a "
            "rollout the answers are those of an older policy, and this loss has no ratio that "
            "corrects for it"
        )
    if config.kl.type == "loss" and config.kl.loss_estimator == "k1":
        yield (
            "kl.loss_estimator=k1: the gradient of k1 in a loss is 0 on average; k2 has that of "
            "the KL"
        )


def evaluation_warnings(config: PPOConfig) -> Iterator[str]:
    """Several answers to a test prompt that are one."""
    num_answers = config.data.responses_per_test_prompt
    if num_answers > 1 and config.rollout.test_sampling_params.temperature == 0:
        yield (
            f"data.responses_per_test_prompt={num_answers}: with "
            "rollout.test_sampling_params.temperature=0 the answers to a prompt are all the same; "
            "set a temperature, e.g. 1 as in training"
        )


def freeze_warnings(config: PPOConfig) -> Iterator[str]:
    """Workers that are frozen for the whole run."""
    for name in ("actor", "critic"):
        freeze_steps = getattr(config, name).freeze_steps
        if config.trainer.max_steps and freeze_steps >= config.trainer.max_steps:
            yield (
                f"{name}.freeze_steps={freeze_steps}: {name} is not updated in any of the "
                f"{config.trainer.max_steps} steps"
            )
