"""The checks of a config before anything is read or loaded.

A rule yields rows: a key, and what follows KEY=VALUE in the message, which says what to do. All
rules are asked, so that the user sees all problems at once.
"""

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.version import Version

from rl2.algorithms.find import CHOICES
from rl2.config.conditions import (
    compares_pairs,
    corrects_mismatch,
    count_samplers,
    estimator_needs,
    exact_obstacles,
    has_full_kl,
    has_teacher,
    loads_teacher,
    longest_row,
    needs_critic,
    needs_reference,
    needs_reference_point,
    old_policy_is_sampler,
    policy_loss_needs,
    updates_of_batch_size,
)
from rl2.config.engines import choose_engine, has_gpu, installation_problems, installed_version
from rl2.config.key import schema_keys
from rl2.config.presets import describe_preset, load_presets
from rl2.config.problem import Problem
from rl2.config.schema import (
    Config,
    DataConfig,
    DPOConfig,
    ModelConfig,
    PPOConfig,
    RolloutConfig,
    WorkerConfig,
    source_name,
    teacher_model,
    worker_names,
)
from rl2.config.values import declared_key, get_value, show_value

Row = tuple[str, str]

# Keys of which one needs to be set for a key or section to have an effect. KEY counts if it has
# another value than its default and is not off. A name without a section is of actor and critic.
NEEDS: dict[str, tuple[str, ...]] = {
    "lora_alpha": ("lora_rank",),
    "lora_targets": ("lora_rank",),
    "quantize_base": ("lora_rank",),
    "min_lr_ratio": ("scheduler=linear", "scheduler=cosine"),
    "average_constant": ("average=constant",),
    "rollout.max_staleness": ("rollout.partial", "rollout.num_processes"),
    "rollout.overlong_penalty": ("rollout.overlong_buffer",),
    "rollout.server_urls": ("rollout.engine=server",),
    "rollout.shared_dir": ("rollout.engine=server",),
    "kl.coef": ("kl.type=loss", "kl.type=reward"),
    "kl.type": ("kl.coef",),
    "kl.reward_estimator": ("kl.type=reward", "kl.type=loss"),
    "kl.loss_estimator": ("kl.type=loss",),
    "teacher": ("teacher.model_name", "teacher.base_url"),
    "trainer.eval_only": ("data.test_path", "data.test_ratio"),
    "trainer.save_best": ("data.test_path", "data.test_ratio"),
}
# Keys that may not be set beside a key, in the same form.
EXCLUDES: dict[str, tuple[str, ...]] = {
    "data.test_ratio": ("data.test_path",),
    "data.test_path": ("trainer.rollouts_from",),  # without an engine no test is sampled
    # In 4 bits rows would be cut inside blocks, and the engine of an evaluation reads whole ones.
    "quantize_base": ("tp_size", "trainer.eval_only"),
    "correction_cap": ("correction=none",),
    "adv.bootstrap": ("rollout.mask_truncated",),  # does not train the answers that it is for
    "kl.update_freq": ("actor.lora_rank",),  # the reference shares the actor's weights then
    "teacher.base_url": (  # a server scores at temperature 1 among the whole vocabulary
        "rollout.train_sampling_params.temperature",
        "rollout.train_sampling_params.top_p",
        "rollout.train_sampling_params.top_k",
        "rollout.train_sampling_params.min_p",
    ),
    "teacher.kl": ("teacher.base_url",),
    "rollout.partial": ("rollout.num_processes",),  # with which no step waits
    "rollout.exact": ("rollout.num_processes", "trainer.rollouts_from"),  # of other weights
    "trainer.deterministic": ("rollout.partial",),  # which depends on time
    "trainer.save_best": ("trainer.eval_only", "trainer.rollouts_from"),
}

TORCH_OF_4_BITS = "2.13"  # FSDP2 of torch 2.11 fails at parameters of bytes; 2.12 is not tried


