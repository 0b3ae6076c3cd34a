"""PPO and GRPO: `torchrun --nproc_per_node=N -m rl2.trainer.ppo key=value`.

`train_step` is the whole algorithm; read it first.
"""

from rl2.config.help import answer_trainer

if __name__ == "__main__":
    answer_trainer("ppo")  # --help, before the imports below, which take seconds

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from rl2.algorithms import losses
from rl2.algorithms.advantages import AdvantageInputs, RewardPart, distillation
from rl2.algorithms.find import find_estimator, find_policy_loss
from rl2.batch import Batch, collate, drop_zero_advantages, split_minibatches
from rl2.config.conditions import (
    count_samplers,
    has_full_kl,
    has_teacher,
    learns_full_kl_only,
)
from rl2.config.schema import ActorConfig, CriticConfig, KLConfig, PPOConfig, RolloutWorkerConfig
from rl2.env.load import Functions
from rl2.model.token_model import TokenScores
from rl2.parallel.worlds import is_sampler
from rl2.recorder import is_due
from rl2.rollout.bootstrap import continue_returns
from rl2.rollout.stats import (
    add_ages,
    mask_truncated,
    reward_parts,
    summarise_step,
    take_samples,
)
from rl2.trainer.launch import launch, train_and_finish
from rl2.trainer.ppo_run import EvaluationRun, PPORun, SamplerRun, StepResult


def train(run: PPORun) -> None:
    run.begin()
    for step in run.recorder.remaining_steps():
        if run.finish_step(step, train_step(run, step)):
            break


def train_step(run: PPORun, step: int) -> StepResult:
    """Samples a rollout and trains on it: the whole algorithm.

    Every process that trains holds the same `batch`, in host memory, and runs the same lines. The
    workers and engines split the work of forward, backward and generate.
    """
    config, recorder = run.config, run.recorder
    actor, critic = config.actor, config.critic
    # Logits are divided by the temperature: the trainer scores what the engine has sampled from.
    temperature = config.rollout.train_sampling_params.temperature

    # The engine answers every prompt several times, and the environment rewards the answers.
    with recorder.phase("rollout"):
        trajectories = run.collect(step)
        batch = collate(take_samples(trajectories))
    metrics = summarise_step(trajectories, run.actor.version)
    if "ages" in find_policy_loss(actor.loss).needs:
        add_ages(batch, trajectories, run.actor.version)

    # Before any update, the frozen models, the policy and the critic score the sampled tokens.
    with recorder.phase("infer"):
        metrics |= add_scores(batch, run, temperature)
        if config.adv.bootstrap and run.critic is not None:
            continue_returns(batch, trajectories, run.critic.score, config.adv.gamma)
    # How much better each token was than expected, which the loss weights its gradient by.
    metrics |= add_advantages(batch, config, reward_parts(trajectories, batch))
    if config.rollout.mask_truncated:
        # An answer that was cut is not trained, but has counted in the baseline of its group.
        mask_truncated(batch, trajectories)

    with recorder.phase("update"):
        updates = []
        for minibatch in mini_batches(batch, actor, step):
            # Fixed before it is cut into micro-batches: no layout changes the gradient.
            minibatch.token_weights = losses.token_weights(
                minibatch.mask,
                minibatch.trajectory,
                actor.average,
                actor.average_constant,
                minibatch.group,
            )
            if can_drop_rows(config):  # their passes would add nothing to the gradient
                drop_zero_advantages(minibatch)
            result = run.actor.update(
                minibatch,
                partial(
                    actor_loss,
                    actor,
                    config.kl,
                    old_policy_is_sampler=run.sampling.old_policy_is_sampler,
                    teacher_coef=config.teacher.coef,
                ),
                temperature,
                with_entropy=needs_entropy(actor),
                skip=partial(ratio_is_too_high, actor, minibatch),
                teacher=run.full_kl_teacher,
            )
            updates.append(result.to_log(minibatch.token_weights.sum().item()))
        metrics |= average_updates("actor", updates)

        if run.critic is not None:
            updates = []
            for minibatch in mini_batches(batch, critic, step):
                # Every token weighs the same. Values have no temperature, entropy or ratio.
                minibatch.token_weights = losses.token_weights(
                    minibatch.mask, minibatch.trajectory, "token"
                )
                result = run.critic.update(minibatch, partial(critic_loss, critic))
                updates.append(result.to_log(minibatch.token_weights.sum().item()))
            metrics |= average_updates("critic", updates)

        if is_due(step, config.kl.update_freq):
            run.moving_reference().copy_weights(run.actor)

    # The evaluation of this step and the next rollout are sampled with the weights of this update.
    # With rollout.num_processes the next rollout has been sampled meanwhile, and these weights
    # sample a later one.
    run.wait_for_samplers()
    with recorder.phase("sync"):
        run.sync(step)
    return StepResult(trajectories, batch, metrics)


