r"""An advantage estimator: the mean reward of the batch is the baseline.

    python -m rl2.trainer.ppo rollout.env_path=arithmetic actor.model_name=MODEL \
        data.path=examples/rows/arithmetic.jsonl data.prompts_per_rollout=3 \
        adv.estimator=examples/plugins/advantage_estimator.py:batch_mean

docs/algorithms.md lists the inputs. An estimator that declares needs=("rewards", "values") gets a
critic and returns (advantages, returns).
"""

from torch import Tensor

from rl2.algorithms.advantages import AdvantageInputs
from rl2.algorithms.losses import masked, sum_by_index


def batch_mean(x: AdvantageInputs) -> Tensor:
    """[B, T]: the trajectory's reward minus the mean reward of the batch, without groups."""
    ids, row_index = x.trajectory.unique(return_inverse=True)
    totals = sum_by_index(row_index, masked(x.mask, x.rewards).sum(1), len(ids))
    # The environment of a trajectory without a trained token failed: it does not count.
    counts = sum_by_index(row_index, x.mask.sum(1), len(ids)) > 0
    baseline = totals.sum() / counts.sum().clamp(min=1)
    return (totals - baseline)[row_index, None] * x.mask
