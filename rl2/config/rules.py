"""The checks of a config before a model is loaded: ranges, choices, keys without effect, and checks
between keys.

Every check returns its problems as messages, so that the user sees all of them at once.
"""

import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from rl2.algorithms.by_name import argument_names, find_function
from rl2.config.key import Key, schema_keys
from rl2.config.schema import (
    WITH_SGLANG,
    DPOConfig,
    PPOConfig,
    RMConfig,
    SFTConfig,
    estimator_inputs,
    function_settings,
    needs_critic,
    worker_names,
)
from rl2.engine.select import choose_engine, is_installed
from rl2.env.contract import find_env_file

DATA_SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")
LENGTH_LIMITS = ("max_length_per_device", "max_inference_length_per_device")

Checked = tuple[list[str], list[str]]  # problems, warnings


def validate_ppo(config: PPOConfig, set_keys: set[str], world_size: int) -> Checked:
    """(problems, warnings) of a config whose keys, types and choices are right.

    `set_keys` are the keys that the user set. Without them no key is reported as unused.
    """
    workers = ["actor", "critic"] if needs_critic(config.adv.estimator) else ["actor"]
    problems = [
        *check_keys(config, set_keys),
        *check_paths(config),
        *check_env(config.rollout.env_path),
        *check_trajectory_lengths(config, workers),
        *check_step_sizes(config),
        *check_pairs(config),
        *check_engine(config.rollout),
    ]
    for name in workers:
        problems += check_worker(config, name, world_size)
    return problems, ppo_warnings(config, set_keys) + hardware_warnings(config, set_keys)


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
    problems = check_keys(config, set_keys) + check_paths(config)
    for name in worker_names(config):
        problems += check_worker(config, name, world_size)
        problems += check_row_lengths(config, name, rows_together)
    return problems, hardware_warnings(config, set_keys)


VALIDATORS: dict[type, Callable[[Any, set[str], int], Checked]] = {
    PPOConfig: validate_ppo,
    SFTConfig: validate_sft,
    DPOConfig: validate_dpo,
    RMConfig: validate_rm,
}


def get_value(config: Any, name: str) -> Any:
    """The value of a dotted name. `rollout.engine_args` is a dict, all else has attributes."""
    for part in name.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


# Checks of single keys, as the schema declares them.


def check_choices(config: Any) -> list[str]:
    """The keys whose value is none of their choices, or names no function."""
    problems = []
    for name, key in schema_keys(type(config)).items():
        value = get_value(config, name)
        if key.functions is not None:
            problems += _function_problem(value, key, name)
        elif key.choices and value is not None and value not in key.choices:
            *others, last = key.choices
            problems.append(f"{name}={value}: choose {', '.join(others)} or {last}")
    return problems


def _function_problem(value: str, key: Key, name: str) -> list[str]:
    assert key.functions is not None
    try:
        function = find_function(value, key.functions, name)
    except ValueError as error:
        return [str(error)]
    available = {entry.name for entry in fields(key.inputs)}
    available.update(part for part in dir(key.inputs) if not part.startswith("_"))
    required = set()
    for parameter in inspect.signature(function).parameters.values():
        is_named = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if is_named and parameter.default is parameter.empty:
            required.add(parameter.name)
    unknown = ", ".join(sorted(required - available))
    if unknown:
        choices = ", ".join(sorted(available))
        return [f"{name}={value} asks for {unknown}; it may ask for {choices}"]
    return []


def check_keys(config: Any, set_keys: set[str]) -> list[str]:
    """The keys outside their range, and the keys that the user set without an effect."""
    problems = []
    defaults = type(config)()
    for name, key in schema_keys(type(config)).items():
        value = get_value(config, name)
        default = get_value(defaults, name)
        if value is not None and value != default:
            for bound in broken_bounds(key, value):
                problems.append(f"{name}={value}: it must {bound}; the default is {default}")
    for name, reason in unused_keys(config, set_keys).items():
        problems.append(f"{name}={get_value(config, name)} has no effect {reason}")
    return problems


def broken_bounds(key: Key, value: Any) -> Iterator[str]:
    """The bounds of the key's range that the value breaks, in words that follow "it must"."""
    if key.above is not None and value <= key.above:
        yield f"be above {key.above:g}"
    if key.at_least is not None and value < key.at_least:
        yield f"not be below {key.at_least:g}"
    if key.at_most is not None and value > key.at_most:
        yield f"not be above {key.at_most:g}"
    if key.below is not None and value >= key.below:
        yield f"be below {key.below:g}"


def unused_keys(config: Any, set_keys: set[str]) -> dict[str, str]:
    """Key -> why the user's value has no effect, for each key that has none."""
    reasons = {}
    for name in sorted(non_default_keys(config, set_keys)):
        parts = name.split(".")
        for length in range(1, len(parts) + 1):  # its sections, then the key itself
            reason = no_effect_reason(config, ".".join(parts[:length]))
            if reason:
                reasons[name] = reason
                break
    return reasons


def non_default_keys(config: Any, set_keys: set[str]) -> set[str]:
    """The keys that the user set to another value than the default.

    A default has no effect to lose, and a whole config.yaml can be read back.
    """
    known = schema_keys(type(config))
    defaults = type(config)()
    return {
        name
        for name in set_keys
        if name not in known or get_value(config, name) != get_value(defaults, name)
    }


def no_effect_reason(config: Any, name: str) -> str:
    """Why a section or a key has no effect, or "" if it has one."""
    key = schema_keys(type(config)).get(name)  # None: an argument of the engine
    path = name.rpartition(".")[0]
    section = get_value(config, path) if path else config
    if key is None:
        return ""
    if key.only_if and not key.only_if.holds(config, section):
        return key.only_if.reason.format(config=config, section=section, path=path)
    if key.setting_of:
        return _setting_reason(config, name, f"{path}.{key.setting_of}")
    return ""


def _setting_reason(config: Any, name: str, function_key: str) -> str:
    """Why a setting of the function that `function_key` names has no effect, or ""."""
    path, _, setting = name.rpartition(".")
    known = schema_keys(type(config))
    table = known[function_key].functions
    assert table is not None
    function = get_value(config, function_key)
    parameters = function_settings(function, table, function_key)
    if setting in parameters:
        return ""
    settings = [other for other in parameters if f"{path}.{other}" in known]
    users = [other for other in table if setting in argument_names(table[other])]
    used = f"which uses {', '.join(settings) or 'no setting'}"
    return f"with {function_key}={function}, {used}; {setting} is used by {', '.join(users)}"


# Checks between keys.


def check_worker(config: Any, name: str, world_size: int) -> list[str]:
    """The problems of one worker's section."""
    worker = getattr(config, name)
    problems = check_layout(name, worker, world_size)
    if (worker.save_freq is None) != (worker.save_dir is None):
        problems.append(
            f"{name}.save_dir={worker.save_dir} and {name}.save_freq={worker.save_freq} need each "
            "other"
        )
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
    resume = config.trainer.resume
    if resume not in ("auto", "off") and not Path(resume).is_dir():
        problems.append(f"trainer.resume={resume}: choose auto, off or the folder of a checkpoint")
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
    return check_divides("rollout.tp_size", rollout.tp_size, processes_per_node, " of a node")


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
    clips = sorted({"actor.clip", "actor.clip_high", "actor.dual_clip"} & set_keys)
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