def validate(config: Config, set_keys: set[str]) -> list[Problem]:
    """The problems of a config whose keys and types are right. The user has set `set_keys`."""
    rows = list(wrong_choices(config))
    if rows:  # which may be why other keys seem to have no effect
        set_keys = set()
    rows += wrong_values(config, set_keys)
    rows += useless_keys(config, set_keys, {key for key, _ in rows})
    if isinstance(config, Config):
        rows += wrong_data(config.data)
    for name, model in loaded_models(config).items():
        if isinstance(model, WorkerConfig):  # the teacher lies in memory as the actor
            rows += wrong_layout(name, model, count_samplers(config))
            rows += wrong_lengths(config, name, model)
            rows += wrong_worker(name, model)
    if isinstance(config, DPOConfig):
        rows += wrong_dpo(config)
    if isinstance(config, PPOConfig):
        for rule in (wrong_envs, wrong_teacher, wrong_loss, wrong_rollout, wrong_engine):
            rows += rule(config)
    return list(as_problems(config, rows))


def as_problems(config: Config, rows: Iterable[Row]) -> Iterator[Problem]:
    """The problems of the rows, but for keys that follow another one, which has the problem."""
    known = schema_keys(type(config))
    for name, text in rows:
        value = get_value(config, name)
        leader = known[name].leader if name in known else ""
        if not leader or value != get_value(config, leader):
            yield Problem(name, f"{name}={show_value(value)}{text}")


def wrong_choices(config: Config) -> Iterator[Row]:
    """Keys whose value is none of their choices, or names no function."""
    for name, key in schema_keys(type(config)).items():
        value = get_value(config, name)
        if key.functions:
            try:
                CHOICES[name].check(value)
            except ValueError as error:
                hint = ""
                if value in load_presets():  # it is the name of an algorithm
                    hint = f"algo={value} sets {describe_preset(value)}; or "
                yield name, f": {hint}{error}"
        elif key.choices:
            words = value if isinstance(value, list) else [value]
            if any(isinstance(word, str) and word not in key.choices for word in words):
                number = [] if key.above is key.at_least is None else ["a number"]
                switch = ["true", "false"] if key.may_be_switch else []
                yield name, f": choose {', '.join([*key.choices, *switch, *number])}"


def wrong_values(config: Config, set_keys: set[str]) -> Iterator[Row]:
    """Values outside the range of their key. None and the default are in it.

    An empty text that the user has set is wrong, too, unless the key may be empty.
    """
    for name, key in schema_keys(type(config)).items():
        value, default = get_value(config, name), default_value(config, name)
        if value == "" and name in set_keys and not key.may_be_empty:
            yield name, ": write a value, or leave the key out; is a shell variable unset?"
        elif not key.is_section and not isinstance(value, str) and value not in (None, default):
            for bound in key.broken_bounds(value):
                yield name, f": it must {bound}; the default is {show_value(default)}"


def useless_keys(config: Config, set_keys: set[str], wrong: set[str]) -> Iterator[Row]:
    """Keys that the user has set without an effect, or beside a key that excludes them.

    One that has the value that it has anyway has no effect to lose: a whole config.yaml can be read
    back.
    """
    known = set(map(declared_key, set_keys)) & schema_keys(type(config)).keys()
    for name in sorted(known - wrong):
        value = get_value(config, name)
        if value == default_value(config, name):
            continue
        if reason := explain_unused(config, name):
            yield name, f" has no effect {reason}"
        for other in listed(EXCLUDES, name):
            if value and is_met(config, other):
                other = other.partition("=")[0]
                given = f"{other}={show_value(get_value(config, other))}"
                yield name, f" does not go with {given}: leave one out"


