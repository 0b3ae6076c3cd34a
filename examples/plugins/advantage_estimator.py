r"""An advantage estimator: the mean reward of the batch is the baseline.

    python -m rl2.trainer.ppo rollout.env_path=arithmetic actor.model_name=MODEL \
        data.path=examples/rows/arithmetic.jsonl data.prompts_per_rollout=3 \
        adv.estimator=examples/plugins/advantage_estimator.py:batch_mean

docs/algorithms.md lists what an estimator may ask for by the names of its parameters. One that asks
for `values` gets a critic and returns (advantages, returns).
"""

from torch import Tensor

from rl2.algorithms.losses import masked, sum_by_index


def batch_mean(rewards: Tensor, mask: Tensor, trajectory: Tensor) -> Tensor:
    """[B, T]: the trajectory's reward minus the mean reward of the batch, without groups."""
    ids, row_index = trajectory.unique(return_inverse=True)
    totals = sum_by_index(row_index, masked(mask, rewards).sum(1), len(ids))
    # The environment of a trajectory without a trained token failed: it does not count.
    counts = sum_by_index(row_index, mask.sum(1), len(ids)) > 0
    baseline = totals.sum() / counts.sum().clamp(min=1)
    return (totals - baseline)[row_index, None] * mask
