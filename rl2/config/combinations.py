"""Keys that do not fit together: a condition, a key and a text each.

The text follows KEY=VALUE and says what to do.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from packaging.version import Version

from rl2.config.conditions import (
    compares_pairs,
    corrects_mismatch,
    count_samplers,
    estimator_needs,
    has_full_kl,
    has_teacher,
    needs_critic,
    needs_reference,
    needs_reference_point,
    old_policy_is_sampler,
    policy_loss_needs,
    sends_adapters,
)
from rl2.config.engines import choose_engine, has_gpu, installed_version
from rl2.config.schema import Config, DPOConfig, PPOConfig, WorkerConfig

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
    "kl.coef": ("kl.type=loss", "kl.type=reward"),
    "kl.type": ("kl.coef",),
    "kl.reward_estimator": ("kl.type=reward",),
    "kl.loss_estimator": ("kl.type=loss",),
    "teacher": ("teacher.model_name", "teacher.base_url"),
    "trainer.eval_only": ("data.test_path", "data.test_ratio"),
}
# Keys that may not be set beside a key, in the same form.
EXCLUDES: dict[str, tuple[str, ...]] = {
    "data.test_ratio": ("data.test_path",),
    "lora_alpha": ("adapter",),  # which has its own
    "lora_targets": ("adapter",),
    "quantize_base": ("tp_size",),  # would cut rows inside 4-bit blocks
    "correction_cap": ("correction=none",),
    "kl.update_freq": ("actor.lora_rank",),  # the reference shares the actor's weights then
    "teacher.base_url": (  # a server scores at temperature 1 among the whole vocabulary
        "rollout.train_sampling_params.temperature",
        "rollout.train_sampling_params.top_p",
        "rollout.train_sampling_params.top_k",
    ),
    "teacher.kl": ("teacher.base_url",),
    "rollout.partial": ("rollout.num_processes",),  # with which no step waits
    "rollout.exact": ("rollout.num_processes", "trainer.rollouts_from"),  # of other weights
    "trainer.deterministic": ("rollout.partial",),  # which depends on time
    "trainer.save_best": ("trainer.eval_only", "trainer.rollouts_from"),
}

TORCH_OF_4_BITS = "2.13"  # FSDP2 of torch 2.11 fails at parameters of bytes; 2.12 is not tried


def find_broken(config: Config) -> Iterator[Row]:
    """What is refused."""
    data, trainer = config.data, config.trainer
    resume = trainer.resume
    if resume not in ("auto", "off", "force") and not is_folder(resume.removeprefix("force:")):
        yield "trainer.resume", "is no folder: choose auto, off, force or a checkpoint"
    if "tensorboard" in trainer.loggers and not installed_version("tensorboard"):
        yield "trainer.loggers", "needs the package tensorboard: pip install tensorboard"
    best = trainer.save_best is not None
    if best and not (data.has_test_rows and trainer.test_freq):
        yield (
            "trainer.save_best",
            "needs test rows (data.test_path or data.test_ratio) and trainer.test_freq, the steps "
            "between evaluations",
        )
    if isinstance(config, DPOConfig):
        if config.data.batch_size == 1 and needs_reference_point(config.dpo.loss):
            yield (
                "data.batch_size",
                f"is too small for dpo.loss={config.dpo.loss}, which compares prompts with "
                "replies to other prompts of the step: take 2 rows or more",
            )
    if isinstance(config, PPOConfig):
        yield from find_broken_run(config)
        yield from find_broken_teacher(config)
        yield from find_broken_loss(config)
        yield from find_broken_rollout(config)


def find_broken_worker(name: str, worker: WorkerConfig) -> Iterator[Row]:
    """What is refused in the section of a trained model."""
    if len(worker.betas) != 2:
        yield f"{name}.betas", "has to be two rates, as [0.9,0.999]"
    if worker.optimizer_dir and not is_folder(worker.optimizer_dir):
        yield f"{name}.optimizer_dir", "is no folder"
    if worker.lora_rank > 0 and not installed_version("peft"):
        yield f"{name}.lora_rank", "needs the package peft: pip install 'rl2[lora]'"
    if worker.quantize_base:
        key, release = f"{name}.quantize_base", installed_version("torch") or "0"
        if not installed_version("bitsandbytes"):
            yield key, "needs the package bitsandbytes: pip install 'rl2[bitsandbytes]'"
        if Version(release) < Version(TORCH_OF_4_BITS):
            yield key, f"needs torch {TORCH_OF_4_BITS} or later, and this is {release}"


def find_broken_run(config: PPOConfig) -> Iterator[Row]:
    """What is refused in the kind of PPO's run, and in the sizes of its steps."""
    data = config.data
    estimator, saved = config.adv.estimator, config.trainer.rollouts_from
    if saved and not is_folder(saved):
        yield "trainer.rollouts_from", "is no folder"
    if saved and "ages" in policy_loss_needs(config.actor.loss):
        yield (
            "trainer.rollouts_from",
            f"excludes actor.loss={config.actor.loss}, which needs `ages` of tokens in updates: "
            "the weights of another run have no such age",
        )
    if data.responses_per_prompt == 1 and "group" in estimator_needs(estimator):
        yield (
            "data.responses_per_prompt",
            f"leaves adv.estimator={estimator} no group to compare with, and all advantages 0; "
            "sample 2 or more, or use adv.estimator=reinforce_plus_plus or gae",
        )
    num_trajectories = data.prompts_per_rollout * data.responses_per_prompt
    for name, worker in (("actor", config.actor), ("critic", config.critic)):
        if 0 < num_trajectories < worker.update_per_rollout:
            yield (
                f"{name}.update_per_rollout",
                f"is more than the {num_trajectories} trajectories of a step: lower it",
            )


