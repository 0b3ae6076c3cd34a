"""What a config means: which models, losses and rows its run has."""

from enum import Enum, auto

from rl2.algorithms.find import (
    ESTIMATOR_CHOICES,
    POLICY_LOSS_CHOICES,
    PREFERENCE_LOSS_CHOICES,
)
from rl2.attention.pages import MIN_ROWS
from rl2.config.engines import choose_engine, has_gpu
from rl2.config.schema import Config, DPOConfig, PPOConfig, RMConfig, worker_names
from rl2.parallel.device import rounds_by_shape

# The best rate of adapters is about ten times that of all weights: "LoRA without regret" (Schulman
# 2025), and docs/proofs.md.
LORA_LR_FACTOR = 10
# Tokens of rollout.overlong_buffer=auto.
LONGEST_OVERLONG_BUFFER = 1024


def estimator_needs(estimator: str) -> tuple[str, ...]:
    """What the estimator needs."""
    return ESTIMATOR_CHOICES.look_up(estimator).needs


def needs_critic(estimator: str) -> bool:
    """Whether the advantage estimator needs the values that a critic gives."""
    return "values" in estimator_needs(estimator)


def corrects_mismatch(loss: str) -> bool:
    """Whether the policy loss takes its ratio to the engine's probabilities."""
    return POLICY_LOSS_CHOICES.look_up(loss).corrects_mismatch


def policy_loss_needs(loss: str) -> tuple[str, ...]:
    """What the policy loss needs."""
    return POLICY_LOSS_CHOICES.look_up(loss).needs


def has_teacher(config: PPOConfig) -> bool:
    """Whether PPO distils from a teacher."""
    return bool(config.teacher.model_name or config.teacher.base_url)


def loads_teacher(config: PPOConfig) -> bool:
    """Whether the processes of the run hold a model that is the teacher."""
    return bool(config.teacher.model_name) and not config.teacher.base_url


def has_full_kl(config: PPOConfig) -> bool:
    """Whether the KL divergence from the teacher is a term of PPO's loss, over all tokens."""
    return has_teacher(config) and config.teacher.kl == "full"


def learns_full_kl_only(config: PPOConfig) -> bool:
    """Whether the KL divergence from the teacher is all that PPO learns: advantages are 0."""
    return has_full_kl(config) and config.adv.estimator == "distillation"


def count_samplers(config: Config) -> int:
    """The processes of the job that sample and do not train: rollout.num_processes of PPO.

    Where nothing is trained, or nothing sampled, no processes are set apart.
    """
    if not isinstance(config, PPOConfig):
        return 0
    if config.trainer.eval_only or config.trainer.rollouts_from:
        return 0
    return config.rollout.num_processes


def old_policy_is_sampler(config: PPOConfig) -> bool:
    """Whether the loss has its ratio to an earlier policy, which has sampled the rollout.

    It is that of another run, or the actor before the update that ran meanwhile. With
    actor.correction the ratio is to the actor itself, and the correction is for the rest.
    """
    is_ahead = count_samplers(config) > 0 and config.actor.correction == "none"
    return bool(config.trainer.rollouts_from) or is_ahead


def needs_reference(config: Config) -> bool:
    """Whether the loss, or PPO's KL term, needs the log-probabilities of a reference model."""
    if isinstance(config, PPOConfig):
        return bool(config.kl.coef) or "ref_logps" in policy_loss_needs(config.actor.loss)
    if isinstance(config, DPOConfig):
        return bool(PREFERENCE_LOSS_CHOICES.look_up(config.dpo.loss).needs)
    return False


def compares_pairs(config: Config) -> bool:
    """Whether the loss compares the replies of a pair: in RM, and in DPO unless it is as KTO."""
    if not isinstance(config, DPOConfig):
        return isinstance(config, RMConfig)
    return PREFERENCE_LOSS_CHOICES.look_up(config.dpo.loss).in_pairs


def longest_row(config: Config) -> int:
    """Tokens of the longest sequence that the trainer may run."""
    length: int = config.data.max_length
    if isinstance(config, PPOConfig):
        length += config.rollout.max_turns * config.rollout.train_sampling_params.max_new_tokens
    return length


def needs_reference_point(loss: str) -> bool:
    """Whether the preference loss compares with an estimate of KL(policy || reference)."""
    return "reference_point" in PREFERENCE_LOSS_CHOICES.look_up(loss).needs


def adapter_obstacle(config: PPOConfig) -> str | None:
    """Why the engine of this config needs merged weights, in words; None if it does not."""
    if config.actor.quantize_base:
        return "the engine has read the files of the base, and the trainer's base is in 4 bits"
    engine = choose_engine(config.rollout.engine)[0]
    if engine != "local":
        return f"{engine} is sent whole weights only; the embedded engine applies adapters"
    if has_gpu() and not count_samplers(config):
        return (
            "the embedded engine gives its weights' memory of a GPU to the trainer in every step, "
            "and is sent all of them again; it keeps them with rollout.num_processes"
        )
    return None


def sends_adapters(config: PPOConfig) -> bool:
    """Whether the engine applies LoRA's adapters, so that they alone are sent after an update."""
    return bool(config.actor.lora_rank) and adapter_obstacle(config) is None