def add_scores(batch: Batch, run: PPORun, temperature: float) -> dict[str, float]:
    """Scores the rollout with every model that the loss or the estimator needs.

    Returns metrics.
    """
    actor = run.config.actor
    if run.reference is not None:
        batch.ref_logps = run.reference.score(batch, temperature).logps
    if run.scoring_teacher is not None:
        batch.teacher_logps = run.scoring_teacher.score(batch, temperature).logps

    # An entropy that is only logged comes from a pass before the update, so that logging it cannot
    # change what the update runs. Where old_logps are needed, the same pass gives both.
    logs_entropy = actor.log_entropy and not needs_entropy(actor)
    uses_sampler = run.sampling.old_policy_is_sampler
    needs_pass = needs_old_logps(run.config) and not uses_sampler
    scores = TokenScores()
    if needs_pass or logs_entropy:
        scores = run.actor.score(batch, temperature, with_entropy=logs_entropy)
    if uses_sampler:
        batch.old_logps = batch.engine_logps
    elif needs_pass:
        batch.old_logps = scores.logps

    if run.critic is not None:
        batch.values = run.critic.score(batch).values
    if scores.entropy is None:
        return {}
    return {"actor/entropy": mean_over_tokens(scores.entropy, batch)}


def mini_batches(batch: Batch, config: RolloutWorkerConfig, step: int) -> Iterator[Batch]:
    """Yields what the worker is trained on in this step; nothing while it is frozen.

    Each pass over the rollout cuts it differently, unless it is one mini-batch.
    """
    if step <= config.freeze_steps:
        return
    for epoch in range(config.epochs_per_rollout):
        seed = step * config.epochs_per_rollout + epoch
        yield from split_minibatches(batch, config.update_per_rollout, seed)


def ratio_is_too_high(config: ActorConfig, minibatch: Batch, metrics: dict[str, float]) -> bool:
    """Whether to skip the update: the mean ratio of its loss is above actor.skip_threshold."""
    limit = config.skip_threshold
    return limit is not None and metrics["ratio"] > limit * minibatch.token_weights.sum().item()


def needs_old_logps(config: PPOConfig) -> bool:
    """Whether the loss or the estimator needs the old policy's log-probabilities as a column.

    With one update a rollout the current policy is the old one, so the update computes them.
    """
    estimator_needs = find_estimator(config.adv.estimator).needs
    return bool(
        config.actor.updates_per_step > 1
        or config.kl.type == "reward"
        or (has_teacher(config) and not has_full_kl(config))
        or ("old_logps" in estimator_needs and not learns_full_kl_only(config))
    )


def needs_entropy(config: ActorConfig) -> bool:
    """Whether the loss has an entropy bonus."""
    return config.entropy != 0


def can_drop_rows(config: PPOConfig) -> bool:
    """Whether rows without an advantage have no gradient, in any term of `actor_loss`.

    A term that is added there and has one belongs here too, as a test in test_algorithms.py finds.
    """
    vanishes = find_policy_loss(config.actor.loss).vanishes_without_advantage
    has_other_terms = needs_entropy(config.actor) or config.kl.type == "loss" or has_full_kl(config)
    return vanishes and not has_other_terms


def add_advantages(
    batch: Batch, config: PPOConfig, parts: dict[str, RewardPart]
) -> dict[str, float]:
    """Fills batch.advantages, and batch.returns for a critic. Returns metrics."""
    if learns_full_kl_only(config):
        # The loss has the expectation of what this estimator samples, so nothing is left for it.
        batch.advantages = torch.zeros_like(batch.rewards)
        return {}
    rewards, metrics = batch.rewards, {}
    if config.kl.type == "reward":
        # Each token pays for how far it moves the policy from the reference.
        kl = losses.kl_estimate(batch.old_logps, batch.ref_logps, config.kl.reward_estimator)
        kl = kl * batch.mask
        rewards = rewards - config.kl.coef * kl
        metrics["actor/kl"] = mean_over_tokens(kl, batch)
    inputs = AdvantageInputs(
        rewards=rewards,
        mask=batch.mask.float(),
        group=batch.group,
        trajectory=batch.trajectory,
        gamma=config.adv.gamma,
        lamda=config.adv.lamda,
        norm_var=bool(config.adv.norm_var),
        reward_parts=parts,
        values=batch.values,
        old_logps=batch.old_logps,
        teacher_logps=batch.teacher_logps,
    )
    estimator = find_estimator(config.adv.estimator)
    estimated = estimator.compute(inputs)
    if isinstance(estimated, tuple):  # with a critic, which learns the returns
        batch.advantages, batch.returns = estimated
    else:
        batch.advantages = estimated
    if batch.teacher_logps is not None:
        gains = distillation(inputs)
        metrics["actor/teacher_kl"] = -mean_over_tokens(gains, batch)
        if "teacher_logps" not in estimator.needs:  # else the advantages are made of them already
            batch.advantages = batch.advantages + config.teacher.coef * gains
    return metrics


