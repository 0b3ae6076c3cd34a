"""Keys that do not fit together: tables with a row each of key, condition and text.

A row is a problem if its condition is met. Its text follows KEY=VALUE and says what to do.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl2.config.adapters import adapter_obstacle, sends_adapters
from rl2.config.conditions import (
    clips_to_sampler,
    compares_pairs,
    corrects_mismatch,
    count_samplers,
    estimator_needs,
    has_full_kl,
    has_teacher,
    needs_critic,
    needs_reference,
    needs_reference_point,
    policy_loss_needs,
    weights_kl,
)
from rl2.config.engines import (
    choose_engine,
    has_gpu,
    installed_version,
    is_installed,
    release_numbers,
)
from rl2.config.schema import DPOConfig, PPOConfig, WorkerConfig

Row = tuple[str, Any, str]

INTERVAL_CORRECTIONS = ("token_mask", "geometric_mask")  # they keep ratios in [1 / cap, cap]
TORCH_OF_4_BITS = (2, 13)  # FSDP2 of torch 2.11 fails at parameters of bytes; 2.12 is not tried


def find_broken(config: Any) -> Iterator[Row]:
    """What is refused."""
    data, trainer = config.data, config.trainer
    yield (
        "data.test_ratio",
        data.test_ratio and data.test_path,
        "excludes data.test_path, which has the test rows already: leave one of the two out",
    )
    resume = trainer.resume
    yield (
        "trainer.resume",
        resume not in ("auto", "off", "force") and not is_folder(resume.removeprefix("force:")),
        "is no folder: choose auto, off, force or the folder of a checkpoint",
    )
    for service in ("tensorboard", "trackio"):
        yield (
            "trainer.loggers",
            service in trainer.loggers and not is_installed(service),
            f"needs {service}, which is not installed: pip install {service}",
        )
    best = trainer.save_best is not None
    is_untested = trainer.eval_only or bool(getattr(trainer, "rollouts_from", None))
    yield (
        "trainer.patience",
        trainer.patience is not None and not best,
        "needs trainer.save_best, the score that it watches, e.g. trainer.save_best=auto",
    )
    yield (
        "trainer.save_best",
        best and is_untested,
        "excludes trainer.eval_only and trainer.rollouts_from, which compare no evaluations",
    )
    yield (
        "trainer.save_best",
        best and not is_untested and not (data.has_test_rows and trainer.test_freq),
        "needs test rows (data.test_path or data.test_ratio) and trainer.test_freq, the steps "
        "between evaluations",
    )
    if isinstance(config, DPOConfig):
        yield (
            "data.batch_size",
            config.data.batch_size == 1 and needs_reference_point(config.dpo.loss),
            f"is too small for dpo.loss={config.dpo.loss}, which estimates a KL from prompts with "
            "replies to other prompts of the step: take 2 rows or more",
        )
    if isinstance(config, PPOConfig):
        yield from find_broken_run(config)
        yield from find_broken_teacher(config)
        yield from find_broken_loss(config)
        yield from find_broken_rollout(config)


def find_broken_worker(name: str, worker: WorkerConfig) -> Iterator[Row]:
    """What is refused in the section of a trained model."""
    yield (
        f"{name}.betas",
        len(worker.betas) != 2,
        "has to be two rates, of the gradient's mean and of its square's, as [0.9,0.999]",
    )
    yield (
        f"{name}.optimizer_dir",
        worker.optimizer_dir and not is_folder(worker.optimizer_dir),
        "is no folder",
    )
    yield (
        f"{name}.lora_rank",
        worker.lora_rank > 0 and not is_installed("peft"),
        "needs peft, which is not installed: pip install peft",
    )
    key = f"{name}.quantize_base"
    if worker.quantize_base:
        torch = installed_version("torch") or "0"
        yield (
            key,
            not is_installed("bitsandbytes"),
            "needs bitsandbytes, which is not installed: pip install 'rl2[bitsandbytes]'",
        )
        yield (
            key,
            release_numbers(torch) < TORCH_OF_4_BITS,
            f"needs torch 2.13 or later, and this is {torch}",
        )
        yield (
            key,
            worker.tp_size > 1,
            f"excludes {name}.tp_size={worker.tp_size}, which would cut rows inside their 4-bit "
            "blocks: set 1, since FSDP divides the memory of the base too",
        )


def find_broken_run(config: PPOConfig) -> Iterator[Row]:
    """What is refused in the kind of PPO's run, and in the sizes of its steps."""
    data, trainer = config.data, config.trainer
    estimator, saved = config.adv.estimator, config.trainer.rollouts_from
    yield (
        "trainer.eval_only",
        trainer.eval_only and not data.has_test_rows,
        "needs data.test_path or data.test_ratio",
    )
    yield ("trainer.rollouts_from", saved and not is_folder(saved), "is no folder")
    yield (
        "trainer.rollouts_from",
        saved and "ages" in policy_loss_needs(config.actor.loss),
        f"excludes actor.loss={config.actor.loss}, which needs `ages`, the updates since a token "
        "was sampled: the weights of another run have no such age",
    )
    yield (
        "trainer.deterministic",
        trainer.deterministic and config.rollout.partial,
        "excludes rollout.partial, which depends on time: leave one of the two out",
    )
    yield (
        "data.responses_per_prompt",
        data.responses_per_prompt == 1 and "group" in estimator_needs(estimator),
        f"leaves adv.estimator={estimator} no group to compare with: every advantage would be 0; "
        "sample 2 or more, or use adv.estimator=reinforce_plus_plus or gae",
    )
    num_trajectories = data.prompts_per_rollout * data.responses_per_prompt
    for name, worker in (("actor", config.actor), ("critic", config.critic)):
        yield (
            f"{name}.update_per_rollout",
            0 < num_trajectories < worker.update_per_rollout,
            f"is more than the {num_trajectories} trajectories of a step: lower it",
        )


