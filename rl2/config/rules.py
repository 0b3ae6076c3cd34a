"""The checks of a config before a model is loaded: those of single keys, and checks between keys.

A check yields its problems as messages, so that the user sees all of them at once.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rl2.config.conditions import estimator_inputs, exact_obstacles, needs_critic
from rl2.config.engines import choose_engine, is_installed
from rl2.config.key_rules import (
    Checked,
    check_choices,
    check_keys,
    non_default_keys,
    without_repeats,
)
from rl2.config.schema import (
    DPOConfig,
    ModelConfig,
    PPOConfig,
    RMConfig,
    WorkerConfig,
    worker_names,
)
from rl2.config.toolkit import toolkit_problems, version_problems
from rl2.user_files import find_env_file

DATA_SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")
INTERVAL_CORRECTIONS = ("token_mask", "geometric_mask")  # they keep ratios in [1 / cap, cap]


def validate(config: Any, set_keys: set[str]) -> Checked:
    """(problems, warnings) of a config whose keys and types are right.

    `set_keys` are the keys that the user set.
    """
    problems = check_choices(config)
    if problems:  # which may be why other keys seem to have no effect
        set_keys = set()
    key_problems, warnings = check_keys(config, set_keys)
    problems += [*key_problems, *check_paths(config)]
    problems += check_loggers(config.trainer.loggers)
    for name, model in loaded_models(config).items():
        problems += check_model(config, name, model)
    if isinstance(config, PPOConfig):
        for check in (
            check_run,
            check_step_sizes,
            check_estimator,
            check_pairs,
            check_rollout,
            check_engine,
            check_exact,
        ):
            problems += check(config)
        warnings += [*run_warnings(config), *loss_warnings(config, set_keys)]
    return without_repeats(problems), warnings


def loaded_models(config: Any) -> dict[str, ModelConfig]:
    """The sections of the models that the run loads, by name."""
    models: dict[str, ModelConfig] = {name: getattr(config, name) for name in worker_names(config)}
    if isinstance(config, PPOConfig):
        if not needs_critic(config.adv.estimator):
            del models["critic"]
        if config.teacher.model_name:
            models["teacher"] = config.teacher
    return models


# Checks between keys.


def check_model(config: Any, name: str, model: ModelConfig) -> Iterator[str]:
    """The problems of one model's section."""
    yield from check_model_name(f"{name}.model_name", model.model_name or "")
    yield from check_layout(name, model)
    yield from check_lengths(config, name, model)
    if isinstance(model, WorkerConfig):
        yield from check_worker(name, model)


def check_worker(name: str, worker: WorkerConfig) -> Iterator[str]:
    """The problems of what a trained model has more than others."""
    if worker.optimizer_dir and not Path(worker.optimizer_dir).is_dir():
        yield f"{name}.optimizer_dir={worker.optimizer_dir}: no such folder"
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


def check_layout(name: str, model: ModelConfig) -> Iterator[str]:
    """Whether the parallel sizes of a model divide the processes.

    Sequences and models are split over the processes that tensor parallelism leaves.
    """
    rest, remark = int(os.environ.get("WORLD_SIZE", "1")), ""
    tp_size = model.tp_size
    yield from check_divides(f"{name}.tp_size", tp_size, rest)
    if tp_size > 1 and rest % tp_size == 0:
        rest, remark = rest // tp_size, f" that {name}.tp_size={tp_size} leaves"
    yield from check_divides(f"{name}.sp_size", model.sp_size, rest, remark)
    yield from check_divides(f"{name}.fsdp_size", model.fsdp_size, rest, remark, " or 0")


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
    """The files and folders that are missing, of the data and the checkpoint."""
    for key, path in {"data.path": config.data.path, **config.data.test_paths}.items():
        yield from check_data(key, path)
    if config.data.test_ratio and config.data.test_path:
        yield (
            f"data.test_ratio={config.data.test_ratio}: data.test_path has the test rows already; "
            "leave one of the two out"
        )
    template = config.data.chat_template
    if template not in (None, "plain") and not Path(template).expanduser().is_file():
        problem = "choose plain or the path of a Jinja file"
        if "/" in template or template.endswith((".jinja", ".j2", ".txt")):
            problem = "no such file"
        yield f"data.chat_template={template}: {problem}"
    resume = config.trainer.resume
    folder = resume.removeprefix("force:")
    if resume not in ("auto", "off", "force") and not Path(folder).is_dir():
        yield f"trainer.resume={resume}: {explain_resume(Path(folder))}"


def explain_resume(folder: Path) -> str:
    """Why there is no checkpoint in the folder, which does not exist, and what there is."""
    if len(folder.parts) == 1:
        return "choose auto, off, force or the folder of a checkpoint"
    steps = sorted(path.name for path in folder.parent.glob("step_*") if path.is_dir())
    there_are = f"; {folder.parent} has {', '.join(steps)}" if steps else ""
    return f"no such folder{there_are}"