def explain_unused(config: Config, name: str) -> str:
    """Why a key has no effect; "" if it has one."""
    section = name.partition(".")[0]
    for needed in (listed(NEEDS, section), listed(NEEDS, name)):
        if needed and not any(is_met(config, need) for need in needed):
            return f"without {' or '.join(needed)}"
    if isinstance(config, DPOConfig) and name == "dpo.sft_coef" and not compares_pairs(config):
        return f"with dpo.loss={config.dpo.loss}, which takes replies one by one"
    if isinstance(config, PPOConfig):
        estimator = config.adv.estimator
        if (section == "critic" or name == "adv.bootstrap") and not needs_critic(estimator):
            return f"with adv.estimator={estimator}, which needs no critic: set adv.estimator=gae"
        if name == "teacher.coef" and "teacher_logps" in estimator_needs(estimator):
            return f"with adv.estimator={estimator}, where it is the whole advantage"
        if name == "kl.update_freq" and not needs_reference(config):
            return "with kl.coef=0"
    return explain_setting(config, name)


def explain_setting(config: Config, name: str) -> str:
    """Why a key that is a setting of losses or estimators has no effect, or ""."""
    section, _, setting = name.rpartition(".")
    for key, functions in CHOICES.items():
        is_of_section = key.startswith(f"{section}.")
        if not is_of_section or setting not in functions.kind.settings:
            continue
        used = functions.look_up(get_value(config, key)).used_settings
        is_default = (
            setting == "clip" and "clip_high" in used and not get_value(config, "actor.clip_high")
        )
        if setting not in used and not is_default:
            users = [
                user for user, other in functions.built_in.items() if setting in other.settings
            ]
            return (
                f"with {key}={get_value(config, key)}, which uses {', '.join(used) or 'no setting'}"
                f"; {setting} is used by {', '.join(users)}"
            )
    return ""


def listed(table: dict[str, tuple[str, ...]], name: str) -> list[str]:
    """The names that NEEDS or EXCLUDES has for a key, in full."""
    section, _, last = name.rpartition(".")
    if name in table:
        return list(table[name])
    return [need if "." in need else f"{section}.{need}" for need in table.get(last, ())]


def is_met(config: Config, need: str) -> bool:
    """Whether KEY has a value that is neither off nor its default, or that of KEY=VALUE."""
    name, equals, wanted = need.partition("=")
    if name not in schema_keys(type(config)):  # of another trainer
        return False
    value = get_value(config, name)
    return value == wanted if equals else bool(value) and value != default_value(config, name)


def default_value(config: Config, name: str) -> object:
    """The value that a key of the config has if it is not set."""
    key = schema_keys(type(config))[name]
    return get_value(config, key.leader) if key.leader else key.default


def loaded_models(config: Config) -> dict[str, ModelConfig]:
    """The sections of the models that the run loads, by name."""
    models: dict[str, ModelConfig] = {name: getattr(config, name) for name in worker_names(config)}
    if isinstance(config, PPOConfig):
        if not needs_critic(config.adv.estimator):
            del models["critic"]
        if loads_teacher(config):
            models["teacher"] = teacher_model(config)
    return models


def wrong_data(data: DataConfig) -> Iterator[Row]:
    """Rows that no path names; a chat template and a system prompt that are no files."""
    for key, path in (data.train_paths | data.test_paths).items():
        if not isinstance(path, str):
            yield (
                key,
                ": expected a path, of several files the folder that they are in, or NAME=PATH for "
                "each of several sets",
            )
    if data.path == {}:
        yield "data.path", ": it names no source; write data.path.NAME=PATH"
    template, prompt = data.chat_template, data.system_prompt_file
    if template not in (None, "plain") and not Path(template).expanduser().is_file():
        yield "data.chat_template", ": no such file; or choose plain"
    if prompt is not None and not prompt.is_file():
        yield "data.system_prompt", ": no such file"


