"""Advantage estimators: how much better each sampled token was than expected.

Shapes: B sequences, T columns (each beside the token that is predicted), N trajectories, G groups,
S sampled tokens of the longest trajectory. `mask` [B, T] is 1 where the policy sampled the token.
`trajectory` [B] says which sequences are one conversation, in order of time. `group` [B] says which
trajectories answer the same prompt. Finite values where the mask is 0 have no influence.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rl2.algorithms.by_name import Function
from rl2.algorithms.losses import masked, sum_by_index

TRAJECTORIES_AT_A_TIME = 512  # in `gae`, which needs memory for them


@dataclass(frozen=True)
class AdvantageInputs:
    """What an estimator may ask for, by the name of a parameter.

    It returns the advantages [B, T], or (advantages, returns) where it asks for values: the critic
    learns the returns. What it returns where the mask is 0 has no influence, if it is finite.
    """

    rewards: Tensor  # [B, T] the reward of each token, minus the KL penalty with kl.type=reward
    values: Tensor | None  # [B, T] an estimator that asks for them gets a critic
    mask: Tensor  # [B, T] float32, as all columns
    group: Tensor  # [B]
    trajectory: Tensor  # [B]
    gamma: float  # this and the following are the settings adv.* of the config
    lamda: float
    norm_var: bool


def group_advantages(
    rewards: Tensor, mask: Tensor, group: Tensor, trajectory: Tensor, norm_var: bool
) -> Tensor:
    """[B, T]: the trajectory's reward minus the mean of its group (Dr. GRPO, arXiv:2503.20783).

    `norm_var` divides by the group's standard deviation + 1e-4 (GRPO, arXiv:2402.03300; unbiased
    and with this epsilon, as TRL does). Trajectories without a trained token do not count. A group
    of one, or of equal rewards, gets exactly 0.
    """
    row_index, member_of, totals, counts = _group_rewards(rewards, mask, group, trajectory)
    ranges = _reward_ranges(member_of, totals, counts)
    sizes = sum_by_index(member_of, counts, len(ranges))
    means = sum_by_index(member_of, totals, len(ranges)) / sizes.clamp(min=1)
    # Equal rewards are found by their range, not by their mean: 0.1 + 0.1 + 0.1 is not 3 * 0.1.
    differs = ranges[member_of] > 0
    advantages = torch.where(differs, (totals - means[member_of]) * counts, 0.0)
    if norm_var:
        squares = sum_by_index(member_of, advantages.square(), len(ranges))
        deviations = (squares / (sizes - 1).clamp(min=1)).sqrt()
        advantages = advantages / (deviations + 1e-4)[member_of]
    return advantages[row_index, None] * mask


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    trajectory: Tensor,
    gamma: float,
    lamda: float,
    norm_var: bool = False,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [B, T] of generalised advantage estimation (arXiv:1506.02438).

    Only sampled tokens count: delta_t = r_t + gamma V_{t+1} - V_t,
    A_t = delta_t + gamma lamda A_{t+1}, return = A + V. Here t + 1 is the next sampled token of the
    trajectory, which may stand in its next sequence, and V behind the last one is 0. `norm_var`
    whitens the advantages over the batch; the returns stay as they are.
    """
    row_index = trajectory.unique(return_inverse=True)[1]
    # The rows of a trajectory follow each other in order of time.
    order = row_index.argsort(stable=True)
    advantages = torch.zeros_like(values)
    first = 0
    for count in row_index.bincount().split(TRAJECTORIES_AT_A_TIME):
        rows = order[first : first + int(count.sum())]
        first += len(rows)
        sampled = mask[rows] > 0
        # Rows [5 6 . 7] and [. 8 9 .] of one trajectory become the line [5 6 7 8 9].
        lengths = sum_by_trajectory(sampled, trajectory[rows])
        on_line = torch.arange(int(lengths.max()), device=mask.device) < lengths[:, None]
        lines = values.new_zeros(on_line.shape)
        line_rewards = lines.masked_scatter(on_line, rewards[rows].masked_select(sampled))
        line_values = lines.masked_scatter(on_line, values[rows].masked_select(sampled))
        cells = _discounted_sums(line_rewards, line_values, gamma, lamda).masked_select(on_line)
        advantages[rows] = lines.new_zeros(sampled.shape).masked_scatter_(sampled, cells)
    returns = advantages + masked(mask, values)
    return (whiten(advantages, mask) if norm_var else advantages), returns