def find_broken_teacher(config: PPOConfig) -> Iterator[Row]:
    """What is refused in distillation."""
    estimator, teacher = config.adv.estimator, config.teacher
    needs_teacher = "teacher_logps" in estimator_needs(estimator)
    if needs_teacher and not has_teacher(config):
        yield (
            "adv.estimator",
            "needs a teacher: teacher.model_name or teacher.base_url",
        )
    if teacher.base_url and not teacher.base_url.startswith(("http://", "https://")):
        yield "teacher.base_url", "must begin with http:// or https://"
    if has_full_kl(config) and needs_teacher and estimator != "distillation":
        yield (
            "teacher.kl",
            f"excludes adv.estimator={estimator}, which reads the teacher's "
            "log-probabilities of the sampled tokens",
        )


def find_broken_loss(config: PPOConfig) -> Iterator[Row]:
    """What is refused in PPO's loss and its KL term."""
    actor, kl = config.actor, config.kl
    needs = estimator_needs(config.adv.estimator)
    if kl.type == "reward" and "rewards" not in needs:
        yield (
            "kl.type",
            f"has no effect with adv.estimator={config.adv.estimator}, which takes no rewards: "
            "choose kl.type=loss",
        )
    if actor.correction != "none" and corrects_mismatch(actor.loss):
        yield (
            "actor.correction",
            f"has no place with actor.loss={actor.loss}, whose ratio is that to the engine's "
            "probabilities already: leave it out",
        )
    longest = config.rollout.train_sampling_params.max_new_tokens
    if actor.average == "constant" and actor.average_constant is None:
        yield (
            "actor.average",
            "needs actor.average_constant, the length that it divides by: Dr. GRPO takes that of "
            f"the longest answer, here actor.average_constant={longest}",
        )


def find_broken_rollout(config: PPOConfig) -> Iterator[Row]:
    """What is refused in how PPO samples."""
    actor, rollout = config.actor, config.rollout
    num_samplers, is_evaluation = count_samplers(config), config.trainer.eval_only
    if bounds := rollout.filter:
        if len(bounds) != 2 or bounds[0] >= bounds[1]:
            yield "rollout.filter", "has to be a low and a high mean reward, as [0,1]"
    longest = rollout.train_sampling_params.max_new_tokens
    if rollout.overlong_buffer and rollout.overlong_buffer > longest:
        yield (
            "rollout.overlong_buffer",
            f"is more than rollout.train_sampling_params.max_new_tokens={longest}: lower it",
        )
    if num_samplers >= int(os.environ.get("WORLD_SIZE", "1")):
        yield (
            "rollout.num_processes",
            "leaves no process of the job that trains: start it with torchrun --nproc_per_node="
            f"{num_samplers + 1} or more, or set 0",
        )
    engine = choose_engine(rollout.engine)[0]
    tells_experts = engine == "local" or (engine == "sglang" and has_gpu())
    if actor.routing_replay and not tells_experts:
        yield (
            "actor.routing_replay",
            f"needs to know which experts the engine chose, and {engine} does not tell: leave it "
            "out, or set rollout.engine=local",
        )
    if is_evaluation and actor.lora_rank and actor.quantize_base:
        yield (
            "actor.quantize_base",
            "excludes trainer.eval_only: the engine reads the files of actor.model_name, which are "
            "not in 4 bits; give a model that a run has exported",
        )
    if is_evaluation and actor.adapter and not actor.quantize_base and not sends_adapters(config):
        yield (
            "actor.adapter",
            "excludes trainer.eval_only: the engine reads the files of actor.model_name, without "
            "these adapters; give the merged model, or take the embedded engine on a CPU",
        )


