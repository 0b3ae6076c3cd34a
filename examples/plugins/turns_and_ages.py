r"""Credit for each turn of a conversation, and a loss that trusts older tokens less.

    python -m rl2.trainer.ppo actor.model_name=MODEL \
        data.path=examples/rows/arithmetic.jsonl data.prompts_per_rollout=3 \
        rollout.env_path=examples/plugins/environment.py rollout.max_turns=2 rollout.partial=true \
        adv.estimator=examples/plugins/turns_and_ages.py:turn_credit \
        actor.loss=examples/plugins/turns_and_ages.py:aged

docs/algorithms.md lists the inputs.
"""

import torch
from torch import Tensor

from rl2.algorithms.advantages import AdvantageInputs, Estimator
from rl2.algorithms.losses import PolicyInputs, PolicyLoss, TokenLosses, masked, ppo, sum_by_index


def credit_turns(x: AdvantageInputs) -> Tensor:
    """[B, T]: the rewards of the token's own and later turns, minus their mean in the group.

    The mean is over the group's trajectories that have this turn, as turn numbers count.
    """
    ids, row_index = x.trajectory.unique(return_inverse=True)
    groups, group_of_row = x.group.unique(return_inverse=True)
    num_turns = 1 + int(x.turns.max())  # turn 0 holds the tokens that are not sampled
    turn = row_index[:, None] * num_turns + x.turns  # [B, T], a number of its own in the batch

    def by_turn(values: Tensor) -> Tensor:
        """[N, turns] the sums over the tokens of each turn of each trajectory."""
        sums = sum_by_index(turn.flatten(), values.flatten(), len(ids) * num_turns)
        return sums.view(len(ids), num_turns)

    is_played = (by_turn(x.mask) > 0).float()
    to_come = by_turn(masked(x.mask, x.rewards)).flip(1).cumsum(1).flip(1) * is_played
    member_of = x.group.new_zeros(len(ids)).scatter(0, row_index, group_of_row)
    totals = to_come.new_zeros(len(groups), num_turns).index_add(0, member_of, to_come)
    counts = torch.zeros_like(totals).index_add(0, member_of, is_played)
    credit = to_come - (totals / counts.clamp(min=1))[member_of]
    return credit.flatten()[turn] * x.mask


def age_weighted(x: PolicyInputs, decay: float = 0.9) -> TokenLosses:
    """`ppo`, with a token's loss times decay^age: older weights sampled it. Logs the mean age."""
    assert x.ages is not None
    losses, metrics = ppo(x)
    return losses * decay**x.ages, metrics | {"age": x.ages}


turn_credit = Estimator(credit_turns, needs=("rewards", "group"), settings=())
aged = PolicyLoss(age_weighted, needs=("ages",))