class Exactness(Enum):
    """Whether a model computes as the embedded engine does, and what a difference means."""

    OFF = auto()
    ASSUMED = auto()
    """nothing is compared, since the model's weights are not the engine's"""
    TRIED = auto()
    """the first difference is a warning"""
    DEMANDED = auto()
    """a difference is an error"""

    @property
    def is_on(self) -> bool:
        return self is not Exactness.OFF


def exact_obstacles(config: PPOConfig) -> list[str]:
    """With what engine and trainer cannot have equal bits, and what to choose instead."""
    actor, rollout, trainer = config.actor, config.rollout, config.trainer
    obstacles = (
        (has_gpu(), "a GPU", "CUDA_VISIBLE_DEVICES= hides it"),
        (
            choose_engine(rollout.engine)[0] not in ("local", "server"),
            f"rollout.engine={rollout.engine}",
            "set rollout.engine=local",
        ),
        (
            rollout.max_running is not None and rollout.max_running < MIN_ROWS,
            f"rollout.max_running={rollout.max_running}",
            f"set at least {MIN_ROWS}: kernels sum fewer rows in another order",
        ),
        (rollout.partial, "rollout.partial=true", "older weights sample a part of its tokens"),
        (
            trainer.deterministic is False,
            "trainer.deterministic=false",
            "leave it out: the engine's calls have a constant shape then",
        ),
        (actor.tp_size > 1, f"actor.tp_size={actor.tp_size}", "set 1"),
        (actor.sp_size > 1, f"actor.sp_size={actor.sp_size}", "set 1"),
        (
            actor.quantize_base is not None,
            f"actor.quantize_base={actor.quantize_base}",
            "the engine multiplies with merged weights",
        ),
        (
            actor.lora_rank == 1 and actor.dtype != "bfloat16",
            f"actor.lora_rank=1 and actor.dtype={actor.dtype}",
            "set a rank of at least 2: float32 kernels of one column sum rows in other orders",
        ),
        (
            actor.lora_rank > 0 and rollout.engine == "server",
            f"actor.lora_rank={actor.lora_rank} and rollout.engine=server",
            "servers multiply with merged weights; set rollout.engine=local",
        ),
        (actor.compile, "actor.compile=true", "compiled kernels round in other places"),
        (
            rounds_by_shape(actor.dtype),
            "bfloat16 on a CPU with AMX",
            "set actor.dtype=float32, since the sums of AMX depend on the shape of a product",
        ),
    )
    return [f"{setting}: {advice}" for is_there, setting, advice in obstacles if is_there]


def choose_exactness(config: PPOConfig) -> Exactness:
    """Returns what PPO's rollout.exact means for its actor, teacher and engine."""
    if config.rollout.exact:
        return Exactness.DEMANDED
    is_unknown = config.rollout.engine == "server"  # the servers say it when they are asked
    if config.rollout.exact is not None or is_unknown or exact_obstacles(config):
        return Exactness.OFF
    has_other_weights = config.trainer.rollouts_from or count_samplers(config)
    return Exactness.ASSUMED if has_other_weights else Exactness.TRIED


def derive_keys(config: Config, set_keys: set[str]) -> None:
    """Sets what follows from other keys unless it is set itself.

    lr is higher with adapters, adv.norm_var follows the estimator, actor.correction the engine,
    rollout.overlong_buffer max_new_tokens, and update_per_rollout data.batch_size.
    """
    for name in worker_names(config):
        worker = getattr(config, name)
        if worker.lora_rank and f"{name}.lr" not in set_keys:
            worker.lr = round(LORA_LR_FACTOR * worker.lr, 12)
    if isinstance(config, PPOConfig):
        # Every common PPO whitens the advantages of GAE; with groups it is a choice (GRPO or not).
        is_read = "norm_var" in ESTIMATOR_CHOICES.look_up(config.adv.estimator).settings
        if is_read and config.adv.norm_var is None:
            config.adv.norm_var = config.adv.estimator == "gae"
        if config.actor.correction is None:
            config.actor.correction = default_correction(config)
        if config.rollout.overlong_buffer == "auto":
            quarter = config.rollout.train_sampling_params.max_new_tokens // 4
            config.rollout.overlong_buffer = min(LONGEST_OVERLONG_BUFFER, max(quarter, 1))
        if num_updates := updates_of_batch_size(config):
            for name in worker_names(config):
                if f"{name}.update_per_rollout" not in set_keys:
                    getattr(config, name).update_per_rollout = num_updates


def updates_of_batch_size(config: PPOConfig) -> int:
    """Mini-batches of data.batch_size trajectories in a step; 0 if it is not set or not right."""
    num_trajectories, size = config.data.trajectories_per_rollout, config.data.batch_size or 0
    return num_trajectories // size if size > 0 and num_trajectories % size == 0 else 0


def default_correction(config: PPOConfig) -> str:
    """actor.correction where it is not set: it is on where the engine's probabilities differ.

    SGLang and vLLM have kernels of their own. A mask of whole sequences, as in TRL, leaves the
    gradient of the others unbiased. Partial rollouts continue under newer weights, where the
    product over a long answer is far from 1; it would mask just the answers that they are for, so
    each token is weighted instead. The embedded engine runs the trainer's own model.
    """
    if config.trainer.rollouts_from or corrects_mismatch(config.actor.loss):
        return "none"
    if config.rollout.partial:
        return "token_tis"
    is_same = config.rollout.exact or choose_engine(config.rollout.engine)[0] == "local"
    return "none" if is_same else "sequence_mask"