def wrong_layout(name: str, model: ModelConfig, num_samplers: int) -> Iterator[Row]:
    """Parallel sizes of a model that do not divide the processes that train.

    Sequences and models are split over the processes that tensor parallelism leaves.
    `num_samplers` of the job do not train.
    """
    num_processes = int(os.environ.get("WORLD_SIZE", "1")) - num_samplers
    if num_processes < 1:
        return  # the number of samplers is wrong
    tp_size = model.tp_size
    yield from not_divisible(f"{name}.tp_size", tp_size, num_processes)
    remark = ""
    if tp_size > 1 and num_processes % tp_size == 0:
        num_processes //= tp_size
        remark = f" that {name}.tp_size={tp_size} leaves"
    yield from not_divisible(f"{name}.sp_size", model.sp_size, num_processes, remark)
    yield from not_divisible(f"{name}.fsdp_size", model.fsdp_size, num_processes, remark)


def not_divisible(key: str, size: int, num_processes: int, remark: str = "") -> Iterator[Row]:
    """A size that does not divide the processes; the range is checked elsewhere."""
    if size > 0 and num_processes % size:
        divisors = [str(n) for n in range(1, num_processes + 1) if num_processes % n == 0]
        processes = f"{num_processes} process{'es' if num_processes > 1 else ''}{remark}"
        yield key, f" does not divide the {processes}: choose {', '.join(divisors)}"


def wrong_lengths(config: Config, name: str, model: ModelConfig) -> Iterator[Row]:
    """Micro-batches of a model that are shorter than the longest sequences.

    In training the two rows of a pair are together, in inference they are not.
    """
    length = config.data.max_length
    num_rows = 2 if compares_pairs(config) else 1
    for limit, tokens, rows_together in (
        ("max_length_per_device", model.max_length_per_device, num_rows),
        ("max_inference_length_per_device", model.max_inference_length_per_device, 1),
    ):
        total = longest_row(config) * rows_together
        longest = f"a row may get: data.max_length {length} x {rows_together}"
        if isinstance(config, PPOConfig):
            turns = config.rollout.max_turns
            answer = config.rollout.train_sampling_params.max_new_tokens
            longest = (
                f"a trajectory may get: data.max_length {length} + {turns} x max_new_tokens "
                f"{answer}"
            )
        if isinstance(tokens, int) and 0 < tokens * model.sp_size < total:
            text = f" is shorter than {longest} = {total}; raise it, or lower the others"
            yield f"{name}.{limit}", text


def wrong_worker(name: str, worker: WorkerConfig) -> Iterator[Row]:
    """What is wrong in the section of a trained model."""
    if len(worker.betas) != 2:
        yield f"{name}.betas", " has to be two rates, as [0.9,0.999]"
    if worker.optimizer_dir and not Path(worker.optimizer_dir).is_dir():
        yield f"{name}.optimizer_dir", " is no folder"
    if worker.lora_rank > 0 and not installed_version("peft"):
        yield f"{name}.lora_rank", " needs the package peft: pip install 'rl2[lora]'"
    if worker.quantize_base:
        key, release = f"{name}.quantize_base", installed_version("torch") or "0"
        if not installed_version("bitsandbytes"):
            yield key, " needs the package bitsandbytes: pip install 'rl2[bitsandbytes]'"
        if Version(release) < Version(TORCH_OF_4_BITS):
            yield key, f" needs torch {TORCH_OF_4_BITS} or later, and this is {release}"


def wrong_dpo(config: DPOConfig) -> Iterator[Row]:
    if config.data.batch_size == 1 and needs_reference_point(config.dpo.loss):
        yield (
            "data.batch_size",
            f" is too small for dpo.loss={config.dpo.loss}, which compares prompts with replies to "
            "other prompts of the step: take 2 rows or more",
        )


