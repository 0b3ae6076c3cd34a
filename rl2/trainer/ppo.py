"""PPO and GRPO: `torchrun --nproc_per_node=N -m rl2.trainer.ppo key=value`.

`train` is the whole algorithm; read it first.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from rl2.algorithms import losses
from rl2.algorithms.advantages import ADVANTAGE_ESTIMATORS, AdvantageInputs, distillation
from rl2.batch import Batch, collate, drop_zero_advantages, split_minibatches
from rl2.config.by_name import argument_names, call_by_name, choose_function, find_function
from rl2.config.conditions import estimator_inputs, find_policy_loss
from rl2.config.schema import ActorConfig, CriticConfig, KLConfig, PPOConfig, RolloutWorkerConfig
from rl2.model.token_model import TokenScores
from rl2.rollout.stats import (
    mask_truncated,
    summarise,
    summarise_groups,
    to_records,
    training_samples,
)
from rl2.trainer.launch import launch, train_and_finish
from rl2.trainer.ppo_inputs import find_ppo_problems
from rl2.trainer.ppo_run import EvaluationRun, PPORun
from rl2.trainer.recorder import is_due
from rl2.worker import Loss


def train(run: PPORun) -> None:
    """The whole algorithm.

    Every process holds the same `batch` and runs the same lines. The workers and engines split the
    work of forward, backward and generate.
    """
    config, recorder = run.config, run.recorder
    actor, critic = config.actor, config.critic
    temperature = config.rollout.train_sampling_params.temperature  # logits are divided by it
    run.begin()
    for step in recorder.remaining_steps():
        with recorder.phase("rollout"):
            trajectories = run.collect(step)
            batch = collate(training_samples(trajectories))
        metrics = summarise(trajectories, run.actor.version) | summarise_groups(trajectories)

        with recorder.phase("infer"):
            metrics |= add_scores(batch, run, temperature)
        metrics |= add_advantages(batch, config)
        mask_truncated(batch, trajectories, config.rollout.mask_truncated)

        with recorder.phase("update"):
            updates = []
            for part in mini_batches(batch, actor, step):
                part.token_weights = losses.token_weights(
                    part.mask, part.trajectory, actor.average, actor.average_constant, part.group
                )
                loss_fn = partial(actor_loss, actor, config.kl)
                if can_drop_rows(config):
                    check_no_gradient(loss_fn, part)
                    drop_zero_advantages(part)
                result = run.actor.update(
                    part,
                    loss_fn,
                    temperature,
                    with_entropy=needs_entropy(actor),
                    max_ratio=actor.skip_threshold,
                )
                updates.append(result.to_log(part.token_weights.sum().item()))
            metrics |= average_updates("actor", updates)

            if run.critic is not None:
                updates = []
                for part in mini_batches(batch, critic, step):
                    # Every token weighs the same. Values have no temperature, entropy or ratio.
                    part.token_weights = losses.token_weights(part.mask, part.trajectory, "token")
                    result = run.critic.update(part, partial(critic_loss, critic))
                    updates.append(result.to_log(part.token_weights.sum().item()))
                metrics |= average_updates("critic", updates)

            if is_due(step, config.kl.update_freq):
                run.moving_reference().copy_weights(run.actor)

        with recorder.phase("sync"):
            run.sync()

        records = to_records(trajectories, batch, run.tokens)
        is_last = recorder.finish_step(step, metrics, records, run.tokens)
        # The next rollout may need the memory. Only the first process has read the records; on the
        # others they still refer to the batch.
        part = batch = records = None
        if is_last:
            break


def add_scores(batch: Batch, run: PPORun, temperature: float) -> dict[str, float]:
    """Scores the rollout with every model that the loss or the estimator needs.

    Returns metrics. An entropy that is only logged is of a pass over all answers before the update,
    so that it cannot change what the update runs.
    """
    actor, scores = run.config.actor, None
    logs_entropy = actor.log_entropy and not needs_entropy(actor)
    for column, worker in run.frozen.items():
        setattr(batch, column, worker.infer(batch, temperature).logps)
    if run.collector.has_other_policy:
        batch.old_logps = batch.engine_logps
    elif needs_old_logps(run.config):
        scores = run.actor.infer(batch, temperature, with_entropy=logs_entropy)
        batch.old_logps = scores.logps
    if run.critic is not None:
        batch.values = run.critic.infer(batch).values
    if not logs_entropy:
        return {}
    if scores is None:
        scores = run.actor.infer(batch, temperature, with_entropy=True)
    assert scores.entropy is not None
    return {"actor/entropy": mean_over_tokens(scores.entropy, batch)}


def mini_batches(batch: Batch, config: RolloutWorkerConfig, step: int) -> Iterator[Batch]:
    """What the worker is trained on in this step; nothing while it is frozen.

    Every pass over the rollout cuts it anew.
    """
    if step > config.freeze_steps:
        for epoch in range(config.epochs_per_rollout):
            seed = step * config.epochs_per_rollout + epoch
            yield from split_minibatches(batch, config.update_per_rollout, seed)


def needs_old_logps(config: PPOConfig) -> bool:
    """Whether to score the rollout before the update.

    With one update a rollout the policy that sampled is the current one, so the update scores it.
    """
    asked = estimator_inputs(config.adv.estimator)
    if config.kl.type == "reward" or config.teacher.model_name or "old_logps" in asked:
        return True
    return config.actor.updates_per_step > 1


def needs_entropy(config: ActorConfig) -> bool:
    """Whether the loss has an entropy bonus."""
    return config.entropy != 0


def can_drop_rows(config: PPOConfig) -> bool:
    """Whether rows without an advantage have no gradient, in any term of `actor_loss`.

    A term that is added there and has one belongs here too; `check_no_gradient` asks for it.
    """
    vanishes = find_policy_loss(config.actor.loss).vanishes_without_advantage
    return vanishes and not needs_entropy(config.actor) and config.kl.type != "loss"


def check_no_gradient(loss_fn: Loss, part: Batch, most_rows: int = 8) -> None:
    """RuntimeError if `loss_fn` has a gradient in the first rows without an advantage.

    It is called where those rows are about to be dropped. No model runs: the log-probabilities are
    made up, near those of the engine.
    """
    assert part.advantages is not None
    without_advantage = part.mask.any(1) & ~part.advantages.any(1)
    rows = part.select(without_advantage.nonzero()[:most_rows, 0])
    if not len(rows.mask):
        return
    logps = (rows.engine_logps - 0.1).requires_grad_()
    loss, _ = loss_fn(rows, TokenScores(logps=logps))
    [gradient] = torch.autograd.grad(loss, logps, allow_unused=True, materialize_grads=True)
    if gradient.any():
        raise RuntimeError(
            "actor_loss has a gradient in rows without an advantage, which would not be run and so "
            "not be trained: after adding a term to it, let can_drop_rows in trainer/ppo.py return "
            "False for it; if the term is in a loss of your own, do not declare "
            "vanishes_without_advantage"
        )


def add_advantages(batch: Batch, config: PPOConfig) -> dict[str, float]:
    """Fills batch.advantages, and batch.returns for a critic. Returns metrics."""
    rewards, metrics = batch.rewards, {}
    if config.kl.type == "reward":
        assert batch.old_logps is not None and batch.ref_logps is not None
        kl = losses.kl_estimate(batch.old_logps, batch.ref_logps, config.kl.reward_estimator)
        kl = kl * batch.mask
        rewards = rewards - config.kl.coef * kl
        metrics["actor/kl"] = mean_over_tokens(kl, batch)
    inputs = AdvantageInputs(
        rewards=rewards,
        values=batch.values,
        mask=batch.mask.float(),
        group=batch.group,
        trajectory=batch.trajectory,
        gamma=config.adv.gamma,
        lamda=config.adv.lamda,
        norm_var=bool(config.adv.norm_var),
        old_logps=batch.old_logps,
        teacher_logps=batch.teacher_logps,
    )
    estimator = find_function(config.adv.estimator, ADVANTAGE_ESTIMATORS, "adv.estimator")
    estimated = call_by_name(estimator, inputs)
    if isinstance(estimated, tuple):
        batch.advantages, batch.returns = estimated
    else:
        batch.advantages = estimated
    if config.teacher.model_name:
        gains = call_by_name(distillation, inputs)
        metrics["actor/teacher_kl"] = -mean_over_tokens(gains, batch)
        if "teacher_logps" not in argument_names(estimator):
            batch.advantages = batch.advantages + config.teacher.coef * gains
    return metrics


def mean_over_tokens(values: Tensor, batch: Batch) -> float:
    """The mean over the trained tokens of values [B, T], which are 0 elsewhere."""
    return (values.sum() / batch.mask.sum().clamp(min=1)).item()


def actor_loss(config: ActorConfig, kl: KLConfig, batch: Batch, scores: TokenScores):
    """The actor's loss on whole sequences [b, T]: policy gradient, KL term and entropy bonus."""
    logps, weights = scores.logps, batch.token_weights
    # With one update a rollout the policy that sampled is the current one.
    old_logps = logps.detach() if batch.old_logps is None else batch.old_logps
    correction = None
    if config.correction != "none":
        correction = losses.importance_weights(
            old_logps,
            batch.engine_logps,
            batch.mask,
            config.correction,
            config.correction_cap,
        )
    inputs = losses.PolicyInputs(
        logps=logps,
        old_logps=old_logps,
        advantages=batch.advantages,
        mask=batch.mask.float(),
        clip=config.clip,
        clip_high=config.clip_high or config.clip,
        dual_clip=config.dual_clip,
    )
    token_loss = choose_function(config.loss, losses.POLICY_LOSSES, "actor.loss")
    loss, metrics = losses.policy_loss(token_loss, inputs, weights, correction)
    mismatch = losses.rollout_mismatch(old_logps, batch.engine_logps, weights)
    metrics |= {f"mismatch_{name}": value for name, value in mismatch.items()}
    if kl.type == "loss":
        estimate = losses.kl_estimate(logps, batch.ref_logps, kl.loss_estimator)
        kl_term = (estimate * weights).sum()
        loss = loss + kl.coef * kl_term
        metrics["kl"] = kl_term.detach()
    if scores.entropy is not None:  # the loss has an entropy bonus
        entropy = (scores.entropy * weights).sum()
        loss = loss - config.entropy * entropy
        metrics["entropy"] = entropy.detach()
    return loss, metrics


def critic_loss(config: CriticConfig, batch: Batch, scores: TokenScores):
    """The critic's clipped squared error on whole sequences [b, T]."""
    return losses.value_loss(
        scores.values, batch.values, batch.returns, batch.token_weights, config.clip
    )


def average_updates(worker_name: str, updates: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each metric over the updates of a step, as worker_name/metric.

    There is none while the worker is frozen.

    Of the moments of the ratio trainer / engine r it makes the effective sample size
    (mean r)^2 / mean r^2 (Kong, 1992), as a fraction of the tokens.
    """
    if not updates:
        return {}
    means = {name: sum(update[name] for update in updates) / len(updates) for name in updates[0]}
    squared = means.pop("mismatch_ratio_squared", 0.0)
    if squared:
        means["effective_sample_size"] = means["mismatch_ratio"] ** 2 / squared
    return {f"{worker_name}/{name}": mean for name, mean in means.items()}


def start(config: PPOConfig) -> None:
    if config.trainer.eval_only:
        EvaluationRun(config).run()
    else:
        train_and_finish(PPORun(config), train)


def main() -> None:
    launch(PPOConfig, start, find_ppo_problems)


if __name__ == "__main__":
    main()
