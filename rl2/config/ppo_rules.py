"""The checks of PPO alone: keys that need or exclude each other, the engine, equal bits."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch

from rl2.config.adapters import adapter_obstacle, sends_adapters
from rl2.config.conditions import (
    clips_to_sampler,
    corrects_mismatch,
    count_samplers,
    estimator_needs,
    has_full_kl,
    has_teacher,
    policy_loss_needs,
    weights_kl,
)
from rl2.config.engines import (
    VLLM_PACKAGES,
    choose_engine,
    compiler_problems,
    installed_version,
    sglang_problems,
)
from rl2.config.exactness import exact_obstacles
from rl2.config.key_rules import non_default_keys
from rl2.config.model_rules import check_divides
from rl2.config.play_rules import check_envs, find_equal_answers
from rl2.config.problem import Problem, wrong_value
from rl2.config.schema import PPOConfig, worker_names
from rl2.config.values import get_value

TRIED_VLLM = "0.32."
INTERVAL_CORRECTIONS = ("token_mask", "geometric_mask")  # they keep ratios in [1 / cap, cap]

# What the actor and a teacher that runs in its updates must have in common.
SHARED_BY_PASSES = ("sp_size", "tp_size", "share_prompts", "max_length_per_device")


def check_ppo(config: PPOConfig) -> Iterator[Problem]:
    """The problems of a config of PPO beside those of its keys, data and models."""
    yield from check_run(config)
    yield from check_step_sizes(config)
    yield from check_estimator(config)
    yield from check_hint(config)
    yield from check_teacher_server(config)
    yield from check_full_kl(config)
    yield from check_deterministic(config)
    yield from check_kl(config)
    yield from check_actor(config)
    yield from check_rollout(config)
    yield from check_samplers(config)
    yield from check_engine(config)
    yield from check_adapters(config)
    yield from check_exact(config)


def find_ppo_warnings(config: PPOConfig, set_keys: set[str]) -> Iterator[Problem]:
    """Settings that are allowed but easily misunderstood. `set_keys`: those that the user set."""
    yield from find_run_warnings(config)
    yield from find_loss_warnings(config, set_keys)


def check_run(config: PPOConfig) -> Iterator[Problem]:
    """Whether there is an env file, and what an evaluation or a run on saved rollouts works on."""
    data = config.data
    row_paths = {"data.path": data.path, "data.test_path": data.test_path}
    yield from check_envs(config.rollout, row_paths)
    saved = config.trainer.rollouts_from
    if config.trainer.eval_only and not config.data.has_test_rows:
        message = "trainer.eval_only=true needs data.test_path or data.test_ratio"
        yield Problem("trainer.eval_only", True, message)
    if config.trainer.eval_only and saved:
        message = "trainer.eval_only=true trains on no rollouts: leave trainer.rollouts_from out"
        yield Problem("trainer.eval_only", True, message)
    elif saved and not Path(saved).is_dir():
        yield wrong_value("trainer.rollouts_from", saved, "no such folder")
    if saved and "ages" in policy_loss_needs(config.actor.loss):
        reason = (
            "actor.loss needs `ages`, the updates since a token was sampled, and the weights of "
            "another run have no such age: leave trainer.rollouts_from out or choose another loss"
        )
        yield wrong_value("trainer.rollouts_from", saved, reason)


def check_step_sizes(config: PPOConfig) -> Iterator[Problem]:
    """Whether a step has enough trajectories for its mini-batches."""
    num_trajectories = config.data.prompts_per_rollout * config.data.responses_per_prompt
    for name in worker_names(config):
        key = f"{name}.update_per_rollout"
        updates = getattr(config, name).update_per_rollout
        if 0 < num_trajectories < updates:
            message = f"{key}={updates} is more than the {num_trajectories} trajectories of a step"
            yield Problem(key, updates, message)


def check_estimator(config: PPOConfig) -> Iterator[Problem]:
    """Whether there is what the advantage estimator compares, and whether it takes rewards."""
    estimator = config.adv.estimator
    needs = estimator_needs(estimator)
    if "group" in needs and config.data.responses_per_prompt == 1:
        message = (
            f"data.responses_per_prompt=1 leaves adv.estimator={estimator} no group to compare "
            "with: every advantage would be 0; sample 2 or more, or use "
            "adv.estimator=reinforce_plus_plus or gae"
        )
        yield Problem("data.responses_per_prompt", 1, message)
    if config.kl.type == "reward" and needs and "rewards" not in needs:
        message = (
            f"kl.type=reward has no effect with adv.estimator={estimator}, which takes no rewards: "
            "choose kl.type=loss"
        )
        yield Problem("kl.type", "reward", message)
    if "teacher_logps" in needs and not has_teacher(config):
        message = (
            f"adv.estimator={estimator} needs a teacher: teacher.model_name, teacher.base_url or "
            "teacher.hint"
        )
        yield Problem("adv.estimator", estimator, message)


def check_teacher_server(config: PPOConfig) -> Iterator[Problem]:
    """Whether a server can give the log-probabilities that are trained."""
    url = config.teacher.base_url
    if not url:
        return
    if not url.startswith(("http://", "https://")):
        yield wrong_value("teacher.base_url", url, "it must begin with http:// or https://")
    if config.teacher.kl == "full":
        reason = "a server scores the sampled tokens only: leave teacher.base_url out"
        yield wrong_value("teacher.kl", "full", reason)
    params = config.rollout.train_sampling_params
    for name, needed in {"temperature": 1.0, "top_p": 1.0, "top_k": -1}.items():
        if getattr(params, name) != needed:
            reason = (
                "a server scores tokens at temperature 1 among the whole vocabulary: set it to "
                f"{needed}, or leave teacher.base_url out"
            )
            key = f"rollout.train_sampling_params.{name}"
            yield wrong_value(key, getattr(params, name), reason)


def check_hint(config: PPOConfig) -> Iterator[Problem]:
    """Whether the teacher's prompt can take the place of the policy's."""
    hint = config.teacher.hint
    if hint and config.rollout.max_turns > 1:
        reason = (
            "only the first prompt of a conversation has the hint: set rollout.max_turns=1, or "
            "leave teacher.hint out"
        )
        yield wrong_value("teacher.hint", hint, reason)
    if hint and config.trainer.rollouts_from:
        reason = "saved rollouts have no prompts of a teacher: leave one of the two out"
        yield wrong_value("teacher.hint", hint, reason)


def check_full_kl(config: PPOConfig) -> Iterator[Problem]:
    """Whether the teacher can run on the micro-batches of the actor's updates."""
    if not has_full_kl(config):
        return
    actor, teacher, estimator = config.actor, config.teacher, config.adv.estimator
    if teacher.hint:
        reason = (
            "the teacher reads other prompts than the policy with teacher.hint: leave one of the "
            "two out"
        )
        yield wrong_value("teacher.kl", "full", reason)
    if "teacher_logps" in estimator_needs(estimator) and estimator != "distillation":
        reason = (
            f"adv.estimator={estimator} reads the teacher's log-probabilities of the sampled "
            "tokens: leave teacher.kl out, or choose another estimator"
        )
        yield wrong_value("teacher.kl", "full", reason)
    for name in SHARED_BY_PASSES:
        value, actors = getattr(teacher, name), getattr(actor, name)
        if teacher.model_name and value != actors:
            reason = (
                f"with teacher.kl=full the teacher runs on the actor's micro-batches: leave it "
                f"out, and it is actor.{name}={actors}"
            )
            yield wrong_value(f"teacher.{name}", value, reason)


