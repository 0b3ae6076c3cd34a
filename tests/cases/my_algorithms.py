"""A loss and an estimator as in a user's file; test_plugins.py compares them with definitions."""

from torch import Tensor

from rl2.algorithms.advantages import AdvantageInputs, Estimator
from rl2.algorithms.losses import (
    PolicyInputs,
    PolicyLoss,
    TokenLosses,
    finite_exp,
    masked,
    sum_by_index,
)


def unclipped(x: PolicyInputs) -> TokenLosses:
    """-A rho: no clip. Logs the fraction of tokens with a ratio above 2."""
    ratio = finite_exp(x.log_ratio)
    return -x.advantages * ratio, {"large_ratio": ratio > 2}


def anchored(x: PolicyInputs) -> TokenLosses:
    """-A logp, held to the reference by the squared distance of its log-probabilities."""
    assert x.ref_logps is not None
    distance = masked(x.mask, x.logps - x.ref_logps).square()
    return -x.advantages * x.logps + 0.1 * distance, {"distance": distance}


anchored_to_reference = PolicyLoss(anchored, settings=(), needs=("ref_logps",))


def length_weighted(x: AdvantageInputs) -> Tensor:
    """[B, T]: the trajectory's reward minus its group's mean reward, weighted by length."""
    ids, row_index = x.trajectory.unique(return_inverse=True)
    groups, group_of_row = x.group.unique(return_inverse=True)
    totals = sum_by_index(row_index, masked(x.mask, x.rewards).sum(1), len(ids))
    lengths = sum_by_index(row_index, x.mask.sum(1), len(ids))  # 0: the env failed
    member_of = x.group.new_zeros(len(ids)).scatter(0, row_index, group_of_row)
    sums = sum_by_index(member_of, totals * lengths, len(groups))
    weights = sum_by_index(member_of, lengths, len(groups))
    baselines = (sums / weights.clamp(min=1))[member_of]
    return (totals - baselines)[row_index, None] * x.mask


opo = Estimator(length_weighted, needs=("rewards", "group"), settings=())