def check_data(key: str, path: Any) -> Iterator[str]:
    """Whether the rows exist, unless they are a dataset of the hub or the path is missing."""
    if not isinstance(path, str):
        yield f"{key}={path}: expected a path, or {key}.NAME=PATH for each of several sets"
        return
    is_local = path.endswith(DATA_SUFFIXES) or path.startswith(("/", ".", "~"))
    if is_local and not Path(path).expanduser().exists():
        hint = "; give the folder, since * is not expanded" if "*" in path else ""
        yield f"{key}={path}: no such file or folder{hint}"


def check_model_name(key: str, name: str) -> Iterator[str]:
    """Whether the folder holds a model. A missing name is reported elsewhere."""
    is_local = name.startswith(("/", ".", "~")) or name.count("/") > 1
    if name and Path(name).is_dir():
        if not Path(name, "config.json").exists():
            yield f"{key}={name}: this folder holds no model (no config.json)"
    elif is_local:
        yield f"{key}={name}: no such folder; a model of the hub is owner/name"


def check_loggers(names: list[str]) -> Iterator[str]:
    """Whether the packages of services are installed. A run says for itself that it lacks wandb."""
    for name in {"tensorboard", "trackio"}.intersection(names):
        if not is_installed(name):
            yield f"trainer.loggers={names}: {name} is not installed; pip install {name}"


def check_lengths(config: Any, name: str, model: ModelConfig) -> Iterator[str]:
    """Whether the longest sequences fit one micro-batch of a model: in training, where the two
    rows of a pair are together, and in inference.
    """
    length = config.data.max_length
    num_rows = 2 if isinstance(config, DPOConfig | RMConfig) else 1
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
            yield (
                f"{name}.{limit}={tokens} is shorter than {longest} = {total}; raise it, or lower "
                "the others"
            )


def check_step_sizes(config: PPOConfig) -> Iterator[str]:
    """Whether a step has enough trajectories for its mini-batches."""
    num_trajectories = config.data.prompts_per_rollout * config.data.responses_per_prompt
    for name in worker_names(config):
        updates = getattr(config, name).update_per_rollout
        if 0 < num_trajectories < updates:
            yield (
                f"{name}.update_per_rollout={updates} is more than the {num_trajectories} "
                "trajectories of a step"
            )


def check_estimator(config: PPOConfig) -> Iterator[str]:
    """Whether there is what the advantage estimator compares, and whether it takes rewards."""
    estimator = config.adv.estimator
    inputs = estimator_inputs(estimator)
    if "group" in inputs and config.data.responses_per_prompt == 1:
        yield (
            f"data.responses_per_prompt=1 leaves adv.estimator={estimator} no group to compare "
            "with: every advantage would be 0; sample 2 or more, or use "
            "adv.estimator=reinforce_plus_plus or gae"
        )
    if config.kl.type == "reward" and inputs and "rewards" not in inputs:
        yield (
            f"kl.type=reward has no effect with adv.estimator={estimator}, which takes no rewards: "
            "choose kl.type=loss"
        )
    if "teacher_logps" in inputs and not config.teacher.model_name:
        yield f"adv.estimator={estimator} needs the key teacher.model_name"


def check_pairs(config: PPOConfig) -> Iterator[str]:
    """Keys that need each other, and keys that exclude each other."""
    actor = config.actor
    kl = config.kl
    if config.rollout.partial and config.trainer.deterministic:
        yield (
            "trainer.deterministic=true: partial rollouts depend on time; leave it or "
            "rollout.partial out"
        )
    if kl.coef > 0 and kl.type is None:
        yield (
            f"kl.coef={kl.coef} needs kl.type: loss adds the KL to the loss, reward subtracts it "
            "from the reward"
        )
    if kl.coef == 0 and kl.type is not None:
        yield f"kl.type={kl.type} needs kl.coef, the weight of the KL, e.g. kl.coef=0.001"
    if kl.update_freq and actor.lora_rank > 0:
        yield (
            f"kl.update_freq={kl.update_freq}: with actor.lora_rank={actor.lora_rank} the "
            "reference is the actor without its adapters, which stays the start model; leave one "
            "of them out"
        )
    if actor.correction in INTERVAL_CORRECTIONS and actor.correction_cap == 1:
        yield (
            f"actor.correction_cap=1: actor.correction={actor.correction} masks all ratios outside "
            "[1 / cap, cap], which leaves nothing to train; the default is 2"
        )
    if actor.average == "constant" and actor.average_constant is None:
        yield (
            "actor.average=constant needs actor.average_constant, the length that it divides by: "
            "Dr. GRPO takes that of the longest answer, here actor.average_constant="
            f"{config.rollout.train_sampling_params.max_new_tokens}"
        )
    if actor.average != "constant" and actor.average_constant is not None:
        yield (
            f"actor.average_constant={actor.average_constant} needs actor.average=constant; "
            f"actor.average={actor.average} divides by what it counts"
        )