def wrong_envs(config: PPOConfig) -> Iterator[Row]:
    """Envs that no path names; names of envs that are not those of all sources."""
    for key, path in config.rollout.env_paths.items():
        if not isinstance(path, str):
            yield key, ": expected a path or the name of a ready-made env"
    env_path, data = config.rollout.env_path, config.data
    paths = data.train_paths | data.test_paths
    sources = {source_name(key) for key, path in paths.items() if path}
    if isinstance(env_path, dict) and env_path.keys() != sources:
        text = (
            ": give an env to each source of data.path and data.test_path, as "
            "rollout.env_path.NAME=PATH, or one to all of them; they are "
            f"{', '.join(sorted(filter(None, sources))) or 'none'}"
        )
        if "" in sources:
            text += "; name the other with data.path.NAME=PATH or data.test_path.NAME=PATH"
        yield "rollout.env_path", text


def wrong_teacher(config: PPOConfig) -> Iterator[Row]:
    """What is wrong in distillation."""
    estimator, teacher = config.adv.estimator, config.teacher
    needs_teacher = "teacher_logps" in estimator_needs(estimator)
    if needs_teacher and not has_teacher(config):
        yield "adv.estimator", " needs a teacher: teacher.model_name or teacher.base_url"
    if teacher.base_url and not teacher.base_url.startswith(("http://", "https://")):
        yield "teacher.base_url", " must begin with http:// or https://"
    if has_full_kl(config) and needs_teacher and estimator != "distillation":
        yield (
            "teacher.kl",
            f" excludes adv.estimator={estimator}, which reads the teacher's log-probabilities of "
            "the sampled tokens",
        )


def wrong_loss(config: PPOConfig) -> Iterator[Row]:
    """What is wrong in the losses, the advantages and the sizes of updates."""
    actor, data, kl = config.actor, config.data, config.kl
    estimator, needs = config.adv.estimator, estimator_needs(config.adv.estimator)
    if data.responses_per_prompt == 1 and "group" in needs:
        yield (
            "data.responses_per_prompt",
            f" leaves adv.estimator={estimator} no group to compare with, and all advantages 0; "
            "sample 2 or more, or use adv.estimator=reinforce_plus_plus or gae",
        )
    num_trajectories, num_updates = data.trajectories_per_rollout, updates_of_batch_size(config)
    trajectories = f"the {num_trajectories} trajectories of a step"
    if (data.batch_size or 0) > 0 and not num_updates:
        yield "data.batch_size", f" does not divide {trajectories}: choose a divisor"
    for name, worker in (("actor", actor), ("critic", config.critic)):
        given = worker.update_per_rollout
        if 0 < num_trajectories < given:
            yield f"{name}.update_per_rollout", f" is more than {trajectories}: lower it"
        if num_updates not in (0, given):
            text = f"{num_updates} mini-batches of {trajectories}, and {name}.update_per_rollout"
            yield "data.batch_size", f" makes {text}={given} another number: leave one out"
    if kl.type == "reward" and "rewards" not in needs:
        yield (
            "kl.type",
            f" has no effect with adv.estimator={estimator}, which takes no rewards: choose "
            "kl.type=loss",
        )
    # Tokens of an older policy are weighted by the ratio to it, which gives k1 its gradient.
    is_weighted = actor.updates_per_step > 1 or old_policy_is_sampler(config)
    if kl.type == "loss" and kl.loss_estimator == "k1" and not is_weighted:
        yield "kl.loss_estimator", " has no gradient on average in a loss: choose k2 or k3"
    if actor.correction != "none" and corrects_mismatch(actor.loss):
        yield (
            "actor.correction",
            f" has no place with actor.loss={actor.loss}, whose ratio is that to the engine's "
            "probabilities already: leave it out",
        )
    if actor.average == "constant" and actor.average_constant is None:
        longest = config.rollout.train_sampling_params.max_new_tokens
        yield (
            "actor.average",
            " needs actor.average_constant, the length that it divides by: Dr. GRPO takes that of "
            f"the longest answer, here actor.average_constant={longest}",
        )