def mean_over_tokens(values: Tensor, batch: Batch) -> float:
    """The mean over the trained tokens of values [B, T], which are 0 elsewhere."""
    return (values.sum() / batch.mask.sum().clamp(min=1)).item()


def actor_loss(
    config: ActorConfig,
    kl: KLConfig,
    batch: Batch,
    scores: TokenScores,
    old_policy_is_sampler: bool = False,
    teacher_coef: float = 1.0,
) -> losses.LossAndMetrics:
    """The actor's loss on whole sequences [b, T]: policy gradient, KL terms and entropy bonus.

    `old_policy_is_sampler` as of the run's `Sampling`: batch.old_logps are the engine's then.
    """
    logps, weights = scores.logps, batch.token_weights
    # With one update a rollout the current policy is the old one.
    old_logps = logps.detach() if batch.old_logps is None else batch.old_logps
    # The engine computes other probabilities than the trainer, so it samples a little off-policy.
    correction = None
    if config.correction not in (None, "none"):
        correction = losses.importance_weights(
            old_logps, batch.engine_logps, batch.mask, config.correction, config.correction_cap
        )
    inputs = losses.PolicyInputs(
        logps=logps,
        old_logps=old_logps,
        engine_logps=batch.engine_logps,
        advantages=batch.advantages,
        mask=batch.mask.float(),
        group=batch.group,
        trajectory=batch.trajectory,
        clip=config.clip,
        clip_high=config.clip_high or config.clip,
        dual_clip=config.dual_clip,
        ref_logps=batch.ref_logps,
        ages=batch.ages,
    )
    token_losses = find_policy_loss(config.loss).compute
    loss, metrics = losses.policy_loss(
        token_losses, inputs, weights, correction, config.off_policy_mask
    )
    if not old_policy_is_sampler:
        mismatch = losses.rollout_mismatch(old_logps, batch.engine_logps, weights)
        metrics |= {f"mismatch_{name}": value for name, value in mismatch.items()}
    if kl.type == "loss":
        estimate = losses.kl_estimate(logps, batch.ref_logps, kl.loss_estimator)
        if config.updates_per_step > 1 or old_policy_is_sampler:
            # The tokens are of another policy than the one that is trained.
            estimate = losses.weighted_kl(estimate, inputs.log_ratio, kl.loss_estimator)
        loss = loss + kl.coef * (estimate * weights).sum()
        # Of the policy that the tokens are of, as with kl.type=reward: the estimate needs no ratio.
        logged = losses.kl_estimate(old_logps, batch.ref_logps, kl.reward_estimator)
        metrics["kl"] = (logged * weights).sum()
    if scores.teacher_kl is not None:
        teacher_kl = (scores.teacher_kl * weights).sum()
        loss = loss + teacher_coef * teacher_kl
        metrics["teacher_kl"] = teacher_kl.detach()
    if scores.entropy is not None:  # a bonus: policies that explore have a smaller loss
        entropy = (scores.entropy * weights).sum()
        loss = loss - config.entropy * entropy
        metrics["entropy"] = entropy.detach()
    return loss, metrics


def critic_loss(config: CriticConfig, batch: Batch, scores: TokenScores) -> losses.LossAndMetrics:
    """The critic's clipped squared error on whole sequences [b, T]."""
    return losses.value_loss(
        scores.values, batch.values, batch.returns, batch.token_weights, config.clip
    )


def average_updates(worker_name: str, updates: list[dict[str, float]]) -> dict[str, float]:
    """Returns the mean of each metric over the updates of a step, as worker_name/metric.

    A frozen worker has none. The moments of the ratio trainer / engine r become the effective
    sample size (mean r)^2 / mean r^2 (Kong, 1992), a fraction of the tokens.
    """
    if not updates:
        return {}
    means = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        values = [update[name] for update in updates if name in update]
        means[name] = sum(values) / len(values)
    squared = means.pop("mismatch_ratio_squared", 0.0)
    if squared:
        means["effective_sample_size"] = means["mismatch_ratio"] ** 2 / squared
    return {f"{worker_name}/{name}": mean for name, mean in means.items()}


def start(config: PPOConfig, functions: Functions | None = None) -> None:
    """Trains or evaluates. `functions` are the environment, in the place of rollout.env_path."""
    if config.trainer.eval_only:
        EvaluationRun(config, functions).run()
    elif is_sampler(count_samplers(config)):
        SamplerRun(config, functions).run()
    else:
        train_and_finish(PPORun(config, functions=functions), train)


def main() -> None:
    launch(PPOConfig, start)


if __name__ == "__main__":
    main()
