"""The config: typed sections, one dataclass each, every key explained beside it; Hydra's override grammar; and the
checks that find every problem before a model is loaded.

`parse(PPOConfig, argv, validate_ppo)` is the entry that all trainers share.
"""

import os
from pathlib import Path

import torch

from rl2.config.parse import _walk
from rl2.config.schema import DPOConfig, PPOConfig, RMConfig, SFTConfig
from rl2.engine.select import choose_engine, is_installed

DATA_SUFFIXES = (".json", ".jsonl", ".csv", ".parquet", ".arrow")


SGLANG = (
    "rollout.tp_size",
    "rollout.gpu_memory_utilization",
    "rollout.engine_args",
    "rollout.engine_args.",
)


# Ranges; a key that a config lacks is passed over.
WORKER_POSITIVE = (
    "max_length_per_device",
    "max_inference_length_per_device",
    "update_per_rollout",
    "clip",
    "lr",
    "max_grad_norm",
    "save_freq",
    "sp_size",
    "tp_size",
    "lora_alpha",
)


WORKER_NOT_NEGATIVE = ("fsdp_size", "weight_decay", "freeze_steps", "warmup_ratio", "lora_rank")


POSITIVE = (
    "data.max_length",
    "data.prompts_per_rollout",
    "data.responses_per_prompt",
    "data.batch_size",
    "actor.clip_high",
    "actor.average_constant",
    "actor.dual_clip",
    "dpo.beta",
    "rollout.max_running",
    "rollout.max_turns",
    "rollout.env_timeout",
    "rollout.tp_size",
    "rollout.gpu_memory_utilization",
    "rollout.train_sampling_params.temperature",
    "rollout.train_sampling_params.max_new_tokens",
    "rollout.test_sampling_params.max_new_tokens",
    "trainer.n_epochs",
    "trainer.max_steps",
    "trainer.save_freq",
    "trainer.keep_checkpoints",
    "trainer.test_freq",
)


NOT_NEGATIVE = (
    "kl.coef",
    "actor.entropy",
    "dpo.label_smoothing",
    "rm.center",
    "rollout.max_env_failures",
    "adv.gamma",
    "adv.lamda",
    "data.seed",
    "rollout.test_sampling_params.temperature",
    "trainer.seed",
)


AT_MOST_ONE = (
    "rollout.max_env_failures",
    "rollout.gpu_memory_utilization",
    "adv.gamma",
    "adv.lamda",
    "rollout.train_sampling_params.top_p",
    "rollout.test_sampling_params.top_p",
    "actor.warmup_ratio",
    "critic.warmup_ratio",
)


def validate_ppo(
    config: PPOConfig, set_keys: set[str], world_size: int
) -> tuple[list[str], list[str]]:
    """(problems, warnings) of a config whose keys and types are right."""
    workers = ["actor"] + ["critic"] * (config.adv.estimator == "gae")
    problems = check_numbers(config, POSITIVE, NOT_NEGATIVE, AT_MOST_ONE)
    for name in workers:
        problems += check_worker(config, name, world_size)
    problems += (
        _check_paths(config, ("actor", "critic"))
        + _check_lengths(config, workers)
        + _check_sizes(config)
    )
    env = Path(config.rollout.env_path).expanduser()
    if config.rollout.env_path and (not env.is_file() or env.suffix != ".py"):
        problems.append(
            f"rollout.env_path={env}: no such Python file; copy one of envs/ to start from"
        )
    problems += _check_engine(config)
    problems += _in_vain(
        config, set_keys, [*_uses(config), *_common_uses(config, ("actor", "critic"))]
    )
    return problems, _warnings(config, set_keys) + _idle(config, set_keys)


def validate_sft(
    config: SFTConfig, set_keys: set[str], world_size: int
) -> tuple[list[str], list[str]]:
    """(problems, warnings) of a config whose keys and types are right."""
    return _validate_examples(
        config,
        "actor",
        set_keys,
        world_size,
        1,
        [
            (False, ("actor.share_prompts",), "in SFT, where no rows share a prompt"),
            (
                config.data.test_path,
                ("actor.max_inference_length_per_device",),
                "without data.test_path",
            ),
        ],
    )


