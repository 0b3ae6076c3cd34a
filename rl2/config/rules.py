"""The checks of a config before a model is loaded.

key_rules.py has the checks of single keys, combinations.py the tables of keys that do not fit
together, engines.py whether the engine can run here. Here are the checks of what keys name: rows,
models, environments. A check yields all problems that it finds, so that the user sees them at once.
"""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from rl2.adapter_folder import read_adapter_config
from rl2.config.combinations import (
    Row,
    find_broken,
    find_broken_worker,
    find_misleading,
    find_unclipped,
    find_unused,
)
from rl2.config.conditions import (
    compares_pairs,
    count_samplers,
    exact_obstacles,
    loads_teacher,
    needs_critic,
)
from rl2.config.engines import choose_engine, has_gpu, installation_problems
from rl2.config.key_rules import check_choices, check_keys, non_default_keys, without_repeats
from rl2.config.problem import Problem, unfit_value, wrong_value
from rl2.config.schema import (
    Config,
    DataConfig,
    ModelConfig,
    PPOConfig,
    WorkerConfig,
    model_name,
    source_name,
    teacher_model,
    worker_names,
)
from rl2.config.values import get_value
from rl2.user_files import find_env_file

DATA_SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")


def validate(config: Config, set_keys: set[str]) -> tuple[list[Problem], list[Problem]]:
    """(problems, warnings) of a config whose keys and types are right.

    `set_keys` are the keys that the user set.
    """
    problems = check_choices(config)
    if problems:  # which may be why other keys seem to have no effect
        set_keys = set()
    changed = non_default_keys(config, set_keys)
    problems += check_keys(config, set_keys)
    problems += of_rows(config, find_unused(config), changed)
    problems += of_rows(config, find_broken(config))
    problems += check_data(config.data)
    warnings: list[Problem] = []
    for name, model in loaded_models(config).items():
        problems += check_model_name(f"{name}.model_name", model.model_name or "")
        if name != "teacher":  # which lies in memory as the actor
            problems += check_layout(name, model, count_samplers(config))
            problems += check_lengths(config, name, model)
        if isinstance(model, WorkerConfig):
            problems += of_rows(config, find_broken_worker(name, model))
            problems += check_adapter(name, model)
            warnings += find_base_warnings(config, name, model)
    if isinstance(config, PPOConfig):
        problems += check_envs(config)
        problems += check_engine(config)
        if config.rollout.exact:
            for obstacle in exact_obstacles(config):
                problems.append(
                    unfit_value("rollout.exact", True, f"does not hold with {obstacle}")
                )
        warnings += of_rows(config, find_misleading(config))
        warnings += of_rows(config, find_unclipped(config), changed)
    return without_repeats(config, problems), warnings


def of_rows(
    config: Config, rows: Iterable[Row], changed: set[str] | None = None
) -> Iterator[Problem]:
    """The problems of keys that do not fit others.

    With `changed`, only of those keys; a row may be of their section then.
    """
    for start, text in rows:
        for key in [start] if changed is None else sorted(changed):
            if f"{key}.".startswith(f"{start}."):
                yield unfit_value(key, get_value(config, key), text)


def loaded_models(config: Config) -> dict[str, ModelConfig]:
    """The sections of the models that the run loads, by name."""
    models: dict[str, ModelConfig] = {name: getattr(config, name) for name in worker_names(config)}
    if isinstance(config, PPOConfig):
        if not needs_critic(config.adv.estimator):
            del models["critic"]
        if loads_teacher(config):
            models["teacher"] = teacher_model(config)
    return models


def check_data(data: DataConfig) -> Iterator[Problem]:
    """Whether the rows and the chat template exist, and weights are of all sources."""
    for key, path in {**data.train_paths, **data.test_paths}.items():
        yield from check_rows(key, path)
    template = data.chat_template
    if template not in (None, "plain") and not Path(template).expanduser().is_file():
        yield wrong_value("data.chat_template", template, "no such file; or choose plain")
    prompt = data.system_prompt_file
    if prompt is not None and not prompt.is_file():
        yield wrong_value("data.system_prompt", prompt, "no such file")
    if not isinstance(data.path, dict):
        return
    if not data.path:
        yield wrong_value("data.path", data.path, "it names no source; write data.path.NAME=PATH")
    if data.weights and data.weights.keys() != data.path.keys():
        # A weight is a share among weights: what the number of rows would be there is not clear.
        reason = f"give a weight to each source of data.path, {', '.join(data.path)}, or to none"
        yield wrong_value("data.weights", data.weights, reason)


def check_rows(key: str, path: Any) -> Iterator[Problem]:
    """Whether the rows exist, unless they are a dataset of the hub or the path is missing."""
    if not isinstance(path, str):
        reason = (
            "expected a path, of several files the folder that they are in, or NAME=PATH for each "
            "of several sets"
        )
        yield wrong_value(key, path, reason)
        return
    is_local = path.endswith(DATA_SUFFIXES) or path.startswith(("/", ".", "~"))
    if is_local and not Path(path).expanduser().exists():
        hint = "; give the folder, since * is not expanded" if "*" in path else ""
        yield wrong_value(key, path, f"no such file or folder{hint}")


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
    yield from check_divides(f"{name}.fsdp_size", model.fsdp_size, num_processes, remark)