def find_broken_teacher(config: PPOConfig) -> Iterator[Row]:
    """What is refused in distillation."""
    estimator, teacher = config.adv.estimator, config.teacher
    needs_teacher = "teacher_logps" in estimator_needs(estimator)
    yield (
        "adv.estimator",
        needs_teacher and not has_teacher(config),
        "needs a teacher: teacher.model_name, teacher.base_url or teacher.hint",
    )
    yield (
        "teacher.base_url",
        teacher.base_url and not teacher.base_url.startswith(("http://", "https://")),
        "must begin with http:// or https://",
    )
    params = config.rollout.train_sampling_params
    yield (
        "teacher.base_url",
        teacher.base_url and (params.temperature, params.top_p, params.top_k) != (1, 1, -1),
        "needs temperature=1, top_p=1 and top_k=-1 in rollout.train_sampling_params: a server "
        "scores tokens at temperature 1 among the whole vocabulary",
    )
    yield (
        "teacher.hint",
        teacher.hint and config.rollout.max_turns > 1,
        "needs rollout.max_turns=1: only the first prompt of a conversation has the hint",
    )
    yield (
        "teacher.hint",
        teacher.hint and config.trainer.rollouts_from,
        "excludes trainer.rollouts_from: saved rollouts have no prompts of a teacher",
    )
    if has_full_kl(config):
        yield (
            "teacher.kl",
            teacher.base_url,
            "excludes teacher.base_url: a server scores the sampled tokens only",
        )
        yield (
            "teacher.kl",
            teacher.hint,
            "excludes teacher.hint, with which the teacher reads other prompts than the policy",
        )
        yield (
            "teacher.kl",
            needs_teacher and estimator != "distillation",
            f"excludes adv.estimator={estimator}, which reads the teacher's log-probabilities of "
            "the sampled tokens",
        )