def validate_dpo(
    config: DPOConfig, set_keys: set[str], world_size: int
) -> tuple[list[str], list[str]]:
    """(problems, warnings) of a config whose keys and types are right."""
    uses = [
        (config.dpo.loss == "sigmoid", ("dpo.label_smoothing",), f"with dpo.loss={config.dpo.loss}")
    ]
    problems, warnings = _validate_examples(config, "actor", set_keys, world_size, 2, uses)
    if config.dpo.label_smoothing >= 0.5:
        problems.append(
            f"dpo.label_smoothing={config.dpo.label_smoothing}: it must be below 0.5, a coin's toss"
        )
    return problems, warnings


def validate_rm(
    config: RMConfig, set_keys: set[str], world_size: int
) -> tuple[list[str], list[str]]:
    """(problems, warnings) of a config whose keys and types are right."""
    uses = [
        (
            config.data.test_path,
            ("critic.max_inference_length_per_device",),
            "without data.test_path",
        )
    ]
    return _validate_examples(config, "critic", set_keys, world_size, 2, uses)


def _validate_examples(config, name, set_keys, world_size, group_size, uses):
    """The same for the trainers without rollouts, whose one trained worker is `name`; `group_size` sequences have to
    fit into one micro-batch."""
    worker, data = getattr(config, name), config.data
    problems = check_numbers(config, POSITIVE, NOT_NEGATIVE, AT_MOST_ONE) + check_worker(
        config, name, world_size
    )
    problems += _check_paths(config, (name,))
    for key in ("max_length_per_device", "max_inference_length_per_device"):
        limit, needed = (
            getattr(worker, key),
            data.max_length * (group_size if key == "max_length_per_device" else 1),
        )
        if limit and needed > limit * worker.sp_size:
            problems.append(
                f"{name}.{key}={limit} is shorter than a row may get: {needed} = data.max_length "
                f"x {needed // data.max_length}; raise it, or lower data.max_length"
            )
    uses = [*uses, (False, ("trainer.deterministic",), "where nothing is sampled")]
    uses += [
        (worker.lora_rank, ("trainer.seed",), f"where nothing is sampled and {name}.lora_rank=0")
    ]
    problems += _in_vain(config, set_keys, [*uses, *_common_uses(config, (name,))])
    return problems, _idle(config, set_keys)


def _in_vain(config, set_keys, uses) -> list[str]:
    """The knobs that the user set to no effect; `uses` are (whether they matter, keys, why they do not)."""
    problems, told = [], _told(config, set_keys)
    for needed, keys, reason in uses:
        prefixes = tuple(key for key in keys if key.endswith("."))
        vain = sorted(
            key for key in told if not needed and (key in keys or key.startswith(prefixes))
        )
        problems += [f"{key}={_get(config, key)} has no effect {reason}" for key in vain]
    return problems


def _told(config, set_keys) -> set[str]:
    """The keys that say other than the default: what says no more is harmless, and a whole config.yaml can be read back."""
    defaults = type(config)()
    return {
        key
        for key in set_keys
        if key.startswith(SGLANG[-1]) or _get(config, key) != _get(defaults, key)
    }


def _get(config, key):
    for part in key.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


def check_numbers(config, positive, not_negative, at_most_one) -> list[str]:
    """What leaves its range; None is allowed."""
    known = {key for key, *_ in _walk(type(config))}
    found = [
        {key: _get(config, key) for key in keys if key in known}
        for keys in (positive, not_negative, at_most_one)
    ]
    bad = [
        f"{key}={value}: it must be above 0"
        for key, value in found[0].items()
        if value is not None and value <= 0
    ]
    bad += [
        f"{key}={value}: it must not be below 0" for key, value in found[1].items() if value < 0
    ]
    return bad + [
        f"{key}={value}: it must not be above 1" for key, value in found[2].items() if value > 1
    ]