def check_deterministic(config: PPOConfig) -> Iterator[Problem]:
    """Whether the same run would have the same rollouts."""
    if config.rollout.partial and config.trainer.deterministic:
        message = (
            "trainer.deterministic=true: partial rollouts depend on time; leave it or "
            "rollout.partial out"
        )
        yield Problem("trainer.deterministic", True, message)


def check_kl(config: PPOConfig) -> Iterator[Problem]:
    """Whether the KL term has a kind and a weight, and a reference that can be updated."""
    kl = config.kl
    if kl.coef > 0 and kl.type is None:
        message = (
            f"kl.coef={kl.coef} needs kl.type: loss adds the KL to the loss, reward subtracts it "
            "from the reward"
        )
        yield Problem("kl.coef", kl.coef, message)
    if kl.coef == 0 and kl.type is not None:
        message = f"kl.type={kl.type} needs kl.coef, the weight of the KL, e.g. kl.coef=0.001"
        yield Problem("kl.type", kl.type, message)
    if kl.update_freq and config.actor.lora_rank > 0:
        reason = (
            f"with actor.lora_rank={config.actor.lora_rank} the reference is the start model, and "
            "shares its weights with the actor; leave one of them out"
        )
        yield wrong_value("kl.update_freq", kl.update_freq, reason)


