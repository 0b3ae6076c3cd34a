"""Explains in words what goes wrong in a step.

`find_problems` reads the metrics of a step. `Health` tells a problem when it first comes, counts
the steps that have it, and stops a run that has diverged.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rl2.algorithms.advantages import ADVANTAGE_ESTIMATORS
from rl2.config.conditions import has_teacher
from rl2.config.schema import Config, PPOConfig, RolloutWorkerConfig
from rl2.report.learning import Problem, find_lack_of_learning
from rl2.run.checkpoints import Checkpoints
from rl2.run.records import Record

# With more answers cut, the reward mostly measures the limit, not how good the answers are.
MAX_CUT_FRACTION = 0.5
# Estimators that compare the answers to a prompt: where all earn the same, it teaches nothing.
GROUP_ESTIMATORS = [name for name, it in ADVANTAGE_ESTIMATORS.items() if "group" in it.needs]
# A step without a group in rollout.filter has played all its refills. Three in a row are a problem.
EMPTY_STEPS = 3
SKIPPED_UPDATES = 10  # in a row, after which a run stops
# Rewards are sums of floats: closer than this, relative to their mean, they are equal.
EQUAL_REWARDS = 1e-6

Metrics = dict[str, float]  # of one step, by name


def with_names(by_set: dict[str, Metrics]) -> Metrics:
    """Returns the metrics of all test sets as NAME/metric. A set without a name adds no prefix."""
    named = {}
    for name, metrics in by_set.items():
        for metric, value in metrics.items():
            named[f"{name}/{metric}".lstrip("/")] = value
    return named


class Health:
    """Watches a run.

    `config` is that of the trainer. `start_step` steps were done before, by a process whose
    checkpoint this one resumed.
    """

    def __init__(self, folder: Path, config: Config, start_step: int):
        self.folder = folder
        self.config = config
        self.start_step = start_step
        self.num_steps = 0  # so far, in this process
        self.step_counts: Counter[str] = Counter()  # by the name of the problem
        self.num_empty_steps = 0  # in a row, without a group to train
        self.gradients = {"actor": Gradients(), "critic": Gradients()}

    def check(self, metrics: Metrics) -> list[Problem]:
        """Returns what went wrong in a step. Every step must be checked, in order."""
        step = int(metrics["step"])
        self.num_steps += step > 0
        is_empty = metrics.get("rollout/groups") == 0
        self.num_empty_steps = self.num_empty_steps + 1 if is_empty else 0
        for worker, gradients in self.gradients.items():
            if f"{worker}/skipped" in metrics:
                gradients.note(
                    step,
                    metrics[f"{worker}/grad_norm"],
                    metrics[f"{worker}/skipped"],
                    _updates_per_step(self.config, worker),
                )
        return find_problems(metrics, self.config)

    def describe(self, step: int, problems: list[Problem]) -> list[str]:
        """Returns what to print about a step: its new problems."""
        sentences = []
        for problem in problems:
            if problem.name not in self.step_counts:
                sentences.append(f"step {step} {problem.name}: {problem.reason}")
            self.step_counts[problem.name] += 1
        return sentences

    def summary(self, lines: list[Record]) -> list[str]:
        """Returns what to print at the end of the run, whose metrics.jsonl has these `lines`."""
        sentences = []
        for name, count in self.step_counts.items():
            sentences.append(f"{count} of {self.num_steps} steps {name}")
        for lack in find_lack_of_learning(lines):
            sentences.append(f"warning: the run {lack.name}: {lack.reason}")
        return sentences

    @property
    def is_diverging(self) -> bool:
        """Whether the last step had no update with a finite gradient."""
        return any(gradients.num_skipped for gradients in self.gradients.values())

    @property
    def proven_step(self) -> float:
        """The last step in which all workers had a finite gradient other than 0.

        It proves that the weights before it are good. Infinity if no worker is trained.
        """
        steps = [it.last_finite_step or 0 for it in self.gradients.values() if it.is_trained]
        return min(steps, default=math.inf)

    def stop_if_diverged(self) -> None:
        """Stops a run that has diverged or in which rollout.filter leaves nothing to train.

        Raises RuntimeError after SKIPPED_UPDATES skipped updates in a row, or after
        EMPTY_STEPS steps in a row without a group. All processes must call it: they have the same
        metrics and stop at the same step.
        """
        if isinstance(self.config, PPOConfig) and self.num_empty_steps >= EMPTY_STEPS:
            raise RuntimeError(
                f"in the last {EMPTY_STEPS} steps no group was within rollout.filter, although "
                f"each step played {1 + self.config.rollout.max_refills} x "
                "data.prompts_per_rollout prompts. If all answers to a prompt earn the same, the "
                "task is too easy or too hard, or reward_fn is wrong: read the transcripts"
            )
        for worker, gradients in self.gradients.items():
            if gradients.num_skipped >= SKIPPED_UPDATES:
                raise RuntimeError(
                    f"the last {gradients.num_skipped} updates of the {worker} were skipped, since "
                    f"their gradients were not finite. {self.advise_after_divergence(worker)}"
                )

    def advise_after_divergence(self, worker: str) -> str:
        """Returns what to change after the weights diverged, and where to resume."""
        section = getattr(self.config, worker)
        # Its own update may have spoiled the weights that a checkpoint of this step has.
        finite_step = self.gradients[worker].last_finite_step or self.start_step
        if finite_step == 0:
            return (
                "No gradient of the run was finite: the loss or the model overflows. Try "
                f"{worker}.dtype=float32 instead of {section.dtype}"
            )
        checkpoint = Checkpoints(self.folder / "checkpoints").newest(before=finite_step)
        remedy = "start over, since there is no checkpoint before it"
        if checkpoint is not None:
            remedy = f"resume from an earlier step: trainer.resume={checkpoint}"
        return (
            f"The weights after step {finite_step} have diverged: lower "
            f"{worker}.lr={section.lr:g} and {remedy}"
        )


@dataclass
class Gradients:
    """Which steps gave a worker a finite gradient."""

    num_skipped: int = 0  # updates in a row without one; a partly skipped step adds none
    last_finite_step: int | None = None
    is_trained: bool = False

    def note(self, step: int, norm: float, skipped: float, num_updates: int) -> None:
        """Notes a step that skipped a share of its updates; `norm` is their gradient's.

        A gradient of exactly 0 says nothing about the weights: PPO computes none if all answers
        earn the same, which is common once a policy has diverged.
        """
        self.is_trained = True
        if norm == 0:
            return
        if skipped == 1 and not math.isfinite(norm):
            self.num_skipped += num_updates
        else:
            self.num_skipped = 0
            self.last_finite_step = step


def find_problems(metrics: Metrics, config: Config) -> list[Problem]:
    """Finds the problems of a step of any trainer. Step 0, an evaluation alone, has none."""
    problems: list[Problem] = []
    if isinstance(config, PPOConfig) and "rollout/length" in metrics:
        problems += _find_rollout_problems(metrics, config)
    elif metrics.get("actor/grad_norm", metrics.get("critic/grad_norm")) == 0:
        reason = "the loss cannot fall further, or its rows have no token to train"
        problems.append(Problem("taught nothing", f"the gradient was exactly 0: {reason}"))
    for worker in ("actor", "critic"):
        fraction = metrics.get(f"{worker}/skipped", 0.0)
        if fraction > 0:
            section = getattr(config, worker)
            total = _updates_per_step(config, worker)
            updates = f"{round(fraction * total)} of {total}"
            cause = f"the gradient of {updates} was not finite"
            if math.isfinite(metrics[f"{worker}/grad_norm"]):
                limit = f"{worker}.skip_threshold={section.skip_threshold:g}"
                cause = f"the mean probability ratio of {updates} was above {limit}"
            remedy = f"If this continues, lower {worker}.lr={section.lr:g}"
            reason = f"{cause}, so they moved no weight. {remedy}"
            problems.append(Problem(f"skipped updates of the {worker}", reason))
    return problems


def _updates_per_step(config: Config, worker: str) -> int:
    """Returns the optimizer steps of the worker in a step; 1 without rollouts."""
    section = getattr(config, worker)
    return section.updates_per_step if isinstance(section, RolloutWorkerConfig) else 1


def _find_rollout_problems(metrics: Metrics, config: PPOConfig) -> Iterator[Problem]:
    rollout = config.rollout
    num_wanted = config.data.prompts_per_rollout
    num_groups = metrics.get("rollout/groups", num_wanted)
    has_filter = rollout.filter  # saved rollouts may be those of a run that had one
    if has_filter and 0 < num_groups < num_wanted:
        reason = (
            f"after rollout.max_refills={rollout.max_refills} refills, {num_groups} of "
            f"{num_wanted} groups were within rollout.filter={rollout.filter} and were trained. "
            "Use other prompts, or raise rollout.max_refills or data.responses_per_prompt"
        )
        yield Problem("had too few groups", reason)
    yield from _find_lack_of_training(metrics, config, num_groups)
    if metrics["rollout/truncated"] > MAX_CUT_FRACTION:
        max_new_tokens = rollout.train_sampling_params.max_new_tokens
        reason = (
            f"{metrics['rollout/truncated']:.0%} of them reached a length limit, and cut answers "
            "rarely earn a reward: raise rollout.train_sampling_params.max_new_tokens="
            f"{max_new_tokens}"
        )
        if rollout.max_turns > 1:
            reason += ", or the room for all turns, actor.max_length_per_device"
        yield Problem("had most answers cut", reason)


def _find_lack_of_training(
    metrics: Metrics, config: PPOConfig, num_groups: float
) -> Iterator[Problem]:
    """Finds why the rewards of a step did not train the actor."""
    if metrics["rollout/failed"] == 1:
        yield Problem("taught nothing", "the environment failed on every trajectory")
    elif num_groups == 0:
        reason = (
            f"rollout.filter={config.rollout.filter} left no group after "
            f"rollout.max_refills={config.rollout.max_refills} refills"
        )
        yield Problem("taught nothing", reason)
    elif "actor/lr" not in metrics:  # in the first actor.freeze_steps
        return
    elif config.rollout.mask_truncated and metrics["rollout/truncated"] == 1:
        reason = "rollout.mask_truncated=true trains no cut answer, and all were cut"
        yield Problem("taught nothing", reason)
    elif metrics["actor/grad_norm"] == 0 and metrics["rollout/zero_variance"] == 1:
        yield Problem("taught nothing", _equal_rewards(metrics, config))
    elif metrics["actor/grad_norm"] == 0:
        reason = (
            "the gradient was exactly 0 although rewards differ: all advantages of "
            f"adv.estimator={config.adv.estimator} are 0, or "
            f"actor.correction={config.actor.correction} or the clip masks every token"
        )
        yield Problem("taught nothing", reason)
    elif metrics["actor/skipped"] < 1 and metrics["rollout/zero_variance"] == 1:
        if learns_from_groups_alone(config):
            yield Problem("trained without advantages", _equal_rewards(metrics, config))
        elif "critic/lr" in metrics and _rewards_are_equal(metrics):
            yield Problem("earned a constant reward", _equal_rewards(metrics, config))


def learns_from_groups_alone(config: PPOConfig) -> bool:
    """Whether PPO learns only from prompts with different rewards among their answers."""
    return config.adv.estimator in GROUP_ESTIMATORS and not has_teacher(config)


def _rewards_are_equal(metrics: Metrics) -> bool:
    """Whether all trajectories of the step earned the same; False without rewards."""
    tolerance = EQUAL_REWARDS * max(1.0, abs(metrics.get("reward/mean", 0.0)))
    return metrics.get("reward/std", math.inf) <= tolerance


def _equal_rewards(metrics: Metrics, config: PPOConfig) -> str:
    """Returns which rewards are equal, and the likely reason."""
    num_prompts = config.data.prompts_per_rollout
    num_answers = config.data.responses_per_prompt
    reward = metrics["reward/mean"]
    if not _rewards_are_equal(metrics):
        return (
            f"for each of the {num_prompts} prompts, all {num_answers} answers earned the same, "
            f"although prompts differ (mean {reward:.3g}). Each prompt is too easy or too hard: "
            "use others, or raise data.responses_per_prompt or the temperature"
        )
    hint = "The task is too hard, or reward_fn never gives a reward"
    if reward > 0:
        hint = "The task is too easy, or reward_fn rewards every answer alike"
    return (
        f"all {num_answers} answers to each of the {num_prompts} prompts earned the same reward "
        f"({reward:.3g}). {hint}: read rollouts/train/step_{metrics['step']}.jsonl"
    )
