"""Advantage estimators."""

import torch
from torch import Tensor

from rl2.algorithms.losses import _sum_by, _where


def trajectory_rewards(rewards: Tensor, trajectory: Tensor) -> Tensor:
    """The reward of each distinct trajectory [N], in ascending order of their numbers: the sum over its columns."""
    ids, index = trajectory.unique(return_inverse=True)
    return _sum_by(index, rewards.sum(1), len(ids))


def _groups(rewards, mask, group, trajectory):
    """The trajectory of each row [B]; of each trajectory its group, its reward, and 1.0 if it counts [N]: those with
    nothing to train do not. Their environment failed, and their reward means nothing."""
    ids, index = trajectory.unique(return_inverse=True)
    member = torch.zeros_like(ids).scatter(0, index, group.unique(return_inverse=True)[1])
    counts = (_sum_by(index, mask.sum(1), len(ids)) > 0).to(rewards.dtype)
    return index, member, trajectory_rewards(_where(mask, rewards), trajectory), counts


def _spread(member, totals, counts):
    """Each group's largest reward minus its smallest [G]; exactly 0 for equal ones, -inf for a group without any."""
    member, totals, num_groups = member[counts > 0], totals[counts > 0], int(member.max()) + 1
    infinite = totals.new_full((num_groups,), float("inf"))
    return (-infinite).scatter_reduce(0, member, totals, "amax") - infinite.scatter_reduce(
        0, member, totals, "amin"
    )


def group_advantages(
    rewards: Tensor, mask: Tensor, group: Tensor, trajectory: Tensor, norm_var: bool
) -> Tensor:
    """[B, T]: the reward of the trajectory minus the mean of its group (Dr. GRPO, arXiv:2503.20783). `norm_var`
    divides by the group's standard deviation + 1e-4 (GRPO, arXiv:2402.03300; unbiased and with this epsilon, as TRL
    does). Trajectories with nothing to train do not count. A group of one, or of equal rewards, gets exactly 0."""
    index, member, totals, counts = _groups(rewards, mask, group, trajectory)
    spread = _spread(member, totals, counts)
    sizes = _sum_by(member, counts, len(spread))
    means = _sum_by(member, totals, len(spread)) / sizes.clamp(min=1)
    # Equal rewards by their spread, not by their mean: 0.1 + 0.1 + 0.1 is not 3 * 0.1.
    advantages = torch.where(spread[member] > 0, (totals - means[member]) * counts, 0.0)
    if norm_var:
        variances = _sum_by(member, advantages.square(), len(spread)) / (sizes - 1).clamp(min=1)
        advantages = advantages / (variances.sqrt() + 1e-4)[member]
    return advantages[index, None] * mask


def zero_std_group_fraction(
    rewards: Tensor, mask: Tensor, group: Tensor, trajectory: Tensor
) -> Tensor:
    """The share of groups whose trajectories all have the same reward, a single one included: without a critic they
    teach nothing. Trajectories with nothing to train do not count, nor groups without any other."""
    _, member, totals, counts = _groups(rewards, mask, group, trajectory)
    spread = _spread(member, totals, counts)
    return (spread == 0).sum() / (spread >= 0).sum().clamp(min=1)


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, trajectory: Tensor, gamma: float, lamda: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [B, T] of generalised advantage estimation (arXiv:1506.02438) over sampled tokens only:
    delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lamda A_{t+1}, return = A + V, where t + 1 is the next
    sampled token of the trajectory, in its next sequence if need be, and V behind the last one is 0."""
    index = trajectory.unique(return_inverse=True)[1]
    order = index.argsort(stable=True)  # a trajectory's rows follow each other, in order of time
    row, column = mask[order].nonzero(as_tuple=True)
    row = order[row]
    # Rows [5 6 . 7] and [. 8 9 .] of one trajectory become the line [5 6 7 8 9]: [B, T] -> [N, S].
    owner = index[row]
    lengths = torch.bincount(owner)
    place = torch.arange(len(owner), device=owner.device) - (lengths.cumsum(0) - lengths)[owner]
    shape = (len(lengths), int(lengths.max()) if len(lengths) else 0)
    r, v = (x.new_zeros(shape).index_put((owner, place), x[row, column]) for x in (rewards, values))
    deltas = r - v
    deltas[:, :-1] += gamma * v[:, 1:]
    line, later = torch.zeros_like(v), v.new_zeros(len(v))
    for t in reversed(range(v.shape[1])):
        later = deltas[:, t] + gamma * lamda * later
        line[:, t] = later
    advantages = torch.zeros_like(values).index_put((row, column), line[owner, place])
    return advantages, advantages + _where(mask, values)


def whiten(advantages: Tensor, mask: Tensor) -> Tensor:
    """Mean 0 and (unbiased) standard deviation 1 over the sampled tokens of the batch, 0 elsewhere. Equal advantages
    and a single one become 0. The 1e-8 under the root is that of OpenAI's and TRL's PPO."""
    chosen = advantages[
        mask > 0
    ].double()  # in fp32 the mean of equal values may differ from them, and be blown up
    if len(chosen) < 2:
        return torch.zeros_like(advantages)
    scaled = (advantages.double() - chosen.mean()) * (chosen.var() + 1e-8).rsqrt()
    return _where(mask, scaled).to(advantages.dtype)