def check_actor(config: PPOConfig) -> Iterator[Problem]:
    """Whether the loss has what its correction and its average divide by, and corrects once."""
    actor = config.actor
    if actor.correction != "none" and corrects_mismatch(actor.loss):
        message = (
            f"actor.correction={actor.correction} has no place with actor.loss={actor.loss}, whose "
            "ratio is that to the engine's probabilities already: leave it out"
        )
        yield Problem("actor.correction", actor.correction, message)
    if actor.correction in INTERVAL_CORRECTIONS and actor.correction_cap == 1:
        message = (
            f"actor.correction_cap=1: actor.correction={actor.correction} masks all ratios outside "
            "[1 / cap, cap], which leaves nothing to train; the default is 2"
        )
        yield Problem("actor.correction_cap", actor.correction_cap, message)
    if actor.average == "constant" and actor.average_constant is None:
        message = (
            "actor.average=constant needs actor.average_constant, the length that it divides by: "
            "Dr. GRPO takes that of the longest answer, here actor.average_constant="
            f"{config.rollout.train_sampling_params.max_new_tokens}"
        )
        yield Problem("actor.average", actor.average, message)
    if actor.average != "constant" and actor.average_constant is not None:
        message = (
            f"actor.average_constant={actor.average_constant} needs actor.average=constant; "
            f"actor.average={actor.average} divides by what it counts"
        )
        yield Problem("actor.average_constant", actor.average_constant, message)


def check_rollout(config: PPOConfig) -> Iterator[Problem]:
    """Whether the ranges of rewards and lengths are ranges."""
    rollout = config.rollout
    for name, bounds in [
        ("rollout.filter", rollout.filter),
        ("data.curriculum", config.data.curriculum),
    ]:
        if bounds and (len(bounds) != 2 or not bounds[0] < bounds[1]):
            reason = "give a low and a high bound of the mean reward, as [0,1]"
            yield wrong_value(name, bounds, reason)
    buffer = rollout.overlong_buffer
    answer = rollout.train_sampling_params.max_new_tokens
    if buffer and buffer > answer:
        message = (
            f"rollout.overlong_buffer={buffer} is more than "
            f"rollout.train_sampling_params.max_new_tokens={answer}: lower it, e.g. to a fifth"
        )
        yield Problem("rollout.overlong_buffer", buffer, message)


def check_samplers(config: PPOConfig) -> Iterator[Problem]:
    """Whether rollout.num_processes leaves a process that trains, and what it excludes."""
    num_samplers = count_samplers(config)
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    if num_samplers >= num_processes:
        has = "1 process" if num_processes == 1 else f"{num_processes} processes"
        reason = (
            f"the job has {has}, and at least one has to train: start it with torchrun "
            f"--nproc_per_node={num_samplers + 1} or more, or set 0"
        )
        yield wrong_value("rollout.num_processes", num_samplers, reason)
    if num_samplers and choose_engine(config.rollout.engine)[0] != "local":
        of = " of rollout.num_processes"
        yield from check_divides("rollout.tp_size", config.rollout.tp_size, num_samplers, of)
    if num_samplers and config.rollout.partial:
        reason = (
            "with rollout.num_processes no step waits for the sampling of its own rollout; leave "
            "one of them out"
        )
        yield wrong_value("rollout.partial", True, reason)


def check_engine(config: PPOConfig) -> Iterator[Problem]:
    """Whether the engine is installed and can run here, on as many processes as it is given."""
    engine = choose_engine(config.rollout.engine)[0]
    silent = None  # an engine that does not tell which experts it chose
    if engine == "sglang":
        yield from check_sglang(config)
        if not torch.cuda.is_available():
            silent = "SGLang without a GPU"
    elif engine == "vllm":
        yield from check_vllm(config)
        silent = "vLLM"
    if silent is not None and config.actor.routing_replay:
        reason = f"{silent} does not tell rl2 which experts it chose"
        advice = "leave it out, or set rollout.engine=local"
        yield wrong_value("actor.routing_replay", True, f"{reason}; {advice}")