def check_worker(config, name: str, world_size: int) -> list[str]:
    """What is wrong with one worker's section."""
    worker = getattr(config, name)
    problems = check_numbers(
        config,
        [f"{name}.{key}" for key in WORKER_POSITIVE],
        [f"{name}.{key}" for key in WORKER_NOT_NEGATIVE],
        (),
    )
    # Data and sequences are split over what tensor parallelism leaves, and so is the model.
    tp = worker.tp_size if worker.tp_size > 0 and world_size % worker.tp_size == 0 else 1
    for key, size, parts in (
        ("tp_size", worker.tp_size, world_size),
        ("sp_size", worker.sp_size, world_size // tp),
        ("fsdp_size", worker.fsdp_size, world_size // tp),
    ):
        if size > 0 and parts % size:
            valid = ", ".join(str(n) for n in range(1, parts + 1) if parts % n == 0)
            left = f" that {name}.tp_size={tp} leaves" if parts < world_size else ""
            valid += " or 0" if key == "fsdp_size" else ""
            parts = f"{parts} process{'es' * (parts > 1)}"
            problems.append(
                f"{name}.{key}={size} does not divide the {parts}{left}: choose {valid}"
            )
    if (worker.save_freq is None) != (worker.save_dir is None):
        problems.append(
            f"{name}.save_dir={worker.save_dir} and {name}.save_freq={worker.save_freq} need each other"
        )
    if worker.lora_rank > 0 and worker.tp_size > 1:
        problems.append(
            f"{name}.lora_rank={worker.lora_rank} with {name}.tp_size={worker.tp_size}: adapters are not cut "
            f"into parts; set {name}.tp_size=1, fsdp_size and sp_size divide the work as well"
        )
    if worker.lora_rank > 0 and not is_installed("peft"):
        problems.append(
            f"{name}.lora_rank={worker.lora_rank} needs peft, which is not installed; pip install peft"
        )
    return problems


def _check_paths(config, workers) -> list[str]:
    problems = []
    for key in ("data.path", "data.test_path"):
        path = _get(config, key)
        local = path and (path.endswith(DATA_SUFFIXES) or path.startswith(("/", ".", "~")))
        if local and not Path(path).expanduser().exists():
            problems.append(f"{key}={path}: no such file or folder")
    for key in [f"{name}.model_name" for name in workers]:
        name = _get(config, key)
        if name and Path(name).is_dir() and not Path(name, "config.json").exists():
            problems.append(f"{key}={name}: this folder holds no model (no config.json)")
        elif (
            name
            and not Path(name).is_dir()
            and (name.startswith(("/", ".", "~")) or name.count("/") > 1)
        ):
            problems.append(f"{key}={name}: no such folder; a model of the hub is owner/name")
    for key in [f"{name}.optimizer_dir" for name in workers]:
        if _get(config, key) and not Path(_get(config, key)).is_dir():
            problems.append(f"{key}={_get(config, key)}: no such folder")
    resume = config.trainer.resume
    if resume not in ("auto", "off") and not Path(resume).is_dir():
        problems.append(f"trainer.resume={resume}: choose auto, off or the folder of a checkpoint")
    return problems


def _check_lengths(config, workers) -> list[str]:
    turns, answer = config.rollout.max_turns, config.rollout.train_sampling_params.max_new_tokens
    longest, problems = config.data.max_length + turns * answer, []
    for name in workers:
        worker = getattr(config, name)
        for key in ("max_length_per_device", "max_inference_length_per_device"):
            limit = getattr(worker, key)
            if limit and longest > limit * worker.sp_size:
                problems.append(
                    f"{name}.{key}={limit} is shorter than a trajectory may get: data.max_length {config.data.max_length}"
                    f" + {turns} x max_new_tokens {answer} = {longest}; raise it, or lower the others"
                )
    return problems


def _check_sizes(config) -> list[str]:
    problems, data, actor = [], config.data, config.actor
    if config.adv.estimator == "reinforce" and data.responses_per_prompt == 1:
        problems.append(
            "data.responses_per_prompt=1 leaves adv.estimator=reinforce no group to compare with: "
            "every advantage would be 0; sample 2 or more, or use adv.estimator=gae"
        )
    trajectories = data.prompts_per_rollout * data.responses_per_prompt
    for name in ("actor", "critic"):
        if getattr(config, name).update_per_rollout > trajectories:
            problems.append(
                f"{name}.update_per_rollout={getattr(config, name).update_per_rollout} is more than the "
                f"{trajectories} trajectories of a step"
            )
    if config.rollout.partial and config.trainer.deterministic:
        problems.append(
            "trainer.deterministic=true: partial rollouts depend on time; leave it or rollout.partial out"
        )
    if (config.kl.coef > 0) != (config.kl.type is not None):
        problems.append(
            f"kl.coef={config.kl.coef} and kl.type={config.kl.type} need each other: choose reward or loss"
        )
    if (actor.average == "constant") != (actor.average_constant is not None):
        problems.append(
            f"actor.average={actor.average} and actor.average_constant={actor.average_constant} need each other"
        )
    for name in ("train", "test"):
        params = getattr(config.rollout, f"{name}_sampling_params")
        if params.top_p <= 0 or params.top_k == 0 or params.top_k < -1:
            problems.append(
                f"rollout.{name}_sampling_params: top_p={params.top_p}, top_k={params.top_k}: "
                "top_p lies above 0 and up to 1, top_k is 1 or more, or -1 for all"
            )
    return problems


def _check_engine(config) -> list[str]:
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if choose_engine(config.rollout.engine)[0] != "sglang":
        return []
    if not is_installed("sglang"):
        return [
            "rollout.engine=sglang: it is not installed; pip install sglang, or set rollout.engine=local"
        ]
    if local_world % config.rollout.tp_size:
        valid = ", ".join(str(n) for n in range(1, local_world + 1) if local_world % n == 0)
        size = config.rollout.tp_size
        return [
            f"rollout.tp_size={size} does not divide the {local_world} processes of a node: choose {valid}"
        ]
    return []


def _uses(config):
    """What `_in_vain` asks of PPO."""
    yield config.rollout.engine != "local", SGLANG, "with rollout.engine=local"
    gae, actor, kl = config.adv.estimator == "gae", config.actor, config.kl
    yield (
        gae,
        ("critic.", "adv.gamma", "adv.lamda"),
        "with adv.estimator=reinforce: set adv.estimator=gae",
    )
    yield kl.type == "reward", ("kl.reward_estimator",), f"with kl.type={kl.type}"
    yield kl.type == "loss", ("kl.loss_estimator",), f"with kl.type={kl.type}"
    yield (
        actor.loss != "cispo",
        ("actor.clip", "actor.dual_clip"),
        "with actor.loss=cispo, which uses clip_high",
    )
    yield actor.correction != "none", ("actor.correction_cap",), "with actor.correction=none"
    yield config.data.test_path, ("rollout.test_sampling_params.",), "without data.test_path"


def _common_uses(config, workers):
    yield config.data.test_path, ("trainer.test_freq",), "without data.test_path"
    for name in workers:
        worker, lora = getattr(config, name), (f"{name}.lora_alpha", f"{name}.lora_targets")
        yield worker.save_dir, (f"{name}.save_optimizer",), f"without {name}.save_dir"
        yield worker.lora_rank, lora, f"with {name}.lora_rank=0"


def _warnings(config, set_keys) -> list[str]:
    warnings, train = [], config.rollout.train_sampling_params
    if config.rollout.partial and config.actor.correction == "none":
        warnings.append(
            "rollout.partial=true: tokens that older weights sampled are trained as if the current ones had; "
            "actor.correction=token_tis weighs them by their recorded log-probabilities"
        )
    if train.top_p < 1 or train.top_k != -1:
        warnings.append(
            "rollout.train_sampling_params: the policy's log-probabilities are from before top_p, top_k: "
            " the trainer does not see what these cut off"
        )
    clips = {"actor.clip", "actor.clip_high", "actor.dual_clip"} & set_keys
    if clips and config.actor.update_per_rollout == 1 and config.actor.loss == "ppo":
        warnings.append(
            f"{', '.join(sorted(clips))}: with actor.update_per_rollout=1 the ratio is exactly 1 and never clipped"
        )
    if config.kl.type == "loss" and config.kl.loss_estimator == "k1":
        warnings.append(
            "kl.loss_estimator=k1: the gradient of k1 in a loss is 0 on average; k2 has that of the KL"
        )
    return warnings


def _idle(config, set_keys) -> list[str]:
    """What only the hardware makes idle."""
    warnings = []
    idle = [
        key
        for key in set_keys
        if key.endswith(("offload_model", "offload_optimizer")) and _get(config, key)
    ]
    if idle and not torch.cuda.is_available():
        warnings.append(f"{', '.join(sorted(idle))}: nothing to do without a GPU")
    idle = [key for key in _told(config, set_keys) if key.startswith(SGLANG)]
    if idle and config.rollout.engine == "auto" and (picked := choose_engine("auto"))[0] == "local":
        warnings.append(
            f"{', '.join(sorted(idle))}: nothing to do with the local engine ({picked[1]})"
        )
    return warnings