def wrong_rollout(config: PPOConfig) -> Iterator[Row]:
    """What is wrong in what is sampled, or read in its place."""
    rollout = config.rollout
    if config.trainer.rollouts_from and "ages" in policy_loss_needs(config.actor.loss):
        yield (
            "trainer.rollouts_from",
            f" excludes actor.loss={config.actor.loss}, which needs `ages` of tokens in updates: "
            "the weights of another run have no such age",
        )
    if (bounds := rollout.filter) and (len(bounds) != 2 or bounds[0] >= bounds[1]):
        yield "rollout.filter", " has to be a low and a high mean reward, as [0,1]"
    longest, buffer = rollout.train_sampling_params.max_new_tokens, rollout.overlong_buffer
    if isinstance(buffer, int) and buffer > longest > 0:
        text = f" is more than rollout.train_sampling_params.max_new_tokens={longest}: lower it"
        yield "rollout.overlong_buffer", text
    if config.data.responses_per_test_prompt > 1 and rollout.test_sampling_params.temperature == 0:
        yield (
            "data.responses_per_test_prompt",
            " gives equal answers with rollout.test_sampling_params.temperature=0: set one, e.g. 1",
        )
    if rollout.exact:
        for obstacle in exact_obstacles(config):
            yield "rollout.exact", f" does not hold with {obstacle}"


def wrong_servers(rollout: RolloutConfig) -> Iterator[Row]:
    """Servers that have no URL, or no way for the weights."""
    if not rollout.server_urls or not rollout.shared_dir:
        yield (
            "rollout.engine",
            " needs rollout.server_urls=[http://host:port], where python -m rl2.engine.serve "
            "listens, and rollout.shared_dir=FOLDER, which the servers see too",
        )
    if not all(url.startswith(("http://", "https://")) for url in rollout.server_urls):
        yield "rollout.server_urls", ": each must begin with http:// or https://"


def wrong_engine(config: PPOConfig) -> Iterator[Row]:
    """An engine that cannot run here, or not on as many processes as it is given.

    No engine spans two nodes, or processes that train and that sample.
    """
    rollout, num_samplers = config.rollout, count_samplers(config)
    if num_samplers >= int(os.environ.get("WORLD_SIZE", "1")):
        yield (
            "rollout.num_processes",
            " leaves no process of the job that trains: start it with torchrun --nproc_per_node="
            f"{num_samplers + 1} or more, or set 0",
        )
    engine = choose_engine(rollout.engine)[0]
    if config.actor.routing_replay and not (
        engine == "local" or (engine == "sglang" and has_gpu())
    ):
        yield (
            "actor.routing_replay",
            f" needs to know which experts the engine chose, and {engine} does not tell: leave it "
            "out, or set rollout.engine=local",
        )
    if engine == "local":
        return
    for reason in installation_problems(engine):
        yield "rollout.engine", f": {reason}"
    params, tp_size = rollout.train_sampling_params, rollout.tp_size
    if (params.top_p, params.top_k, params.min_p) != (1, -1, 0) and not config.trainer.eval_only:
        yield (
            "rollout.train_sampling_params",
            f": {engine} does not tell which tokens top_p, top_k and min_p leave, so what it "
            "samples could not be trained: leave them out, or set rollout.engine=local",
        )
    if engine == "server":
        yield from wrong_servers(rollout)
        return
    if engine == "vllm" and tp_size > 1:
        text = ": vLLM has one engine a process here: set 1, or rollout.engine=sglang"
        yield "rollout.tp_size", text
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        setting = os.environ.get(name, "")
        if has_gpu() and re.search(r"expandable_segments\s*:\s*true", setting, re.IGNORECASE):
            yield (
                "rollout.engine",
                f": {engine} cannot give its memory to the trainer with expandable_segments: take "
                f"it out of the environment variable {name}={setting}, or set rollout.engine=local",
            )
    processes_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not 0 < num_samplers <= processes_per_node:  # else all engines are on the last node
        yield from not_divisible("rollout.tp_size", tp_size, processes_per_node, " of a node")
    if num_samplers:
        remark = " of rollout.num_processes"
        yield from not_divisible("rollout.tp_size", tp_size, num_samplers, remark)