def check_engine_size(config: PPOConfig) -> Iterator[Problem]:
    """Whether no engine spans two nodes."""
    processes_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if 0 < count_samplers(config) <= processes_per_node:
        return  # all engines are on the last node
    tp_size = config.rollout.tp_size
    yield from check_divides("rollout.tp_size", tp_size, processes_per_node, " of a node")


def check_sglang(config: PPOConfig) -> Iterator[Problem]:
    """Whether SGLang is installed and can run here, its size divides the processes of a node, and
    torch's memory is of a kind that it can take over and give back.
    """
    rollout = config.rollout
    version = installed_version("sglang")
    if version is None:
        reason = "it is not installed; pip install sglang, or set rollout.engine=local"
        yield wrong_value("rollout.engine", "sglang", reason)
        return
    yield from check_engine_size(config)
    has_gpu = torch.cuda.is_available()
    # A user who set it has chosen between speed and the precision of the logits.
    has_float32_head = (
        has_gpu
        and config.actor.head_dtype == "float32"
        and "enable_fp32_lm_head" not in rollout.engine_args
    )
    reasons = [*sglang_problems(version, has_float32_head)]
    if has_gpu and torch.version.cuda:
        reasons += compiler_problems()
    for reason in reasons:
        yield wrong_value("rollout.engine", rollout.engine, reason)
    if has_gpu:
        yield from check_allocator("SGLang")


def check_vllm(config: PPOConfig) -> Iterator[Problem]:
    """Whether a release of vLLM is installed that has been tried, its size divides the processes of
    a node, and torch's memory is of a kind that it can take over and give back.
    """
    version = installed_version(*VLLM_PACKAGES)
    if version is None:
        reason = "it is not installed; pip install 'vllm==0.32.*', or set rollout.engine=local"
        yield wrong_value("rollout.engine", "vllm", reason)
        return
    if not version.startswith(TRIED_VLLM):
        reason = (
            f"release {version} has not been tried with rl2, and vLLM's interfaces change; "
            "pip install 'vllm==0.32.*', or set rollout.engine=local"
        )
        yield wrong_value("rollout.engine", "vllm", reason)
    yield from check_engine_size(config)
    if torch.cuda.is_available():
        yield from check_allocator("vLLM")