def find_broken_loss(config: PPOConfig) -> Iterator[Row]:
    """What is refused in PPO's loss and its KL term."""
    actor, kl = config.actor, config.kl
    needs = estimator_needs(config.adv.estimator)
    yield (
        "kl.coef",
        kl.coef > 0 and kl.type is None,
        "needs kl.type: loss adds the KL to the loss, reward subtracts it from the reward",
    )
    yield (
        "kl.type",
        kl.coef == 0 and kl.type is not None,
        "needs kl.coef, the weight of the KL, e.g. kl.coef=0.001",
    )
    yield (
        "kl.type",
        kl.type == "reward" and needs and "rewards" not in needs,
        f"has no effect with adv.estimator={config.adv.estimator}, which takes no rewards: choose "
        "kl.type=loss",
    )
    yield (
        "kl.update_freq",
        kl.update_freq and actor.lora_rank > 0,
        f"excludes actor.lora_rank={actor.lora_rank}, with which the reference is the start model, "
        "and shares its weights with the actor",
    )
    yield (
        "actor.correction",
        actor.correction != "none" and corrects_mismatch(actor.loss),
        f"has no place with actor.loss={actor.loss}, whose ratio is that to the engine's "
        "probabilities already: leave it out",
    )
    yield (
        "actor.correction_cap",
        actor.correction in INTERVAL_CORRECTIONS and actor.correction_cap == 1,
        f"leaves nothing to train: actor.correction={actor.correction} masks all ratios outside "
        "[1 / cap, cap]; the default is 2",
    )
    longest = config.rollout.train_sampling_params.max_new_tokens
    yield (
        "actor.average",
        actor.average == "constant" and actor.average_constant is None,
        "needs actor.average_constant, the length that it divides by: Dr. GRPO takes that of the "
        f"longest answer, here actor.average_constant={longest}",
    )


def find_broken_rollout(config: PPOConfig) -> Iterator[Row]:
    """What is refused in how PPO samples."""
    actor, rollout = config.actor, config.rollout
    num_samplers, is_evaluation = count_samplers(config), config.trainer.eval_only
    for name, bounds in (
        ("rollout.filter", rollout.filter),
        ("data.curriculum", config.data.curriculum),
    ):
        yield (
            name,
            bounds and (len(bounds) != 2 or bounds[0] >= bounds[1]),
            "has to be a low and a high bound of the mean reward, as [0,1]",
        )
    longest = rollout.train_sampling_params.max_new_tokens
    yield (
        "rollout.overlong_buffer",
        rollout.overlong_buffer and rollout.overlong_buffer > longest,
        f"is more than rollout.train_sampling_params.max_new_tokens={longest}: lower it, e.g. to a "
        "fifth",
    )
    yield (
        "rollout.num_processes",
        num_samplers >= int(os.environ.get("WORLD_SIZE", "1")),
        "leaves no process of the job that trains: start it with torchrun --nproc_per_node="
        f"{num_samplers + 1} or more, or set 0",
    )
    yield (
        "rollout.partial",
        rollout.partial and num_samplers,
        "excludes rollout.num_processes, with which no step waits for its own rollout",
    )
    engine = choose_engine(rollout.engine)[0]
    tells_experts = engine == "local" or (engine == "sglang" and has_gpu())
    yield (
        "actor.routing_replay",
        actor.routing_replay and not tells_experts,
        f"needs to know which experts the engine chose, and {engine} does not tell: leave it out, "
        "or set rollout.engine=local",
    )
    obstacle = adapter_obstacle(config) if actor.lora_rank else None
    yield (
        "rollout.lora",
        rollout.lora == "adapter" and obstacle,
        f"does not work: {obstacle}; set merged",
    )
    yield (
        "actor.quantize_base",
        is_evaluation and actor.lora_rank and actor.quantize_base,
        "excludes trainer.eval_only: the engine reads the files of actor.model_name, which are not "
        "in 4 bits; give a model that a run has exported",
    )
    yield (
        "actor.adapter",
        is_evaluation and actor.adapter and not actor.quantize_base and not sends_adapters(config),
        "excludes trainer.eval_only: the engine reads the files of actor.model_name, without these "
        "adapters; give the merged model, or set rollout.lora=adapter",
    )
    yield (
        "rollout.exact",
        rollout.exact and config.trainer.rollouts_from,
        "does not hold with trainer.rollouts_from, since other weights may have sampled",
    )
    yield (
        "rollout.exact",
        rollout.exact and num_samplers,
        "does not hold with rollout.num_processes, since earlier weights have sampled",
    )


