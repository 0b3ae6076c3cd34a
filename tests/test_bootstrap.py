"""adv.bootstrap: where a length limit cut an answer, the critic's value continues its return."""

import pytest
import torch
from common import advantage_inputs, make_critic, make_model, make_samples
from parity import worker_config
from transformers import AutoModelForSequenceClassification

from rl2.algorithms.advantages import gae
from rl2.batch import collate
from rl2.model.token_model import TokenScores
from rl2.rollout.bootstrap import continue_returns
from rl2.rollout.trajectory import FinishReason, Trajectory
from rl2.worker import Worker

GAMMA, LAMDA = 0.9, 0.8


def make_case():
    """A batch, in which trajectories 0 and 4 have two rows, and the odd ones and 4 were cut."""
    samples = make_samples(seed=3)
    for sample in samples:
        sample.rewards[-1] = 1.0 + sample.trajectory
    samples[1].trajectory, samples[5].trajectory = 0, 4
    reasons = {t: FinishReason.LENGTH if t % 2 or t == 4 else FinishReason.STOP for t in range(12)}
    trajectories = [Trajectory(t, 0, [], finish_reason=reasons[t]) for t in range(12)]
    return collate(samples), trajectories


def value_of(tokens):
    """A value of the state after these tokens that differs for all of them."""
    return sum((place + 1) * token for place, token in enumerate(tokens)) / 5000


def score(batch):
    values = torch.zeros(batch.mask.shape)
    for row, column in batch.mask.nonzero().tolist():
        values[row, column] = value_of(batch.tokens[row, : column + 1].tolist())
    return TokenScores(values=values)


def test_gae_of_cut_answers_is_the_loop_with_the_value_behind_them():
    batch, trajectories = make_case()
    values, expected = score(batch).values, torch.zeros(batch.mask.shape)
    for trajectory in trajectories:
        rows = (batch.trajectory == trajectory.id).nonzero()[:, 0]
        cells = [
            (row, c) for row in rows.tolist() for c in batch.mask[row].nonzero()[:, 0].tolist()
        ]
        advantage = following = 0.0
        if cells and trajectory.is_truncated:
            row, column = cells[-1]
            following = value_of(batch.tokens[row, : column + 2].tolist())
        for cell in reversed(cells):
            delta = batch.rewards[cell] + GAMMA * following - values[cell]
            advantage = delta + GAMMA * LAMDA * advantage
            expected[cell], following = advantage, values[cell]

    continue_returns(batch, trajectories, score, GAMMA)
    inputs = advantage_inputs(
        batch.mask.float(),
        batch.rewards,
        trajectory=batch.trajectory,
        values=values,
        gamma=GAMMA,
        lamda=LAMDA,
    )
    advantages, returns = gae(inputs)
    torch.testing.assert_close(advantages, expected)
    torch.testing.assert_close(returns, expected + values)


def test_by_hand():
    """Two tokens, rewards 0 and 1, values 2 and 3, and 5 behind them."""
    batch = collate(make_samples(num_groups=1, group_size=1)[:1])
    batch.tokens, batch.mask = torch.tensor([[7, 8, 9]]), torch.ones(1, 2, dtype=torch.int8)
    batch.rewards = torch.tensor([[0.0, 1.0]])
    cut = [Trajectory(0, 0, [], finish_reason=FinishReason.LENGTH)]
    continue_returns(batch, cut, lambda _: TokenScores(values=torch.tensor([[0.0, 0, 5]])), 0.5)
    inputs = advantage_inputs(
        batch.mask.float(), batch.rewards, values=torch.tensor([[2.0, 3.0]]), gamma=0.5
    )
    advantages, _ = gae(inputs)
    # 1 + 0.5 * 5 - 3 = 0.5, and 0 + 0.5 * 3 - 2 + 0.5 * 0.5 = -0.25
    assert advantages.tolist() == [[-0.25, 0.5]]


@pytest.mark.parametrize("share_prompts", [True, False])
def test_the_critic_values_the_state_behind_the_last_token(tmp_path, device, share_prompts):
    critic_name = make_critic(make_model(tmp_path / "model"))
    critic = Worker(worker_config(critic_name, share_prompts=share_prompts), device, True, 4)
    batch, trajectories = make_case()
    batch.rewards.zero_()
    continue_returns(batch, trajectories, critic.score, 1.0)
    plain = AutoModelForSequenceClassification.from_pretrained(critic_name, num_labels=1)
    cut = {t.id for t in trajectories if t.is_truncated} & set(batch.trajectory.tolist())
    assert {row.item() for row in batch.trajectory[batch.rewards.any(1)]} == cut
    for row, column in batch.rewards.nonzero().tolist():
        with torch.no_grad():
            hidden = plain.model(batch.tokens[row : row + 1, : column + 2]).last_hidden_state
            expected = plain.score(hidden)[0, -1, 0]
        torch.testing.assert_close(batch.rewards[row, column], expected, rtol=0, atol=1e-4)