def _discounted_sums(rewards: Tensor, values: Tensor, gamma: float, lamda: float) -> Tensor:
    """The advantages [n, S] of lines of rewards and values [n, S]."""
    deltas = rewards - values
    deltas[:, :-1] += gamma * values[:, 1:]
    deltas = deltas.T.contiguous()  # a step of the loop reads one place of all lines
    following = values.new_zeros(len(values))
    for t in reversed(range(len(deltas))):
        following = deltas[t].add_(gamma * lamda * following)
    return deltas.T


def whiten(advantages: Tensor, mask: Tensor) -> Tensor:
    """Mean 0 and (unbiased) standard deviation 1 over the sampled tokens, 0 elsewhere [B, T].

    Equal advantages and a single one become 0. The 1e-8 under the root is that of OpenAI's and
    TRL's PPO.
    """
    # In fp32 the mean of equal values may differ from them, and the difference would be blown up.
    sampled = advantages.masked_select(mask > 0).double()
    if len(sampled) < 2:
        return torch.zeros_like(advantages)
    mean, scale = sampled.mean(), (sampled.var() + 1e-8).rsqrt()
    scaled = sampled.sub_(mean).mul_(scale).to(advantages.dtype)
    return torch.zeros_like(advantages).masked_scatter_(mask > 0, scaled)


ADVANTAGE_ESTIMATORS: dict[str, Function] = {"reinforce": group_advantages, "gae": gae}


def zero_std_group_fraction(
    rewards: Tensor, mask: Tensor, group: Tensor, trajectory: Tensor
) -> Tensor:
    """The fraction of groups whose trajectories all have the same reward, groups of one included.

    Without a critic such a group teaches nothing. Trajectories without a trained token do not
    count, nor do groups that have no others.
    """
    _, member_of, totals, counts = _group_rewards(rewards, mask, group, trajectory)
    ranges = _reward_ranges(member_of, totals, counts)
    return (ranges == 0).sum() / (ranges >= 0).sum().clamp(min=1)


def sum_by_trajectory(columns: Tensor, trajectory: Tensor) -> Tensor:
    """The sum over each trajectory's rows of columns [B, T]: [N], trajectories ascending."""
    ids, row_index = trajectory.unique(return_inverse=True)
    return sum_by_index(row_index, columns.sum(1), len(ids))


def _group_rewards(
    rewards: Tensor, mask: Tensor, group: Tensor, trajectory: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The trajectory of each row [B]; the group, the reward and the count of each trajectory [N].

    The count is 1.0, or 0.0 for a trajectory without a trained token: its environment failed, and
    its reward means nothing.
    """
    ids, row_index = trajectory.unique(return_inverse=True)
    group_index = group.unique(return_inverse=True)[1]
    member_of = torch.zeros_like(ids).scatter(0, row_index, group_index)
    counts = (sum_by_index(row_index, mask.sum(1), len(ids)) > 0).to(rewards.dtype)
    totals = sum_by_trajectory(masked(mask, rewards), trajectory)
    return row_index, member_of, totals, counts


def _reward_ranges(member_of: Tensor, totals: Tensor, counts: Tensor) -> Tensor:
    """The largest minus the smallest reward of each group [G]; -inf for a group that is empty."""
    num_groups = int(member_of.max()) + 1
    member_of = member_of[counts > 0]
    totals = totals[counts > 0]
    infinite = totals.new_full((num_groups,), float("inf"))
    largest = (-infinite).scatter_reduce(0, member_of, totals, "amax")
    smallest = infinite.scatter_reduce(0, member_of, totals, "amin")
    return largest - smallest
