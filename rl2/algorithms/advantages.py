"""Advantage estimators: how much better each sampled token was than expected.

Shapes: B sequences, T columns (each beside the token that is predicted), N trajectories, G groups,
S sampled tokens of the longest trajectory. `mask` [B, T] is 1 where the policy sampled the token.
`trajectory` [B] says which sequences are one conversation, in order of time. `group` [B] says which
trajectories answer the same prompt. Finite values where the mask is 0 have no influence.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from rl2.algorithms.losses import Declaration, masked, sum_by_index


@dataclass(frozen=True)
class RewardPart:
    """A part of the reward: what the environment gave under one name."""

    values: Tensor  # [B] of the row's trajectory, over all its turns; 0 if it has no such part
    weight: float  # rollout.reward_weights


@dataclass(frozen=True)
class AdvantageInputs:
    """The input of an estimator: all rows of the step."""

    rewards: Tensor  # [B, T] the reward of each token, minus the KL penalty with kl.type=reward
    mask: Tensor  # [B, T] float32, as all columns
    group: Tensor  # [B]
    trajectory: Tensor  # [B]
    gamma: float  # this and the following are the settings adv.* of the config
    lamda: float
    norm_var: bool
    reward_parts: Mapping[str, RewardPart]  # by name; the weighted sum is a trajectory's reward
    # The columns below are there if the estimator declares that it needs them.
    values: Tensor | None = None  # [B, T] of the critic
    old_logps: Tensor | None = None  # [B, T] of the old policy, see `Batch`
    teacher_logps: Tensor | None = None  # [B, T]

    @cached_property
    def turns(self) -> Tensor:
        """[B, T] int64: the turn of its trajectory that each sampled token belongs to.

        Turns count from 1 in order of time, also over the sequences of a trajectory. The other
        tokens have 0, so sums over turns can keep a place for them. A turn is a run of sampled
        tokens: before each turn stands text of the template or of the environment.
        """
        is_sampled = self.mask > 0
        begins = is_sampled.clone()
        begins[:, 1:] &= ~is_sampled[:, :-1]
        ids, row_index = self.trajectory.unique(return_inverse=True)
        counts = begins.sum(1)
        # With the rows of each trajectory after each other, in order of time: the turns before a
        # row, less those before the first row of its trajectory.
        order = row_index.argsort(stable=True)
        before = torch.zeros_like(counts).scatter(0, order, counts[order].cumsum(0) - counts[order])
        of_trajectory = sum_by_index(row_index, counts, len(ids))
        before -= (of_trajectory.cumsum(0) - of_trajectory)[row_index]
        return (begins.cumsum(1) + before[:, None]) * is_sampled


# The advantages [B, T], or (advantages, returns): the critic learns the returns. Where the mask is
# 0, finite results have no influence.
Advantages = Tensor | tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Estimator(Declaration):
    """Declares an advantage estimator.

    `needs` has consequences. "values" loads a critic, which learns the returns; "old_logps" scores
    the rollout before the update; "teacher_logps" requires a teacher. Without "rewards",
    kl.type=reward is refused; with "group", so is one answer to a prompt.
    """

    compute: Callable[[AdvantageInputs], Advantages]
    settings: tuple[str, ...] = ("gamma", "lamda", "norm_var")
    needs: tuple[str, ...] = ("rewards",)
    all_needs = ("rewards", "reward_parts", "group", "values", "old_logps", "teacher_logps")


def group_advantages(x: AdvantageInputs) -> Tensor:
    """[B, T]: the trajectory's reward minus the mean of its group (Dr. GRPO, arXiv:2503.20783).

    `norm_var` divides by the group's standard deviation + 1e-4 (GRPO, arXiv:2402.03300; unbiased
    and with this epsilon, as TRL does). Trajectories without a trained token do not count. A group
    of one, or of equal rewards, gets exactly 0.
    """
    groups = _groups(x)
    deviations = groups.deviations(groups.rewards)
    if x.norm_var:
        deviations = groups.standardised(deviations)
    return groups.on_tokens(deviations)


def leave_one_out(x: AdvantageInputs) -> Tensor:
    """[B, T]: the trajectory's reward minus the mean of the others of its group.

    RLOO (arXiv:2402.14740). In a group of n it is n / (n - 1) times `group_advantages`.
    """
    groups = _groups(x)
    others = (groups.sizes / (groups.sizes - 1).clamp(min=1))[groups.member_of]
    return groups.on_tokens(groups.deviations(groups.rewards) * others)


def maxrl(x: AdvantageInputs) -> Tensor:
    """[B, T]: the trajectory's reward minus the mean of its group, divided by that mean.

    MaxRL (arXiv:2602.02710). With a reward of 1 for success and 0 for failure, the mean is the
    success rate, and the gradient that of an approximation of the log-likelihood of success: rare
    successes weigh more. A group of rewards 0 gets 0. ValueError if the mean of a group is below 0,
    where the division would turn the gradient round.
    """
    groups = _groups(x)
    means = groups.means(groups.rewards)
    if (means < 0).any():
        raise ValueError(
            f"adv.estimator=maxrl divides by the mean reward of a group, here {means.min():.3g}: "
            "it needs rewards of 0 and more, such as 1 for success; a penalty or kl.type=reward "
            "makes them negative"
        )
    scale = torch.where(means > 0, 1 / means, 0.0)[groups.member_of]
    return groups.on_tokens(groups.deviations(groups.rewards) * scale)


def gdpo(x: AdvantageInputs) -> Tensor:
    """[B, T]: the weighted sum of the parts' advantages, over its standard deviation in the batch.

    The advantage of a part is that of GRPO, with its own mean and standard deviation in the group,
    so that no part drowns the others and different rewards with equal sums stay apart (GDPO,
    arXiv:2601.05242; epsilon 1e-4 as in TRL). A `rollout.reward_weights` of 2 counts a part twice.
    Turn rewards count as one part.
    """
    groups = _groups(x)
    total = torch.zeros_like(groups.rewards)
    for part in x.reward_parts.values():
        values = groups.of_trajectories(part.values)
        total += part.weight * groups.standardised(groups.deviations(values))
    # The mean over the batch is 0 already, since it is 0 in each group.
    counted = total[groups.counts > 0]
    if len(counted) > 1:
        total = total / (counted.std() + 1e-4)
    return groups.on_tokens(total)


def reinforce_plus_plus(x: AdvantageInputs) -> Tensor:
    """[B, T]: the discounted sum of the token's own and all later rewards, whitened over the batch.

    REINFORCE++ (arXiv:2501.03262, version 9). It needs no groups. Its KL penalty is in the rewards:
    kl.type=reward.
    """
    # Without a critic and with lambda 1, GAE is that sum.
    without_critic = replace(x, values=torch.zeros_like(x.rewards), lamda=1.0, norm_var=True)
    return gae(without_critic)[0]


def reinforce_plus_plus_baseline(x: AdvantageInputs) -> Tensor:
    """[B, T]: the reward minus the mean of its group, whitened over all tokens of the batch.

    REINFORCE++ with baseline (arXiv:2501.03262, version 9). Its KL term is in the loss: k2.
    """
    return whiten(group_advantages(replace(x, norm_var=False)), x.mask)


def distillation(x: AdvantageInputs) -> Tensor:
    """[B, T]: the log-probability of each token under the teacher minus that under the policy.

    It is minus the k1 estimate of KL(policy || teacher): on-policy distillation (Lu, "On-policy
    distillation", 2025), MiniLLM's policy gradient (arXiv:2306.08543) without the tokens that
    follow. The rewards have no influence.
    """
    assert x.teacher_logps is not None and x.old_logps is not None
    return masked(x.mask, x.teacher_logps - x.old_logps)


def gae(x: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Advantages and returns [B, T] of generalised advantage estimation (arXiv:1506.02438).

    Only sampled tokens count: delta_t = r_t + gamma V_{t+1} - V_t,
    A_t = delta_t + gamma lamda A_{t+1}, return = A + V. Here t + 1 is the next sampled token of the
    trajectory, which may be in its next sequence, and V after the last one is 0. `norm_var`
    whitens the advantages over the batch; the returns stay as they are.
    """
    values = x.values
    assert values is not None
    # The rows of a trajectory follow each other in order of time.
    rows = x.trajectory.argsort(stable=True)
    sampled = x.mask[rows] > 0
    # Rows [5 6 . 7] and [. 8 9 .] of one trajectory become the line [5 6 7 8 9].
    lengths = sum_by_trajectory(sampled, x.trajectory[rows])
    on_line = torch.arange(int(lengths.max()), device=values.device) < lengths[:, None]
    lines = values.new_zeros(on_line.shape)
    line_rewards = lines.masked_scatter(on_line, x.rewards[rows].masked_select(sampled))
    line_values = lines.masked_scatter(on_line, values[rows].masked_select(sampled))
    cells = _discounted_sums(line_rewards, line_values, x.gamma, x.lamda).masked_select(on_line)
    advantages = torch.zeros_like(values)
    advantages[rows] = lines.new_zeros(sampled.shape).masked_scatter_(sampled, cells)
    returns = advantages + masked(x.mask, values)
    if x.norm_var:
        advantages = whiten(advantages, x.mask)
    return advantages, returns


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


ADVANTAGE_ESTIMATORS: dict[str, Estimator] = {
    "reinforce": Estimator(group_advantages, needs=("rewards", "group"), settings=("norm_var",)),
    "rloo": Estimator(leave_one_out, needs=("rewards", "group"), settings=()),
    "maxrl": Estimator(maxrl, needs=("rewards", "group"), settings=()),
    "gdpo": Estimator(gdpo, needs=("reward_parts", "group"), settings=()),
    "reinforce_plus_plus": Estimator(reinforce_plus_plus, needs=("rewards",), settings=("gamma",)),
    "reinforce_plus_plus_baseline": Estimator(
        reinforce_plus_plus_baseline, needs=("rewards", "group"), settings=()
    ),
    "distillation": Estimator(distillation, needs=("old_logps", "teacher_logps"), settings=()),
    "gae": Estimator(gae, needs=("rewards", "values")),
}


def sum_by_trajectory(columns: Tensor, trajectory: Tensor) -> Tensor:
    """The sum over each trajectory's rows of columns [B, T]: [N], trajectories ascending."""
    ids, row_index = trajectory.unique(return_inverse=True)
    return sum_by_index(row_index, columns.sum(1), len(ids))


@dataclass(frozen=True)
class _Groups:
    """Which trajectories are compared: N of them, ascending by id, in G groups.

    A trajectory without a trained token failed in the environment, and its reward means nothing: it
    has the deviation 0 and does not count in its group's mean and size.
    """

    mask: Tensor  # [B, T]
    row_index: Tensor  # [B] the trajectory of each row, from 0 on
    member_of: Tensor  # [N] the group of each trajectory, from 0 on
    counts: Tensor  # [N] 1, or 0 if it failed
    sizes: Tensor  # [G] the sum of counts
    rewards: Tensor  # [N]

    def means(self, values: Tensor) -> Tensor:
        """[G] of values [N]; 0 for a group in which all failed."""
        totals = sum_by_index(self.member_of, values * self.counts, len(self.sizes))
        return totals / self.sizes.clamp(min=1)

    def deviations(self, values: Tensor) -> Tensor:
        """[N]: values [N] minus the mean of their group, exactly 0 in a group of equal values."""
        means = self.means(values)
        # Equal values are found by their range, not by their mean: 0.1 + 0.1 + 0.1 is not 3 * 0.1.
        members, counted = self.member_of[self.counts > 0], values[self.counts > 0]
        largest = means.scatter_reduce(0, members, counted, "amax", include_self=False)
        smallest = means.scatter_reduce(0, members, counted, "amin", include_self=False)
        differs = (largest > smallest)[self.member_of]
        return torch.where(differs, (values - means[self.member_of]) * self.counts, 0.0)

    def standardised(self, deviations: Tensor) -> Tensor:
        """[N]: deviations [N] over the group's (unbiased) standard deviation + 1e-4."""
        squares = sum_by_index(self.member_of, deviations.square(), len(self.sizes))
        standard = (squares / (self.sizes - 1).clamp(min=1)).sqrt()
        return deviations / (standard + 1e-4)[self.member_of]

    def of_trajectories(self, values: Tensor) -> Tensor:
        """[N] of values [B] that are the same for all rows of a trajectory."""
        return torch.zeros_like(self.rewards).scatter(0, self.row_index, values)

    def on_tokens(self, values: Tensor) -> Tensor:
        """[B, T] of values [N]: that of the trajectory at each trained token, 0 elsewhere."""
        return values[self.row_index, None] * self.mask


def _groups(x: AdvantageInputs) -> _Groups:
    ids, row_index = x.trajectory.unique(return_inverse=True)
    group_ids, group_index = x.group.unique(return_inverse=True)
    member_of = torch.zeros_like(ids).scatter(0, row_index, group_index)
    counts = (sum_by_index(row_index, x.mask.sum(1), len(ids)) > 0).to(x.rewards.dtype)
    return _Groups(
        mask=x.mask,
        row_index=row_index,
        member_of=member_of,
        counts=counts,
        sizes=sum_by_index(member_of, counts, len(group_ids)),
        rewards=sum_by_index(row_index, masked(x.mask, x.rewards).sum(1), len(ids)),
    )