def check_lengths(config: Config, name: str, model: ModelConfig) -> Iterator[Problem]:
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
            text = f"is shorter than {longest} = {total}; raise it, or lower the others"
            yield unfit_value(f"{name}.{limit}", tokens, text)


def check_adapter(name: str, worker: WorkerConfig) -> Iterator[Problem]:
    """Whether the adapters of the section `name` can be trained further."""
    if not worker.adapter:
        return
    key = f"{name}.adapter"
    try:
        settings = read_adapter_config(worker.adapter)
    except ValueError as error:
        yield wrong_value(key, worker.adapter, str(error))
        return
    if name == "actor" and settings.get("modules_to_save"):
        reason = "they are of a reward model or a critic, with its head: give critic.adapter"
        yield wrong_value(key, worker.adapter, reason)
    if worker.lora_rank != settings["r"]:
        reason = f"the adapters in {worker.adapter} have rank {settings['r']}; leave the key out"
        yield wrong_value(f"{name}.lora_rank", worker.lora_rank, reason)


def find_base_warnings(config: Config, name: str, worker: WorkerConfig) -> Iterator[Problem]:
    """Whether the adapters of the section `name` were trained on another model than its own.

    One model may have a name on the hub and be in a folder, so only the last parts of the names
    count. A run exports the merged model with the adapter in a folder below: together they would
    apply it twice.
    """
    if not worker.adapter:
        return
    with suppress(ValueError):  # which `check_adapter` reports
        base = read_adapter_config(worker.adapter).get("base_model_name_or_path")
        model = model_name(config, name)
        is_merged = Path(worker.adapter).resolve().parent == Path(model).resolve()
        if base and base != model and (is_merged or Path(base).name != Path(model).name):
            merged = ", which has them merged in if a run has exported it" if is_merged else ""
            reason = (
                f"these adapters were trained on {base}, and the base here is {model}{merged}; "
                f"give their base as {name}.model_name, or leave {name}.adapter out"
            )
            yield wrong_value(f"{name}.adapter", worker.adapter, reason)


def check_engine(config: PPOConfig) -> Iterator[Problem]:
    """Whether the engine can run here, on as many processes as it is given.

    No engine spans two nodes, or processes that train and that sample.
    """
    rollout = config.rollout
    engine = choose_engine(rollout.engine)[0]
    for reason in installation_problems(engine):
        yield wrong_value("rollout.engine", rollout.engine, reason)
    params, tp_size = rollout.train_sampling_params, rollout.tp_size
    is_cut = params.top_p < 1 or params.top_k != -1
    if engine == "vllm" and is_cut and not config.trainer.eval_only:
        reason = (
            "vLLM does not tell which tokens top_p and top_k leave, so what it samples could not "
            "be trained: set top_p=1 and top_k=-1, or rollout.engine=local"
        )
        yield wrong_value("rollout.train_sampling_params", params, reason)
    if engine == "vllm" and tp_size > 1:
        reason = "vLLM has one engine a process here: set 1, or rollout.engine=sglang"
        yield wrong_value("rollout.tp_size", tp_size, reason)
    if engine == "local":
        return
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        value = os.environ.get(name, "")
        if has_gpu() and re.search(r"expandable_segments\s*:\s*true", value, re.IGNORECASE):
            reason = (
                f"{engine} cannot give its memory to the trainer with expandable_segments; take it "
                "out of the variable, or set rollout.engine=local"
            )
            yield wrong_value(name, value, reason)
    num_samplers = count_samplers(config)
    processes_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not 0 < num_samplers <= processes_per_node:  # else all engines are on the last node
        yield from check_divides("rollout.tp_size", tp_size, processes_per_node, " of a node")
    if num_samplers:
        remark = " of rollout.num_processes"
        yield from check_divides("rollout.tp_size", tp_size, num_samplers, remark)


def check_divides(key: str, size: int, num_processes: int, remark: str = "") -> Iterator[Problem]:
    """The problem of a size that does not divide the processes; the range is checked elsewhere."""
    if size > 0 and num_processes % size:
        divisors = [str(n) for n in range(1, num_processes + 1) if num_processes % n == 0]
        processes = f"{num_processes} process{'es' if num_processes > 1 else ''}{remark}"
        text = f"does not divide the {processes}: choose {', '.join(divisors)}"
        yield unfit_value(key, size, text)


def check_envs(config: PPOConfig) -> Iterator[Problem]:
    """Whether there are the env files; if they have names, whether those are of all sources."""
    env_path = config.rollout.env_path
    for key, path in config.rollout.env_paths.items():
        if not isinstance(path, str):
            yield wrong_value(key, path, "expected a path or the name of a ready-made env")
            continue
        try:
            if path and find_env_file(path).suffix != ".py":  # a missing one is reported elsewhere
                yield wrong_value(key, path, "this is not a Python file (.py)")
        except ValueError as error:
            yield Problem(key, path, str(error))
    if not isinstance(env_path, dict):
        return
    data = config.data
    paths = {**data.train_paths, **data.test_paths}
    sources = {source_name(key) for key, path in paths.items() if path}
    if env_path.keys() != sources:
        reason = (
            "give an env to each source of data.path and data.test_path, as "
            "rollout.env_path.NAME=PATH, or one to all of them; they are "
            f"{', '.join(sorted(filter(None, sources))) or 'none'}"
        )
        if "" in sources:
            reason += "; name the other with data.path.NAME=PATH or data.test_path.NAME=PATH"
        yield wrong_value("rollout.env_path", env_path, reason)