def find_unused(config: Any) -> Iterator[Row]:
    """Keys and sections that do nothing, though they would say something about the algorithm.

    They are refused if the user has set them to another value than they have anyway.
    """
    yield (
        "data.weights",
        not isinstance(config.data.path, dict),
        "has no effect with one source of rows: name several with data.path.NAME=PATH",
    )
    for name in ("actor", "critic"):
        for setting in ("lora_alpha", "lora_targets"):
            yield (
                f"{name}.{setting}",
                hasattr(config, name) and getattr(config, name).adapter,
                f"has no effect with {name}.adapter, whose own value counts",
            )
    if isinstance(config, DPOConfig):
        yield (
            "dpo.sft_coef",
            not compares_pairs(config),
            f"has no effect with dpo.loss={config.dpo.loss}, which takes replies one by one",
        )
    if isinstance(config, PPOConfig):
        yield from find_unused_of_ppo(config)


def find_unused_of_ppo(config: PPOConfig) -> Iterator[Row]:
    """The same in PPO."""
    actor, estimator = config.actor, config.adv.estimator
    yield (
        "critic",
        not needs_critic(estimator),
        f"has no effect with adv.estimator={estimator}, which needs no critic: set "
        "adv.estimator=gae",
    )
    yield (
        "teacher.coef",
        "teacher_logps" in estimator_needs(estimator),
        f"has no effect with adv.estimator={estimator}, where it is the whole advantage",
    )
    yield (
        "actor.correction_cap",
        actor.correction == "none",
        "has no effect with actor.correction=none",
    )
    yield (
        "actor.skip_threshold",
        is_on_policy(config),
        "has no effect with one optimizer step per rollout, where the ratio is 1: raise "
        "actor.update_per_rollout or actor.epochs_per_rollout",
    )
    yield ("kl.update_freq", not needs_reference(config), "has no effect with kl.coef=0")


def find_misleading(config: PPOConfig) -> Iterator[Row]:
    """What a run of PPO warns of: it trains something else than one may think."""
    data, rollout = config.data, config.rollout
    yield (
        "data.test_path",
        data.test_path and config.trainer.rollouts_from,
        "has no effect with trainer.rollouts_from: nothing is sampled, not even a test",
    )
    yield (
        "data.responses_per_test_prompt",
        data.responses_per_test_prompt > 1 and rollout.test_sampling_params.temperature == 0,
        "gives equal answers with rollout.test_sampling_params.temperature=0: set a temperature, "
        "e.g. 1 as in training",
    )
    params = rollout.train_sampling_params
    yield (
        "rollout.engine",
        choose_engine(rollout.engine)[0] == "sglang" and (params.top_p < 1 or params.top_k != -1),
        "does not tell which tokens top_p and top_k leave, so rl2 trains as if the whole "
        "vocabulary had been sampled",
    )
    yield (
        "actor.loss",
        config.actor.loss == "reinforce" and config.actor.updates_per_step > 1,
        "has no ratio: after the first update of a rollout its answers are those of an older "
        "policy, and nothing corrects for it",
    )
    yield (
        "kl.loss_estimator",
        config.kl.type == "loss"
        and config.kl.loss_estimator == "k1"
        and not weights_kl(config.kl, config.actor.updates_per_step),
        "has a gradient in a loss that is 0 on average: k2 has that of the KL",
    )


def find_unclipped(config: PPOConfig) -> Iterator[Row]:
    """Clips that clip nothing. Who has set one is warned."""
    for name in ("actor.clip", "actor.clip_high", "actor.dual_clip"):
        yield (
            name,
            config.actor.loss == "ppo" and is_on_policy(config),
            "has no effect with one optimizer step per rollout: the ratio is exactly 1 and never "
            "clipped",
        )


def is_on_policy(config: PPOConfig) -> bool:
    """Whether the only update of a rollout trains the policy that has sampled it."""
    return config.actor.updates_per_step == 1 and not clips_to_sampler(config)


def is_folder(path: str) -> bool:
    return Path(path).is_dir()