def find_unused(config: Config) -> Iterator[Row]:
    """Keys and sections that do nothing, though they would say something about the algorithm.

    They are refused if the user has set them to another value than they have anyway.
    """
    if not isinstance(config.data.path, dict):
        yield "data.weights", "has no effect with one source: name several with data.path.NAME=PATH"
    if isinstance(config, DPOConfig):
        if not compares_pairs(config):
            yield (
                "dpo.sft_coef",
                f"has no effect with dpo.loss={config.dpo.loss}, which takes replies one by one",
            )
    if isinstance(config, PPOConfig):
        yield from find_unused_of_ppo(config)


def find_unused_of_ppo(config: PPOConfig) -> Iterator[Row]:
    """The same in PPO."""
    estimator = config.adv.estimator
    if not needs_critic(estimator):
        yield (
            "critic",
            f"has no effect with adv.estimator={estimator}, which needs no critic: set "
            "adv.estimator=gae",
        )
    if "teacher_logps" in estimator_needs(estimator):
        yield (
            "teacher.coef",
            f"has no effect with adv.estimator={estimator}, where it is the whole advantage",
        )
    if is_on_policy(config):
        yield (
            "actor.skip_threshold",
            "has no effect with one optimizer step per rollout, where the ratio is 1: raise "
            "actor.update_per_rollout or actor.epochs_per_rollout",
        )
    if not needs_reference(config):
        yield "kl.update_freq", "has no effect with kl.coef=0"


def find_misleading(config: PPOConfig) -> Iterator[Row]:
    """What a run of PPO warns of: it trains something else than one may think."""
    data, rollout = config.data, config.rollout
    if data.test_path and config.trainer.rollouts_from:
        yield "data.test_path", "has no effect with trainer.rollouts_from: no test is sampled"
    if data.responses_per_test_prompt > 1 and rollout.test_sampling_params.temperature == 0:
        yield (
            "data.responses_per_test_prompt",
            "gives equal answers with rollout.test_sampling_params.temperature=0: set one, e.g. 1",
        )
    params = rollout.train_sampling_params
    if choose_engine(rollout.engine)[0] == "sglang" and (params.top_p < 1 or params.top_k != -1):
        yield (
            "rollout.engine",
            "does not tell which tokens top_p and top_k leave, so rl2 trains as if the whole "
            "vocabulary had been sampled",
        )
    if config.actor.loss == "reinforce" and config.actor.updates_per_step > 1:
        yield (
            "actor.loss",
            "has no ratio: after the first update of a rollout its answers are those of an older "
            "policy, and nothing corrects for it",
        )
    if (
        config.kl.type == "loss"
        and config.kl.loss_estimator == "k1"
        and config.actor.updates_per_step == 1
    ):
        yield ("kl.loss_estimator", "has no gradient on average in a loss: k2 has that of the KL")


def find_unclipped(config: PPOConfig) -> Iterator[Row]:
    """Clips that clip nothing. Who has set one is warned."""
    for name in ("actor.clip", "actor.clip_high", "actor.dual_clip"):
        if config.actor.loss == "ppo" and is_on_policy(config):
            yield (name, "has no effect with one optimizer step per rollout, where the ratio is 1")


def is_on_policy(config: PPOConfig) -> bool:
    """Whether the only update of a rollout trains the policy that has sampled it."""
    return config.actor.updates_per_step == 1 and not old_policy_is_sampler(config)


def is_folder(path: str) -> bool:
    return Path(path).is_dir()
