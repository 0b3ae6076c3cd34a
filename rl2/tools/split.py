"""How to split the processes of PPO into those that sample and those that train, for `rl2 plan`."""

from collections.abc import Iterator
from functools import cache

from transformers import AutoConfig

from rl2.config.conditions import count_samplers, loads_teacher, needs_critic, needs_reference
from rl2.config.model_rules import check_layout
from rl2.config.schema import PPOConfig, worker_names
from rl2.engine.select import MAX_RUNNING_ON_GPU
from rl2.tools.step_time import (
    ModelCosts,
    Rollout,
    count_costs,
    log_normal_lengths,
    sampling_seconds,
    training_seconds,
)
from rl2.trainer.ppo import needs_old_logps

LENGTH_SPREAD = 0.8  # standard deviation of the logarithms of the answers' lengths


def describe_times(
    config: PPOConfig, num_gpus: int, prompt: int | None, answer: int | None
) -> Iterator[str]:
    """Yields lines: the seconds of a step without processes that only sample, with as many as the
    config says, and with as many as make it fastest, which balances the two sides. `prompt` and
    `answer` are median tokens, if they are known.
    """
    rollout, data = config.rollout, config.data
    sampling = rollout.train_sampling_params
    answer = answer or max(1, sampling.max_new_tokens // 4)
    prompt = prompt or max(1, data.max_length // 2)
    count = data.prompts_per_rollout * data.responses_per_prompt
    lengths = log_normal_lengths(count, answer, LENGTH_SPREAD, sampling.max_new_tokens)
    answers = Rollout(prompt, data.responses_per_prompt, lengths)
    forward, trained = scored_and_trained(config)
    actor_costs = trained[0][0]
    recomputes = bool(config.actor.gradient_checkpointing)
    max_running = rollout.max_running or MAX_RUNNING_ON_GPU

    @cache
    def sample(num: int) -> float:
        return sampling_seconds(actor_costs, answers, num, rollout.tp_size, max_running)

    @cache
    def train(num: int) -> float:
        return training_seconds(forward, trained, answers, num, recomputes)

    def step(num_samplers: int) -> float:
        return max(sample(num_samplers), train(num_gpus - num_samplers))

    yield (
        "Seconds of a step, by a roofline of H100s, to compare layouts: a real step is slower. "
        f"Prompts have {prompt} tokens, half of the answers more than {answer} "
        "(--prompt-tokens, --answer-tokens); environments take no time"
    )
    if num_gpus % rollout.tp_size == 0:
        both = sample(num_gpus), train(num_gpus)
        yield (
            f"  {num_gpus} processes that do both: {sum(both):.1f} s a step, "
            f"{both[0]:.1f} sampling and {both[1]:.1f} training"
        )
    sizes = range(rollout.tp_size, num_gpus, rollout.tp_size)
    splits = [num for num in sizes if _can_train_beside(config, num)]
    if not splits:
        return
    fastest = min(splits, key=step)
    for num in sorted({fastest, count_samplers(config)} - {0}):
        is_best = ", the fastest split" if num == fastest else ""
        yield (
            f"  rollout.num_processes={num}{is_best}: {num} processes that sample, "
            f"{num_gpus - num} that train, {step(num):.1f} s a step, {sample(num):.1f} sampling "
            f"beside {train(num_gpus - num):.1f} training"
        )


def _can_train_beside(config: PPOConfig, num_samplers: int) -> bool:
    """Whether the layouts of the workers divide the processes that are left."""
    for name in worker_names(config):
        if any(check_layout(name, getattr(config, name), num_samplers)):
            return False
    return True


def scored_and_trained(
    config: PPOConfig,
) -> tuple[list[ModelCosts], list[tuple[ModelCosts, int]]]:
    """The costs of the models that score a rollout, one for each pass, and of those that are
    trained, the actor first, with their passes.
    """

    def costs_of(name: str) -> ModelCosts:
        return count_costs(AutoConfig.from_pretrained(name))

    actor = costs_of(config.actor.model_name)
    forward = []
    if needs_reference(config):
        forward.append(actor)
    if needs_old_logps(config) or config.actor.log_entropy:
        forward.append(actor)
    if loads_teacher(config) and config.teacher.model_name:
        forward.append(costs_of(config.teacher.model_name))
    trained = [(actor, config.actor.epochs_per_rollout)]
    if needs_critic(config.adv.estimator):
        critic = costs_of(config.critic.model_name) if config.critic.model_name else actor
        forward.append(critic)
        trained.append((critic, config.critic.epochs_per_rollout))
    return forward, trained