def check_allocator(engine: str) -> Iterator[Problem]:
    """Whether torch's allocator can give memory back, as the environment configures it."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        value = os.environ.get(name, "")
        if re.search(r"expandable_segments\s*:\s*true", value, re.IGNORECASE):
            reason = (
                f"{engine} cannot give its memory to the trainer with expandable_segments; take it "
                "out of the variable, or set rollout.engine=local"
            )
            yield wrong_value(name, value, reason)


def check_adapters(config: PPOConfig) -> Iterator[Problem]:
    """Whether the engine can apply adapters, and whether an evaluation has them and their base."""
    actor, rollout = config.actor, config.rollout
    if not actor.lora_rank:
        return
    obstacle = adapter_obstacle(config)
    if rollout.lora == "adapter" and obstacle is not None:
        yield wrong_value("rollout.lora", "adapter", f"{obstacle}; set merged")
    if config.trainer.eval_only and actor.quantize_base:
        reason = (
            "with trainer.eval_only=true the engine reads the files of actor.model_name, which are "
            "not in 4 bits: give a model that a run has exported, or leave the key out"
        )
        yield wrong_value("actor.quantize_base", actor.quantize_base, reason)
    elif config.trainer.eval_only and actor.adapter and not sends_adapters(config):
        reason = (
            "with trainer.eval_only=true the engine reads the files of actor.model_name, without "
            "these adapters: give the merged model, or set rollout.lora=adapter"
        )
        yield wrong_value("actor.adapter", actor.adapter, reason)


def check_exact(config: PPOConfig) -> Iterator[Problem]:
    """Whether the demand for equal bits can be met; if not, what to choose instead."""
    if not config.rollout.exact:
        return
    for obstacle in exact_obstacles(config):
        message = f"rollout.exact=true does not hold with {obstacle}"
        yield Problem("rollout.exact", True, message)
    if config.trainer.rollouts_from:
        message = (
            "rollout.exact=true does not hold with trainer.rollouts_from, since other weights may "
            "have sampled: leave it out, and the same weights repeat a step to the bit"
        )
        yield Problem("rollout.exact", True, message)
    if count_samplers(config):
        message = (
            "rollout.exact=true does not hold with rollout.num_processes, since the weights before "
            "the last update have sampled: leave it out, and the engine computes as the trainer"
        )
        yield Problem("rollout.exact", True, message)


def find_run_warnings(config: PPOConfig) -> Iterator[Problem]:
    """Settings of the run and its rollouts that are allowed but easily misunderstood."""
    rollout, trainer = config.rollout, config.trainer
    actor = config.actor
    if rollout.partial and actor.correction == "none" and not corrects_mismatch(actor.loss):
        message = (
            "rollout.partial=true: tokens that older weights sampled are trained as if the current "
            "ones had; actor.correction=token_tis weighs them by their recorded log-probabilities"
        )
        yield Problem("rollout.partial", True, message)
    if not trainer.rollouts_from:
        yield from find_engine_warnings(config)
    if trainer.rollouts_from and config.data.test_path:
        message = "data.test_path: nothing is sampled with trainer.rollouts_from, not even a test"
        yield Problem("data.test_path", config.data.test_path, message)
    yield from find_equal_answers(config)
    for name, worker in (("actor", config.actor), ("critic", config.critic)):
        if trainer.max_steps and worker.freeze_steps >= trainer.max_steps:
            reason = f"{name} is not updated in any of the {trainer.max_steps} steps"
            yield wrong_value(f"{name}.freeze_steps", worker.freeze_steps, reason)


def find_engine_warnings(config: PPOConfig) -> Iterator[Problem]:
    """What the engine does not tell, and whether it has been tried on this kind of machine."""
    engine = choose_engine(config.rollout.engine)[0]
    params = config.rollout.train_sampling_params
    if engine == "sglang" and (params.top_p < 1 or params.top_k != -1):
        message = (
            "rollout.train_sampling_params: sglang does not tell which tokens top_p and top_k "
            "leave, so the trainer's log-probabilities are from before them, and it trains as if "
            "the whole vocabulary had been sampled"
        )
        yield Problem("rollout.train_sampling_params", params, message)
    if engine == "vllm" and torch.cuda.is_available():
        message = (
            "rollout.engine=vllm: it has been run on CPUs only; look at actor/mismatch_* and the "
            "memory of the first steps"
        )
        yield Problem("rollout.engine", "vllm", message)


def find_loss_warnings(config: PPOConfig, set_keys: set[str]) -> Iterator[Problem]:
    """Settings of the loss that are allowed but easily misunderstood."""
    actor = config.actor
    clips = sorted(
        {"actor.clip", "actor.clip_high", "actor.dual_clip"} & non_default_keys(config, set_keys)
    )
    is_on_policy = actor.updates_per_step == 1 and not clips_to_sampler(config)
    if clips and is_on_policy and actor.loss == "ppo":
        message = (
            f"{', '.join(clips)}: with actor.update_per_rollout=1 and actor.epochs_per_rollout=1 "
            "the ratio is exactly 1 and never clipped"
        )
        yield Problem(clips[0], get_value(config, clips[0]), message)
    if actor.updates_per_step > 1 and actor.loss == "reinforce":
        reason = (
            f"after the first of the {actor.updates_per_step} updates of a rollout the answers are "
            "those of an older policy, and this loss has no ratio that corrects for it"
        )
        yield wrong_value("actor.loss", actor.loss, reason)
    is_unweighted_loss = config.kl.type == "loss" and not weights_kl(
        config.kl, actor.updates_per_step
    )
    if is_unweighted_loss and config.kl.loss_estimator == "k1":
        reason = "the gradient of k1 in a loss is 0 on average; k2 has that of the KL"
        yield wrong_value("kl.loss_estimator", "k1", reason)
