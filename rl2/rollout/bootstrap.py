"""adv.bootstrap: the critic's value continues the return of an answer that a length limit cut."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from rl2.batch import Batch, scored_spans
from rl2.model.token_model import TokenScores
from rl2.rollout.stats import rows_of_truncated
from rl2.rollout.trajectory import Trajectory


def continue_returns(
    batch: Batch,
    trajectories: list[Trajectory],
    score: Callable[[Batch], TokenScores],
    gamma: float,
) -> None:
    """Adds gamma V(s) to the reward at the last token of each trajectory that was cut.

    s is the state behind that token, and `score` the critic's `Worker.score`. In an estimator with
    values, as GAE, that is where V of the next state would stand (time limits as in Pardo et al.,
    arXiv:1712.00378, section 3). All processes make the same call.
    """
    is_last = torch.ones_like(batch.trajectory, dtype=torch.bool)  # of its trajectory's rows
    is_last[:-1] = batch.trajectory[1:] != batch.trajectory[:-1]
    rows = (is_last & rows_of_truncated(batch, trajectories)).nonzero()[:, 0]
    if len(rows):
        cut = batch.select(rows)
        last = torch.tensor([end - 1 for _, end in scored_spans(cut)])
        values = score(states_behind(cut, last)).values
        assert values is not None
        batch.rewards[rows, last] += gamma * values[torch.arange(len(rows)), last + 1]


def states_behind(batch: Batch, last: Tensor) -> Batch:
    """The rows with only the state behind the column `last` [B] to score, in the next column.

    There is one column more, for rows that end at the last one. The token that the scored column
    predicts is not read.
    """
    mask = torch.zeros_like(pad(batch.mask, (0, 1))).scatter(1, last[:, None] + 1, 1)
    return Batch(
        tokens=pad(batch.tokens, (0, 1)),
        mask=mask,
        engine_logps=pad(batch.engine_logps, (0, 1)),
        rewards=pad(batch.rewards, (0, 1)),
        group=batch.group,
        trajectory=batch.trajectory,
    )
