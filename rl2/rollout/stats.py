"""Turns the trajectories of a step into training samples, metrics and records.

Nothing here communicates: every process has all trajectories.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from rl2.algorithms.advantages import RewardPart, sum_by_trajectory
from rl2.batch import Batch, Sample
from rl2.rollout.trajectory import FilterStatus, Trajectory, in_order
from rl2.run.success import reward_metric


def take_samples(trajectories: list[Trajectory]) -> list[Sample]:
    """Takes the samples out of all trajectories, in the order of the data.

    Their memory is free again when they have become a batch. If rollout.filter left none, returns
    one sample without a trained token.
    """
    samples = []
    for trajectory in in_order(trajectories):
        samples += trajectory.samples
        trajectory.samples = []
    return samples or [Sample([0, 0], [0, 0], [0.0, 0.0], [0.0, 0.0], group=0, trajectory=0)]


def reward_parts(trajectories: list[Trajectory], batch: Batch) -> dict[str, RewardPart]:
    """Returns the parts of the rewards beside the rows of the batch, by name."""
    scored = {t.id: t for t in trajectories if not t.is_failed}
    names = sorted({name for t in scored.values() for name in t.rewards})
    weights: dict[str, float] = {}
    for trajectory in scored.values():
        weights |= trajectory.weights  # which all have in common
    parts = {}
    for name in names:
        by_id = {id: trajectory.rewards.get(name, 0.0) for id, trajectory in scored.items()}
        values = [by_id.get(id, 0.0) for id in batch.trajectory.tolist()]
        parts[name] = RewardPart(torch.tensor(values), weights.get(name, 1.0))
    return parts


def summarise_step(trajectories: list[Trajectory], version: int) -> dict[str, float]:
    """Returns the metrics of the rollout of a training step, as a whole and by source."""
    whole = summarise(trajectories, version) | summarise_groups(trajectories)
    return whole | summarise_sources(trajectories, version)


def summarise(trajectories: list[Trajectory], version: int) -> dict[str, float]:
    """Returns means over trajectories of rewards and lengths, by the name of the metric.

    Groups that rollout.filter rejected count: the means say how good the policy is at all prompts,
    not at those that are trained. Failed trajectories count in rollout/* only. rollout/staleness is
    how many updates the weights that sampled a token lag behind `version`, as a mean over tokens.
    """
    lengths = [t.length for t in trajectories]
    num_sampled = sum(lengths)
    return _reward_metrics([t for t in trajectories if not t.is_failed]) | {
        "rollout/length": _mean(lengths),
        "rollout/longest": max(lengths),
        "rollout/truncated": _mean(t.is_truncated for t in trajectories),
        "rollout/failed": _mean(t.is_failed for t in trajectories),
        "rollout/turns": _mean(t.num_turns for t in trajectories),
        "rollout/staleness": _total_lag(trajectories, version) / max(1, num_sampled),
        "tokens/sampled": num_sampled,
    }


def summarise_groups(trajectories: list[Trajectory]) -> dict[str, float]:
    """Returns metrics of the groups of a training step.

    These are the fraction that teaches nothing and, with rollout.filter, how many it let pass.
    """
    metrics = {"rollout/zero_variance": _equal_group_fraction(trajectories)}
    filtered = [t for t in trajectories if t.filter_status != FilterStatus.OFF]
    if filtered:
        groups = {t.group for t in filtered}
        rejected = {t.group for t in filtered if t.is_rejected}
        metrics["rollout/filtered"] = len(rejected) / len(groups)
        metrics["rollout/groups"] = len(groups) - len(rejected)
    return metrics


def summarise_sources(trajectories: list[Trajectory], version: int) -> dict[str, float]:
    """Returns the metrics of `summarise` and `summarise_groups` for each source of data.path.NAME.

    They begin with sources/NAME. There are none for rows of a path without a name.
    """
    by_source: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.source:
            by_source[trajectory.source].append(trajectory)
    metrics = {}
    for source, members in sorted(by_source.items()):
        for name, value in (summarise(members, version) | summarise_groups(members)).items():
            metrics[f"sources/{source}/{name}"] = value
    return metrics


def _equal_group_fraction(trajectories: list[Trajectory]) -> float:
    """Returns the fraction of the trained groups in which all trajectories have the same reward.

    An estimator that compares them learns nothing from such a group, nor from a group of one. The
    fraction is 1 if no group is trained.
    """
    rewards = defaultdict(set)
    for trajectory in trajectories:
        if not trajectory.is_failed and not trajectory.is_rejected:
            # In the batch, 0.1 + 0.2 is 0.3.
            rewards[trajectory.group].add(np.float32(trajectory.reward))
    return _mean(len(values) == 1 for values in rewards.values()) if rewards else 1.0


def _reward_metrics(trajectories: list[Trajectory]) -> dict[str, float]:
    mean = _mean(t.reward for t in trajectories)
    deviation = _mean((t.reward - mean) ** 2 for t in trajectories) ** 0.5
    metrics = {"reward/mean": mean, "reward/std": deviation}
    part_names = {name for t in trajectories for name in t.rewards}
    if part_names == {"reward"}:  # a plain number, which has no parts
        return metrics
    for name in sorted(part_names):
        metrics[reward_metric(name)] = _mean(t.rewards.get(name, 0.0) for t in trajectories)
    return metrics


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else float("nan")


def _total_lag(trajectories: list[Trajectory], version: int) -> int:
    lag = 0
    for trajectory in trajectories:
        for sampled_by, num_tokens in trajectory.versions:
            lag += (version - sampled_by) * num_tokens
    return lag


def add_ages(batch: Batch, trajectories: list[Trajectory], version: int) -> None:
    """Fills batch.ages: by how many updates the weights that sampled a token lag behind `version`.

    `batch` has all samples of the trajectories, with the mask of the rollout.
    """
    ages: list[Tensor] = []
    for trajectory in in_order(trajectories):
        if not trajectory.is_failed and not trajectory.is_rejected:
            # Rows and versions are in order of time, so the sampled tokens are in one order.
            for sampled_by, num_tokens in trajectory.versions:
                ages.append(torch.full((num_tokens,), float(version - sampled_by)))
    is_sampled = batch.mask > 0
    batch.ages = torch.zeros(batch.mask.shape)
    if ages:
        batch.ages[is_sampled] = torch.cat(ages)


def mask_truncated(batch: Batch, trajectories: list[Trajectory]) -> None:
    """Clears the mask of truncated answers.

    This is DAPO's overlong filtering (arXiv:2503.14476). As with TRL's mask_truncated_completions,
    it comes after the advantages: such an answer counts in the baseline of its group, but in no sum
    or mean of the losses.
    """
    batch.mask[rows_of_truncated(batch, trajectories)] = 0


def rows_of_truncated(batch: Batch, trajectories: list[Trajectory]) -> Tensor:
    """[B] bool: whether a length limit cut the trajectory of the row."""
    truncated = [t.id for t in trajectories if t.is_truncated]
    return torch.isin(batch.trajectory, torch.tensor(truncated, dtype=torch.long))


def to_records(
    trajectories: list[Trajectory], batch: Batch | None = None
) -> Iterator[dict[str, Any]]:
    """Yields what the run folder keeps, in the order of the data.

    With the `batch` made of them, the record of a trajectory in it has its advantage: the mean over
    its trained tokens. Only the first process reads the records, and a record is made when it is
    read.
    """
    advantages = {} if batch is None else _mean_advantages(batch)
    for trajectory in in_order(trajectories):
        record = trajectory.record()
        if trajectory.id in advantages:
            record["advantage"] = advantages[trajectory.id]
        yield record


def add_token_columns(saved: dict[str, np.ndarray], batch: Batch) -> None:
    """Adds `advantages` [n], and `trainer_logps` [n] where the trainer scored the rollout before
    its update, to the n tokens of the batch's samples. They are 0 where nothing is trained.
    """
    lengths = torch.from_numpy(saved["length"])[:, None]
    if not len(lengths):  # every group was filtered out
        return
    columns = {"advantages": batch.advantages}
    if batch.old_logps is not batch.engine_logps:
        columns["trainer_logps"] = batch.old_logps
    is_token = torch.arange(batch.tokens.shape[1]) < lengths
    for name, column in columns.items():
        if column is not None:
            # Columns are shifted: they are beside the token before.
            saved[name] = pad(column * batch.mask, (1, 0))[is_token].numpy()


def _mean_advantages(batch: Batch) -> dict[int, float]:
    """Returns the mean advantage over the trained tokens of each trajectory, by its id."""
    assert batch.advantages is not None
    sums = sum_by_trajectory(batch.advantages * batch.mask, batch.trajectory)
    means = sums / sum_by_trajectory(batch.mask, batch.trajectory).clamp(min=1)
    return dict(zip(batch.trajectory.unique().tolist(), means.tolist(), strict=True))
