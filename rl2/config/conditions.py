"""What a config means: which models, losses and rows its run has.

The sections of a config say which trainer it is: `adv` is PPO's, `dpo` and `rm` are those of DPO
and of reward models.
"""

from typing import Any


def _declared(key: str, name: str) -> Any:
    """The declaration of the function that a key names; None if there is none.

    The check of choices reports it then.
    """
    from rl2.algorithms.find import CHOICES  # imports torch; --help does not come here

    return CHOICES[key].look_up(name)


def estimator_needs(estimator: str) -> tuple[str, ...]:
    """What the estimator needs; () if there is no such one."""
    return getattr(_declared("adv.estimator", estimator), "needs", ())


def needs_critic(estimator: str) -> bool:
    """Whether the advantage estimator needs the values that a critic gives."""
    return "values" in estimator_needs(estimator)


def corrects_mismatch(loss: str) -> bool:
    """Whether the policy loss takes its ratio to the engine's probabilities."""
    return getattr(_declared("actor.loss", loss), "corrects_mismatch", False)


def policy_loss_needs(loss: str) -> tuple[str, ...]:
    """What the policy loss needs; () if there is no such one."""
    return getattr(_declared("actor.loss", loss), "needs", ())


def has_teacher(config: Any) -> bool:
    """Whether PPO distils from a teacher, which may be the policy with a hint."""
    teacher = config.teacher
    return bool(teacher.model_name or teacher.base_url or teacher.hint)


def loads_teacher(config: Any) -> bool:
    """Whether the processes of the run hold a model that is the teacher."""
    return bool(config.teacher.model_name) and not config.teacher.base_url


def has_full_kl(config: Any) -> bool:
    """Whether the KL divergence from the teacher is a term of PPO's loss, over all tokens."""
    return has_teacher(config) and bool(config.teacher.kl == "full")


def learns_full_kl_only(config: Any) -> bool:
    """Whether the KL divergence from the teacher is all that PPO learns: advantages are 0."""
    return has_full_kl(config) and bool(config.adv.estimator == "distillation")


def weights_kl(kl: Any, updates_per_step: int) -> bool:
    """Whether a KL term in the loss is weighted by the ratio to the policy that sampled."""
    if kl.importance_weights is not None:
        return bool(kl.importance_weights)
    return updates_per_step > 1  # the later ones train another policy than the one that sampled


def trains_new_rollouts(config: Any) -> bool:
    """Whether a run of PPO samples the answers that it trains on."""
    return not (config.trainer.eval_only or config.trainer.rollouts_from)


def count_samplers(config: Any) -> int:
    """The processes of the job that sample and do not train: rollout.num_processes of PPO.

    Where nothing is trained, or nothing sampled, no processes are set apart.
    """
    if not has_section(config, "adv") or not trains_new_rollouts(config):
        return 0
    return int(config.rollout.num_processes)


def clips_to_sampler(config: Any) -> bool:
    """Whether the loss has its ratio to an earlier policy, which has sampled the rollout.

    It is that of another run, or the actor before the update that ran meanwhile. With
    actor.correction the ratio is to the actor itself, and the correction is for the rest.
    """
    is_ahead = count_samplers(config) > 0 and config.actor.correction == "none"
    return bool(config.trainer.rollouts_from) or is_ahead


def needs_reference(config: Any) -> bool:
    """Whether PPO's loss or its KL term needs the log-probabilities of a reference model."""
    return bool(config.kl.coef) or "ref_logps" in policy_loss_needs(config.actor.loss)


def compares_pairs(config: Any) -> bool:
    """Whether the loss compares the replies of a pair: in RM, and in DPO unless it is as KTO."""
    if not has_section(config, "dpo"):
        return has_section(config, "rm")
    from rl2.algorithms.losses import UnpairedLoss  # imports torch, as above

    return not isinstance(_declared("dpo.loss", config.dpo.loss), UnpairedLoss)


def needs_reference_point(loss: str) -> bool:
    """Whether the preference loss compares with an estimate of KL(policy || reference)."""
    return "reference_point" in getattr(_declared("dpo.loss", loss), "needs", ())


def has_section(config: Any, *names: str) -> bool:
    """Whether the config has one of these sections."""
    return any(hasattr(config, name) for name in names)