def check_rollout(config: PPOConfig) -> Iterator[str]:
    """Whether the ranges of rewards and lengths are ranges."""
    rollout = config.rollout
    bounds = rollout.filter
    if bounds and (len(bounds) != 2 or not bounds[0] < bounds[1]):
        yield f"rollout.filter={bounds}: give a low and a high bound of the mean reward, as [0,1]"
    buffer, answer = rollout.overlong_buffer, rollout.train_sampling_params.max_new_tokens
    if buffer and buffer > answer:
        yield (
            f"rollout.overlong_buffer={buffer} is more than "
            f"rollout.train_sampling_params.max_new_tokens={answer}: lower it, e.g. to a fifth"
        )


def check_run(config: PPOConfig) -> Iterator[str]:
    """Whether there is an env file, and what an evaluation or a run on saved rollouts works on."""
    path = config.rollout.env_path  # a missing one is reported elsewhere
    try:
        if path and find_env_file(path).suffix != ".py":
            yield f"rollout.env_path={path}: this is no Python file (.py)"
    except ValueError as error:
        yield str(error)
    saved = config.trainer.rollouts_from
    if config.trainer.eval_only and not config.data.has_test_rows:
        yield "trainer.eval_only=true needs data.test_path or data.test_ratio"
    if config.trainer.eval_only and saved:
        yield "trainer.eval_only=true trains on no rollouts: leave trainer.rollouts_from out"
    elif saved and not Path(saved).is_dir():
        yield f"trainer.rollouts_from={saved}: no such folder"


def check_engine(config: PPOConfig) -> Iterator[str]:
    """Whether SGLang is installed and can run here, its size divides the processes of a node, and
    torch's memory is of a kind that it can take over and give back.
    """
    rollout = config.rollout
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
    has_gpu = torch.cuda.is_available()
    # A user who set it has chosen between speed and the precision of the logits.
    has_float32_head = (
        has_gpu
        and config.actor.head_dtype == "float32"
        and "enable_fp32_lm_head" not in rollout.engine_args
    )
    found = [*version_problems(has_float32_head)]
    if has_gpu and torch.version.cuda:
        found += toolkit_problems()
    for problem in found:
        yield f"rollout.engine={rollout.engine}: {problem}"
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        value = os.environ.get(name, "")
        is_set = re.search(r"expandable_segments\s*:\s*true", value, re.IGNORECASE)
        if is_set and has_gpu:
            yield (
                f"{name}={value}: SGLang cannot give its memory to the trainer with "
                "expandable_segments; take it out of the variable, or set rollout.engine=local"
            )


def check_exact(config: PPOConfig) -> Iterator[str]:
    """With what the demand for equal bits cannot be met, and what to choose instead."""
    if not config.rollout.exact:
        return
    for obstacle in exact_obstacles(config):
        yield f"rollout.exact=true does not hold with {obstacle}"
    if config.trainer.rollouts_from:
        yield (
            "rollout.exact=true does not hold with trainer.rollouts_from, since other weights may "
            "have sampled: leave it out, and the same weights repeat a step to the bit"
        )


# Warnings.


def run_warnings(config: PPOConfig) -> Iterator[str]:
    """Settings of the run and its rollouts that are allowed but easily misunderstood."""
    rollout, trainer = config.rollout, config.trainer
    params = rollout.train_sampling_params
    if rollout.partial and config.actor.correction == "none":
        yield (
            "rollout.partial=true: tokens that older weights sampled are trained as if the current "
            "ones had; actor.correction=token_tis weighs them by their recorded log-probabilities"
        )
    if params.top_p < 1 or params.top_k != -1:
        yield (
            "rollout.train_sampling_params: the policy's log-probabilities are from before top_p "
            "and top_k: the trainer does not see what these cut off"
        )
    if trainer.rollouts_from and config.data.test_path:
        yield "data.test_path: nothing is sampled with trainer.rollouts_from, not even a test"
    num_answers = config.data.responses_per_test_prompt
    if num_answers > 1 and rollout.test_sampling_params.temperature == 0:
        yield (
            f"data.responses_per_test_prompt={num_answers}: with "
            "rollout.test_sampling_params.temperature=0 the answers to a prompt are all the same; "
            "set a temperature, e.g. 1 as in training"
        )
    for name, worker in (("actor", config.actor), ("critic", config.critic)):
        if trainer.max_steps and worker.freeze_steps >= trainer.max_steps:
            yield (
                f"{name}.freeze_steps={worker.freeze_steps}: {name} is not updated in any of the "
                f"{trainer.max_steps} steps"
            )


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
