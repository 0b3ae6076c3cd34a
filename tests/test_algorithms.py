"""Every formula against loops in plain Python, hand-worked cases, closed-form gradients, and TRL's own code."""

import math
import random
import statistics
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from rl2.algorithms import advantages, losses
from rl2.algorithms.advantages import (
    gae,
    group_advantages,
    trajectory_rewards,
    whiten,
    zero_std_group_fraction,
)
from rl2.algorithms.by_name import argument_names, find_function
from rl2.algorithms.losses import (
    PolicyInputs,
    cross_entropy,
    dpo_loss,
    importance_weights,
    kl_estimate,
    reward_loss,
    rollout_mismatch,
    token_weights,
    value_loss,
)

SEEDS = range(12)


def policy_loss(
    logps,
    old_logps,
    advantages,
    mask,
    weights,
    clip,
    clip_high=None,
    dual_clip=None,
    loss="ppo",
    correction=None,
):
    """`losses.policy_loss` with the inputs of the policy loss one by one."""
    clip_high = clip if clip_high is None else clip_high
    inputs = PolicyInputs(logps, old_logps, advantages, mask, clip, clip_high, dual_clip)
    return losses.policy_loss(inputs, weights, loss, correction)


KINDS = ("token_tis", "token_mask", "sequence_mask", "geometric_mask")
LOSSES = [
    dict(loss="ppo", clip=0.2),
    dict(loss="ppo", clip=0.2, clip_high=0.28),
    dict(loss="ppo", clip=0.1, dual_clip=1.2),
    dict(loss="gspo", clip=0.05, clip_high=0.1),
    dict(loss="gspo", clip=0.05, dual_clip=1.1),
    dict(loss="cispo", clip=0.2, clip_high=0.1),
]


def make_case(seed, dtype=torch.float64):
    """Ragged groups of trajectories of one to three rows each, the rows of different trajectories interleaved, some
    tokens not sampled, some trajectories without any; numbers of groups and trajectories in no order."""
    rng = random.Random(seed)
    trajectories = [
        (g, n) for g in rng.sample(range(100), rng.randint(1, 4)) for n in range(rng.randint(1, 4))
    ]
    numbers = rng.sample(range(1000), len(trajectories))
    rows = [
        (g, n)
        for (g, _), n in zip(trajectories, numbers, strict=True)
        for _ in range(rng.randint(1, 3))
    ]
    rng.shuffle(rows)
    failed = {n for n in numbers if rng.random() < 0.15}
    width = rng.randint(1, 8)
    mask = [[float(n not in failed and rng.random() < 0.7) for _ in range(width)] for _, n in rows]
    mask[0][0] = float(rows[0][1] not in failed)
    case = SimpleNamespace(mask=torch.tensor(mask, dtype=dtype))
    case.group, case.trajectory = (
        torch.tensor([g for g, _ in rows]),
        torch.tensor([n for _, n in rows]),
    )
    noise = torch.Generator().manual_seed(seed)

    def normal(scale=1.0):
        return scale * torch.randn(len(rows), width, generator=noise, dtype=dtype)

    case.old_logps = -normal().abs()
    case.logps, case.engine_logps = case.old_logps + normal(0.2), case.old_logps + normal(0.15)
    case.rewards = torch.randint(0, 2, case.mask.shape, generator=noise).to(dtype) * case.mask
    case.advantages, case.correction = normal(), normal().abs()
    case.old_values, case.returns = normal(), normal()
    case.values = case.old_values + normal(0.3)
    case.weights = torch.rand(case.mask.shape, generator=noise, dtype=dtype) * case.mask
    return case


def tokens(mask, trajectory):
    """The sampled tokens (row, column) of each trajectory in order of time."""
    found = defaultdict(list)
    for b, row in enumerate(mask.tolist()):
        for t, sampled in enumerate(row):
            if sampled:
                found[trajectory[b].item()].append((b, t))
    return found


def assert_cells(tensor, cells):
    """`tensor` holds the values of `cells`, {(row, column): value}, and 0 elsewhere."""
    expected = torch.zeros_like(tensor)
    for place, value in cells.items():
        expected[place] = value
    torch.testing.assert_close(tensor, expected, rtol=1e-9, atol=1e-9)


def assert_sums(metrics, expected):
    assert metrics.keys() == expected.keys()
    for name, value in metrics.items():
        assert value.shape == () and not value.requires_grad, name
        assert value.item() == pytest.approx(expected[name], rel=1e-9, abs=1e-9), name


def rewards_of(case):
    """{group: {trajectory: reward}} of the trajectories that count."""
    found = defaultdict(dict)
    for number, places in tokens(case.mask, case.trajectory).items():
        found[case.group[places[0][0]].item()][number] = sum(case.rewards[p].item() for p in places)
    return found


# KL


def test_kl_estimates_by_hand():
    logps, ref = torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -1.0])
    assert kl_estimate(logps, ref, "k1").tolist() == [0, -1]
    assert kl_estimate(logps, ref, "k2").tolist() == [0, 0.5]
    assert kl_estimate(logps, ref, "k3").tolist() == [0, pytest.approx(math.e - 2)]
    with pytest.raises(ValueError, match="'k4'.*k1, k2 or k3"):
        kl_estimate(logps, ref, "k4")


def test_kl_estimates_and_their_gradients_in_expectation():
    """Over all tokens of a softmax: k1 and k3 are unbiased; the gradient of k2 is that of KL(policy || reference), the
    one of k3 that of KL(reference || policy), the one of k1 nothing."""
    logits = torch.randn(
        6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    logps = logits.log_softmax(0)
    ref = torch.randn(
        6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ).log_softmax(0)
    probs = logps.exp().detach()
    estimates = {name: (probs * kl_estimate(logps, ref, name)).sum() for name in ("k1", "k2", "k3")}
    reverse, forward = (logps.exp() * (logps - ref)).sum(), (ref.exp() * (ref - logps)).sum()
    assert estimates["k1"].item() == pytest.approx(reverse.item())
    assert estimates["k3"].item() == pytest.approx(reverse.item())

    def gradient(loss):
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    torch.testing.assert_close(gradient(estimates["k2"]), gradient(reverse))
    torch.testing.assert_close(gradient(estimates["k3"]), gradient(forward))
    torch.testing.assert_close(gradient(estimates["k1"]), torch.zeros_like(logits))
    assert (gradient(forward) - gradient(reverse)).abs().max() > 0.05


# Advantages


@pytest.mark.parametrize("seed", SEEDS)
def test_trajectory_rewards(seed):
    case = make_case(seed)
    expected = defaultdict(float)
    for number, row in zip(case.trajectory.tolist(), case.rewards.tolist(), strict=True):
        expected[number] += sum(row)
    assert trajectory_rewards(case.rewards, case.trajectory).tolist() == [
        expected[n] for n in sorted(expected)
    ]


@pytest.mark.parametrize("norm_var", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_group_advantages(seed, norm_var):
    case, cells = make_case(seed), {}
    for rewards in rewards_of(case).values():
        mean = sum(rewards.values()) / len(rewards)
        for number, places in tokens(case.mask, case.trajectory).items():
            if number in rewards:
                std = (
                    statistics.stdev(rewards.values()) if norm_var and len(rewards) > 1 else 0.9999
                )
                cells |= {place: (rewards[number] - mean) / (std + 1e-4) for place in places}
    assert_cells(
        group_advantages(case.rewards, case.mask, case.group, case.trajectory, norm_var), cells
    )


def test_group_advantages_by_hand():
    """Group 3: trajectory 7 in two rows with reward 1 + 2, trajectory 5 with 0, trajectory 6 failed. Group 0: a single
    one left. Group 1: three times 0.1, whose mean in floating point is not 0.1."""
    mask = torch.tensor([[0.0, 1], [1, 0], [1, 1], [0, 0], [1, 1], [0, 0], [1, 0], [1, 0], [1, 0]])
    rewards = torch.tensor(
        [[0.0, 1], [2, 0], [0, 0], [0, 9], [0, 5], [4, 0], [0.1, 0], [0.1, 0], [0.1, 0]]
    )
    group = torch.tensor([3, 3, 3, 3, 0, 0, 1, 1, 1])
    trajectory = torch.tensor([7, 7, 5, 6, 4, 3, 0, 1, 2])
    expected = torch.tensor(
        [[0, 1.5], [1.5, 0], [-1.5, -1.5], [0, 0], [0, 0], [0, 0], [0, 0], [0, 0], [0, 0]]
    )
    assert group_advantages(rewards, mask, group, trajectory, False).equal(expected)
    scale = 3 / math.sqrt(2) + 1e-4  # the unbiased standard deviation of 3 and 0
    torch.testing.assert_close(
        group_advantages(rewards, mask, group, trajectory, True), expected / scale
    )
    assert group_advantages(rewards, mask, group, trajectory, True)[6:].eq(0).all()
    assert zero_std_group_fraction(rewards, mask, group, trajectory).item() == pytest.approx(2 / 3)


@pytest.mark.parametrize("norm_var", [False, True])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e6 + 0.1])
def test_equal_rewards_give_exactly_zero(reward, norm_var):
    rewards, mask, group = (
        torch.full((7, 1), reward),
        torch.ones(7, 1),
        torch.zeros(7, dtype=torch.int64),
    )
    assert group_advantages(rewards, mask, group, torch.arange(7), norm_var).eq(0).all()
    assert zero_std_group_fraction(rewards, mask, group, torch.arange(7)).item() == 1
    assert whiten(rewards, mask).eq(0).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_zero_std_group_fraction(seed):
    case = make_case(seed)
    groups = [len(set(rewards.values())) == 1 for rewards in rewards_of(case).values()]
    share = zero_std_group_fraction(case.rewards, case.mask, case.group, case.trajectory)
    assert share.item() == pytest.approx(sum(groups) / max(1, len(groups)))


@pytest.mark.parametrize("gamma, lamda", [(1.0, 1.0), (0.9, 0.95), (1.0, 0.0), (0.97, 1.0)])
@pytest.mark.parametrize("seed", SEEDS)
def test_gae(seed, gamma, lamda):
    case, cells, returns = make_case(seed), {}, {}
    for places in tokens(case.mask, case.trajectory).values():
        advantage = following = 0.0
        for place in reversed(places):
            value = case.values[place].item()
            advantage = (
                case.rewards[place].item() + gamma * following - value + gamma * lamda * advantage
            )
            cells[place], returns[place], following = advantage, advantage + value, value
    found = gae(case.rewards, case.values, case.mask, case.trajectory, gamma, lamda)
    assert_cells(found[0], cells)
    assert_cells(found[1], returns)


def test_gae_by_hand():
    """One trajectory in rows 0 and 2 with a tool's token in between, reward 1 at its end; another in row 1."""
    mask = torch.tensor([[1.0, 0, 1], [0, 1, 0], [0, 1, 0]])
    values = torch.tensor([[0.5, 9, 0.25], [9, 2, 9], [9, 0.75, 9]])
    rewards = torch.tensor([[0.0, 0, 0], [0, -1, 0], [0, 1, 0]])
    advantages, returns = gae(rewards, values, mask, torch.tensor([4, 2, 4]), 0.5, 0.5)
    # Deltas 0.5 * 0.25 - 0.5, 0.5 * 0.75 - 0.25 and 1 - 0.75; each advantage adds a quarter of the next.
    assert advantages.tolist() == [[-0.328125, 0, 0.1875], [0, -3, 0], [0, 0.25, 0]]
    assert returns.tolist() == [[0.171875, 0, 0.4375], [0, -1, 0], [0, 1, 0]]


@pytest.mark.parametrize("seed", SEEDS)
def test_whiten(seed):
    case, cells = make_case(seed), {}
    chosen = {
        place: case.advantages[place].item()
        for line in tokens(case.mask, case.trajectory).values()
        for place in line
    }
    if len(chosen) > 1:
        mean, variance = statistics.mean(chosen.values()), statistics.variance(chosen.values())
        cells = {
            place: (value - mean) / math.sqrt(variance + 1e-8) for place, value in chosen.items()
        }
    assert_cells(whiten(case.advantages, case.mask), cells)


def test_whiten_of_one_token_or_none():
    advantages = torch.tensor([[3.0, 4.0]])
    assert whiten(advantages, torch.tensor([[0.0, 1.0]])).tolist() == [[0, 0]]
    assert whiten(advantages, torch.zeros(1, 2)).tolist() == [[0, 0]]


# Averages


@pytest.mark.parametrize("seed", SEEDS)
def test_token_weights(seed):
    case = make_case(seed)
    lines = tokens(case.mask, case.trajectory).values()
    total = sum(len(line) for line in lines)

    def cells(weight):
        return {place: weight(line) for line in lines for place in line}

    assert_cells(token_weights(case.mask, case.trajectory, "token"), cells(lambda line: 1 / total))
    assert_cells(
        token_weights(case.mask, case.trajectory, "sequence"),
        cells(lambda line: 1 / len(line) / len(lines)),
    )
    assert_cells(
        token_weights(case.mask, case.trajectory, "constant", 16),
        cells(lambda line: 1 / 16 / len(lines)),
    )


def test_token_weights_by_hand_and_what_is_refused():
    mask, trajectory = (
        torch.tensor([[1.0, 1, 0], [1, 1, 0], [0, 0, 0], [0, 0, 1]]),
        torch.tensor([5, 5, 6, 2]),
    )
    assert token_weights(mask, trajectory, "token")[0].tolist() == pytest.approx([0.2, 0.2, 0])
    assert token_weights(mask, trajectory, "sequence").sum(1).tolist() == [0.25, 0.25, 0, 0.5]
    assert token_weights(mask, trajectory, "constant", 4)[3].tolist() == [0, 0, 0.125]
    for average in ("token", "sequence", "constant"):
        assert token_weights(torch.zeros(2, 3), torch.tensor([0, 1]), average, 4).eq(0).all()
    with pytest.raises(ValueError, match="'mean'.*token, sequence or constant"):
        token_weights(mask, trajectory, "mean")
    for constant in (None, 0, -3):
        with pytest.raises(ValueError, match=f"is {constant}: give a length"):
            token_weights(mask, trajectory, "constant", constant)


# Policy loss


def loop_policy_loss(case, loss, clip, clip_high=None, dual_clip=None, correction=None):
    """The loss, its metrics, and the gradient of each token's logp."""
    high, total, cells = 1 + (clip if clip_high is None else clip_high), 0.0, {}
    metrics = {"clip_ratio": 0.0, "approx_kl": 0.0, "ratio": 0.0}
    for b, row in enumerate(case.mask.tolist()):
        places = [(b, t) for t, sampled in enumerate(row) if sampled]
        log_ratios = [(case.logps[p] - case.old_logps[p]).item() for p in places]
        for place, log_ratio in zip(places, log_ratios, strict=True):
            rho = math.exp(sum(log_ratios) / len(log_ratios) if loss == "gspo" else log_ratio)
            advantage, weight = case.advantages[place].item(), case.weights[place].item()
            factor = weight if correction is None else weight * correction[place].item()
            if loss == "cispo":
                clipped = rho > high
                slope = -min(rho, high) * advantage
                total += factor * slope * case.logps[place].item()
            else:
                clipped = rho > high if advantage > 0 else rho < 1 - clip
                value = -min(rho * advantage, min(max(rho, 1 - clip), high) * advantage)
                if dual_clip is not None and advantage < 0 and value > dual_clip * -advantage:
                    clipped, value = True, dual_clip * -advantage
                total += factor * value
                slope = 0.0 if clipped else -rho * advantage
            cells[place] = factor * slope
            metrics["clip_ratio"] += weight * clipped
            metrics["approx_kl"] += weight * (math.exp(log_ratio) - 1 - log_ratio)
            metrics["ratio"] += weight * rho
    return total, metrics, cells


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("options", LOSSES)
@pytest.mark.parametrize("seed", SEEDS)
def test_policy_loss_and_its_gradient(seed, options, corrected):
    case = make_case(seed)
    correction = case.correction if corrected else None
    logps = case.logps.requires_grad_()
    loss, metrics = policy_loss(
        logps,
        case.old_logps,
        case.advantages,
        case.mask,
        case.weights,
        correction=correction,
        **options,
    )
    total, expected, cells = loop_policy_loss(case, correction=correction, **options)
    assert loss.item() == pytest.approx(total, rel=1e-9, abs=1e-9)
    assert_sums(metrics, expected)
    assert_cells(torch.autograd.grad(loss, logps)[0], cells)


def test_the_random_cases_reach_every_branch():
    """Both clips and the dual one, so that the test above says something."""
    for options in LOSSES:
        cases = [make_case(seed) for seed in SEEDS]
        shares = [
            loop_policy_loss(case, **options)[1]["clip_ratio"] / case.weights.sum().item()
            for case in cases
        ]
        assert 0.02 < statistics.mean(shares) < 0.9, options
    dual = sum(loop_policy_loss(case, **LOSSES[2])[1]["clip_ratio"] for case in cases)
    assert dual > sum(
        loop_policy_loss(case, loss="ppo", clip=0.1)[1]["clip_ratio"] for case in cases
    )


def test_policy_loss_by_hand():
    """Ratios 2 and 1/2 against a clip of 0.2 / 0.5, each with advantage 1 and -1."""
    logps = torch.tensor([[2.0, 2.0, 0.5, 0.5]]).log().requires_grad_()
    advantages, mask, weights = (
        torch.tensor([[1.0, -1, 1, -1]]),
        torch.ones(1, 4),
        torch.full((1, 4), 0.25),
    )
    old = torch.zeros(1, 4)
    loss, metrics = policy_loss(logps, old, advantages, mask, weights, 0.2, clip_high=0.5)
    assert loss.item() == pytest.approx((-1.5 + 2 - 0.5 + 0.8) / 4)
    assert metrics["clip_ratio"].item() == 0.5 and metrics["ratio"].item() == pytest.approx(1.25)
    assert torch.autograd.grad(loss, logps)[0].tolist() == [pytest.approx([0, 0.5, -0.125, 0])]
    loss, metrics = policy_loss(
        logps, old, advantages, mask, weights, 0.2, clip_high=0.5, dual_clip=1.75
    )
    assert loss.item() == pytest.approx((-1.5 + 1.75 - 0.5 + 0.8) / 4)
    assert metrics["clip_ratio"].item() == 0.75
    with pytest.raises(ValueError, match="actor.loss=ppg: choose ppo, gspo, cispo"):
        policy_loss(logps, old, advantages, mask, weights, 0.2, loss="ppg")


@pytest.mark.parametrize("options", LOSSES)
@pytest.mark.parametrize("seed", SEEDS)
def test_at_ratio_one_the_gradient_is_exactly_the_policy_gradient(seed, options):
    case = make_case(seed, torch.float32)
    logps = case.logps.requires_grad_()
    # Old logps that are the current ones and a correction made of them, undetached: no gradient may flow there.
    correction = 1 + (logps - logps.detach())
    loss, metrics = policy_loss(
        logps, logps, case.advantages, case.mask, case.weights, correction=correction, **options
    )
    assert torch.autograd.grad(loss, logps)[0].equal(-case.advantages * case.weights)
    assert metrics["clip_ratio"].item() == 0 and metrics["approx_kl"].item() == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_gspo_has_the_gradient_of_the_sequence_objective(seed):
    """With sequence weights and one advantage a row, it is mean over rows of min(s A, clip(s) A), equation 5."""
    case = make_case(seed)
    mask, logps = case.mask, case.logps.requires_grad_()
    rows = torch.arange(len(mask))
    advantages = case.advantages[:, :1].expand_as(mask)
    alive = mask.sum(1) > 0
    if not alive.any():
        return
    s = ((logps - case.old_logps) * mask)[alive].sum(1).div(mask[alive].sum(1)).exp()
    a = advantages[alive, 0]
    objective = -torch.min(s * a, s.clamp(0.95, 1.1) * a).mean()
    weights = token_weights(mask, rows, "sequence")
    loss, _ = policy_loss(logps, case.old_logps, advantages, mask, weights, 0.05, 0.1, loss="gspo")
    assert loss.item() == pytest.approx(objective.item())
    found, expected = torch.autograd.grad(loss, logps)[0], torch.autograd.grad(objective, logps)[0]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
@pytest.mark.parametrize("shift", [1e3, -1e3])
def test_an_absurd_ratio_stays_finite(loss, shift):
    logps, old = (
        torch.tensor([[-1.0, -1.0, -1.0]], requires_grad=True),
        torch.full((1, 3), -1.0 - shift),
    )
    advantages, ones = torch.tensor([[1.0, -1.0, 0.0]]), torch.ones(1, 3)
    value, metrics = policy_loss(logps, old, advantages, ones, ones, 0.2, loss=loss)
    value.backward()
    for number in (
        value,
        logps.grad,
        *metrics.values(),
        *rollout_mismatch(logps, old, ones).values(),
    ):
        assert number.isfinite().all()
    for estimator in ("k1", "k2", "k3"):
        assert kl_estimate(logps, old, estimator).isfinite().all()


# Mismatch


@pytest.mark.parametrize("cap", [1.05, 1.3])
@pytest.mark.parametrize("seed", SEEDS)
def test_importance_weights(seed, cap):
    case, expected = make_case(seed), {kind: {} for kind in KINDS}
    for b, row in enumerate(case.mask.tolist()):
        places = [(b, t) for t, sampled in enumerate(row) if sampled]
        rhos = [math.exp((case.old_logps[p] - case.engine_logps[p]).item()) for p in places]
        product = math.prod(rhos)
        for place, rho in zip(places, rhos, strict=True):
            expected["token_tis"][place] = min(rho, cap)
            expected["token_mask"][place] = rho if 1 / cap <= rho <= cap else 0.0
            expected["sequence_mask"][place] = product if product <= cap else 0.0
            expected["geometric_mask"][place] = float(1 / cap <= product ** (1 / len(rhos)) <= cap)
    old, engine = case.old_logps.requires_grad_(), case.engine_logps.requires_grad_()
    for kind in KINDS:
        found = importance_weights(old, engine, case.mask, kind, cap)
        assert found.shape == case.mask.shape and not found.requires_grad
        assert_cells(found * case.mask, expected[kind])


def test_importance_weights_by_hand():
    old = torch.tensor([[4.0, 0.5], [1.1, 1.2]]).log()
    found = {
        kind: importance_weights(old, torch.zeros(2, 2), torch.ones(2, 2), kind, 2.0)
        for kind in KINDS
    }
    torch.testing.assert_close(found["token_tis"], torch.tensor([[2.0, 0.5], [1.1, 1.2]]))
    torch.testing.assert_close(found["token_mask"], torch.tensor([[0.0, 0.5], [1.1, 1.2]]))
    torch.testing.assert_close(found["geometric_mask"], torch.ones(2, 2))
    found = importance_weights(old, torch.zeros(2, 2), torch.ones(2, 2), "sequence_mask", 1.9)
    torch.testing.assert_close(found, torch.tensor([[0.0, 0.0], [1.32, 1.32]]))
    with pytest.raises(ValueError, match="'tis'.*token_tis"):
        importance_weights(old, old, old, "tis", 2.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_mismatch(seed):
    case = make_case(seed)
    expected = {"logp_difference": 0.0, "kl_k1": 0.0, "kl_k3": 0.0, "outside": 0.0}
    for places in tokens(case.mask, case.trajectory).values():
        for place in places:
            weight, d = (
                case.weights[place].item(),
                (case.engine_logps[place] - case.old_logps[place]).item(),
            )
            expected["logp_difference"] += weight * abs(d)
            expected["kl_k1"] += weight * d
            expected["kl_k3"] += weight * (math.exp(-d) - 1 + d)
            expected["outside"] += weight * (not 0.9 <= math.exp(-d) <= 1.1)
    assert_sums(
        rollout_mismatch(case.old_logps.requires_grad_(), case.engine_logps, case.weights), expected
    )


# Value loss


@pytest.mark.parametrize("seed", SEEDS)
def test_value_loss_and_its_gradient(seed):
    case, clip, total, cells = make_case(seed), 0.2, 0.0, {}
    expected = {"clip_ratio": 0.0, "value": 0.0}
    for places in tokens(case.mask, case.trajectory).values():
        for place in places:
            value, old, target, weight = (
                column[place].item()
                for column in (case.values, case.old_values, case.returns, case.weights)
            )
            plain, clipped = (
                (value - target) ** 2,
                (min(max(value, old - clip), old + clip) - target) ** 2,
            )
            total += weight * max(plain, clipped)
            cells[place] = 2 * weight * (value - target) if plain >= clipped else 0.0
            expected["clip_ratio"] += weight * (clipped > plain)
            expected["value"] += weight * value
    values = case.values.requires_grad_()
    loss, metrics = value_loss(values, case.old_values, case.returns, case.weights, clip)
    assert loss.item() == pytest.approx(total, rel=1e-9, abs=1e-9)
    assert_sums(metrics, expected)
    assert_cells(torch.autograd.grad(loss, values)[0], cells)


def test_value_loss_by_hand():
    """Values that moved by 0, 1 (away from the return) and 1 (towards it) with a clip of 0.5; no factor 1/2."""
    values = torch.tensor([[1.0, 2.0, 2.0]], requires_grad=True)
    old, returns, weights = (
        torch.ones(1, 3, requires_grad=True),
        torch.tensor([[3.0, 0.0, 3.0]]),
        torch.ones(1, 3),
    )
    loss, metrics = value_loss(values, old, returns, weights, 0.5)
    assert (
        loss.item() == 4 + 4 + 1.5**2
        and metrics["clip_ratio"].item() == 1
        and metrics["value"].item() == 5
    )
    gradients = torch.autograd.grad(loss, (values, old), allow_unused=True)
    assert gradients[0].tolist() == [[-4, 4, 0]] and gradients[1] is None


# Losses of rows that are given, not sampled


def test_cross_entropy_by_hand():
    logps, weights = (
        torch.tensor([[-1.0, -2.0, -9.0]], requires_grad=True),
        torch.tensor([[0.25, 0.75, 0.0]]),
    )
    loss = cross_entropy(logps, weights)
    assert loss.item() == 1.75
    assert torch.autograd.grad(loss, logps)[0].tolist() == [[-0.25, -0.75, 0]]


def make_pairs(seed):
    """Four pairs of rows with ragged masks, each row weighing 1/8, and a margin for each pair."""
    noise = torch.Generator().manual_seed(seed)
    case = SimpleNamespace()
    for name in ("logps", "ref_logps", "values"):
        setattr(case, name, 2 * torch.randn(8, 5, generator=noise, dtype=torch.float64))
    case.mask = (torch.rand(8, 5, generator=noise) < 0.6).double()
    case.mask[:, 2] = 1
    case.weights = token_weights(case.mask, torch.arange(8), "sequence")
    case.margin = torch.randn(4, generator=noise, dtype=torch.float64).repeat_interleave(2)
    return case


def softplus(x):
    return math.log1p(math.exp(-abs(x))) + max(x, 0)


DPO = [("sigmoid", 0.0), ("sigmoid", 0.2), ("hinge", 0.0), ("ipo", 0.0)]


@pytest.mark.parametrize(("loss", "smoothing"), DPO)
@pytest.mark.parametrize("seed", range(6))
def test_dpo_loss(seed, loss, smoothing):
    case, beta = make_pairs(seed), 0.3
    total, cells, kl = 0.0, {}, 0.0
    told = defaultdict(float)
    for pair in range(4):
        rows = (2 * pair, 2 * pair + 1)
        d = [
            [(case.logps - case.ref_logps)[row, t].item() for t in range(5) if case.mask[row, t]]
            for row in rows
        ]
        sizes = [len(x) if loss == "ipo" else 1 for x in d]
        m = sum(d[0]) / sizes[0] - sum(d[1]) / sizes[1]
        if loss == "sigmoid":
            total += ((1 - smoothing) * softplus(-beta * m) + smoothing * softplus(beta * m)) / 4
            slope = beta * (smoothing - 1 / (1 + math.exp(beta * m)))
        elif loss == "hinge":
            total += max(0.0, 1 - beta * m) / 4
            slope = -beta * (beta * m < 1)
        else:
            total += (m - 1 / (2 * beta)) ** 2 / 4
            slope = 2 * (m - 1 / (2 * beta))
        for sign, row, size in zip((1, -1), rows, sizes, strict=True):
            cells |= {(row, t): sign * slope / size / 4 for t in range(5) if case.mask[row, t]}
        kl += sum(sum(math.exp(x) - 1 - x for x in part) / len(part) for part in d) / 8
        chosen, rejected = (beta * sum(part) for part in d)
        told["chosen_reward"] += chosen / 4
        told["rejected_reward"] += rejected / 4
        told["accuracy"] += (chosen > rejected) / 4
        told["margin"] += (chosen - rejected) / 4
    logps = case.logps.requires_grad_()
    found, metrics = dpo_loss(logps, case.ref_logps, case.mask, case.weights, beta, loss, smoothing)
    assert found.item() == pytest.approx(total, rel=1e-9)
    assert_sums(metrics, {**told, "kl": kl})
    assert_cells(torch.autograd.grad(found, logps)[0], cells)
    with pytest.raises(ValueError, match="dpo.loss=none: choose sigmoid, ipo, hinge"):
        dpo_loss(logps, case.ref_logps, case.mask, case.weights, beta, "none", 0.0)


@pytest.mark.parametrize("center", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(6))
def test_reward_loss(seed, center):
    case = make_pairs(seed)
    total, cells = 0.0, {}
    last = [max(t for t in range(5) if case.mask[row, t]) for row in range(8)]
    weights = torch.zeros_like(case.mask)
    for row, t in enumerate(last):
        weights[row, t] = 1 / 8
    told = defaultdict(float)
    for pair in range(4):
        chosen, rejected = (case.values[row, last[row]].item() for row in (2 * pair, 2 * pair + 1))
        x = chosen - rejected - case.margin[2 * pair].item()
        total += (softplus(-x) + center * (chosen + rejected) ** 2) / 4
        for sign, row in ((1, 2 * pair), (-1, 2 * pair + 1)):
            cells[row, last[row]] = (
                -sign / (1 + math.exp(x)) + 2 * center * (chosen + rejected)
            ) / 4
        told["chosen_reward"] += chosen / 4
        told["rejected_reward"] += rejected / 4
        told["accuracy"] += (chosen > rejected) / 4
        told["margin"] += (chosen - rejected) / 4
    values = case.values.requires_grad_()
    found, metrics = reward_loss(values, weights, case.margin, center)
    assert found.item() == pytest.approx(total, rel=1e-9)
    assert_sums(metrics, told)
    assert_cells(torch.autograd.grad(found, values)[0], cells)


@pytest.mark.parametrize("garbage", [0.0, 1e30, -3e38])
def test_pairs_may_be_split_and_padding_holds_anything(garbage):
    """Losses and metrics of any parts of whole pairs add up, a part without any included."""

    def everything(case, rows):
        part = {name: column[rows].float() for name, column in vars(case).items()}
        for name in ("logps", "ref_logps", "values"):
            part[name] = torch.where(part["mask"] > 0, part[name], garbage)
        columns = (part["logps"], part["ref_logps"], part["mask"], part["weights"])
        found = [dpo_loss(*columns, 0.2, *kind) for kind in DPO]
        found.append(reward_loss(part["values"], part["weights"], part["margin"], 0.1))
        found.append((cross_entropy(part["logps"], part["weights"]), {}))
        return torch.stack([x for loss, metrics in found for x in (loss, *metrics.values())])

    case = make_pairs(3)
    parts = [torch.tensor(rows, dtype=torch.long) for rows in ([6, 7, 2, 3], [], [0, 1, 4, 5])]
    whole = everything(case, torch.arange(8))
    torch.testing.assert_close(sum(everything(case, rows) for rows in parts), whole)
    garbage = 0.0
    assert whole.equal(everything(case, torch.arange(8)))


# Functions by name


def test_a_function_of_the_users_file_is_found_and_gets_what_it_asks_for(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def reinforce(logps, advantages):\n"
        "    return -advantages * logps, {'logp': logps}\n"
        "def greedy(logps, secret):\n    return logps, {}\n"
        "text = 'no function'\n"
    )
    case = make_case(0)
    columns = (case.logps, case.old_logps, case.advantages, case.mask, case.weights, 0.2)
    loss, metrics = policy_loss(*columns, loss=f"{file}:reinforce")
    expected = -(case.logps * case.advantages * case.weights).sum()
    torch.testing.assert_close(loss, expected)
    assert metrics.keys() == {"logp", "approx_kl"}
    assert argument_names(find_function(f"{file}:reinforce", {}, "key")) == ("logps", "advantages")
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'secret'"):
        policy_loss(*columns, loss=f"{file}:greedy")
    for name, message in (
        (f"{file}:nothing", f"actor.loss={file}:nothing: {file} has no function nothing"),
        (f"{file}:text", "has no function text"),
        (f"{tmp_path}/none.py:f", "none.py: there is no such file"),
        ("ppo2", "choose ppo, gspo, cispo, or your own as path/to/file.py:function"),
    ):
        with pytest.raises(ValueError) as raised:
            policy_loss(*columns, loss=name)
        assert message in str(raised.value)
    file = tmp_path / "broken.py"
    file.write_text("1 / 0")
    with pytest.raises(ValueError, match="broken.py: the file fails on import: ZeroDivisionError"):
        policy_loss(*columns, loss=f"{file}:f")


# What holds for all of them


def losses_of(case):
    """Every loss and weighted metric of the rows of `case`, with a gradient where there is one."""
    found = {}
    for options in LOSSES:
        loss, metrics = policy_loss(
            case.logps,
            case.old_logps,
            case.advantages,
            case.mask,
            case.weights,
            correction=case.correction,
            **options,
        )
        found |= {
            f"{options}": loss,
            **{f"{options} {name}": value for name, value in metrics.items()},
        }
    for name in ("k1", "k2", "k3"):
        found[name] = (kl_estimate(case.logps, case.ref_logps, name) * case.weights).sum()
    for kind in KINDS:
        weights = importance_weights(case.old_logps, case.engine_logps, case.mask, kind, 1.1)
        found[kind] = (weights * case.weights).sum()
    found |= rollout_mismatch(case.old_logps, case.engine_logps, case.weights)
    loss, metrics = value_loss(case.values, case.old_values, case.returns, case.weights, 0.2)
    return found | {
        "value_loss": loss,
        "value_clip": metrics["clip_ratio"],
        "value": metrics["value"],
    }


def columns_of(case):
    """Everything that is computed before the loss."""
    where = (case.mask, case.group, case.trajectory)
    advantages, returns = gae(case.rewards, case.values, case.mask, case.trajectory, 0.9, 0.95)
    return {
        "plain": group_advantages(case.rewards, *where, False),
        "norm_var": group_advantages(case.rewards, *where, True),
        "share": zero_std_group_fraction(case.rewards, *where),
        "advantages": advantages,
        "returns": returns,
        "whiten": whiten(case.advantages, case.mask),
    }


def make_full_case(seed, dtype=torch.float64):
    case = make_case(seed, dtype)
    case.ref_logps = case.engine_logps * 1.1
    return case


def losses_and_gradients(case):
    """`losses_of`, and the gradient of the sum of those that have one in logps and values."""
    case.logps, case.values = (
        case.logps.detach().requires_grad_(),
        case.values.detach().requires_grad_(),
    )
    found = losses_of(case)
    return found, torch.autograd.grad(
        sum(x for x in found.values() if x.requires_grad), (case.logps, case.values)
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_splitting_rows_changes_nothing(seed):
    """Losses, metrics and gradients of any parts add up to those of the whole, a part without rows included."""
    case = make_full_case(seed)
    whole, gradients = losses_and_gradients(case)
    order = torch.randperm(len(case.mask), generator=torch.Generator().manual_seed(seed))
    sums, split = defaultdict(float), [torch.zeros_like(case.mask), torch.zeros_like(case.mask)]
    for rows in (*order.tensor_split(3), order[:0]):
        part = SimpleNamespace(
            **{name: column.detach()[rows] for name, column in vars(case).items()}
        )
        found, of_part = losses_and_gradients(part)
        for name, value in found.items():
            sums[name] = sums[name] + value
        for into, gradient in zip(split, of_part, strict=True):
            into[rows] = gradient
    for name, value in whole.items():
        torch.testing.assert_close(sums[name], value, msg=lambda text, name=name: f"{name}: {text}")
    for found, expected in zip(split, gradients, strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("garbage", [1e30, -1e30, 1e4, -3e38])
@pytest.mark.parametrize("seed", SEEDS)
def test_what_stands_at_padding_changes_nothing(seed, garbage):
    """In fp32, where it would overflow; and the gradient at padding is 0."""
    clean, dirty = make_full_case(seed, torch.float32), make_full_case(seed, torch.float32)
    sign = torch.Generator().manual_seed(seed)
    for name, column in vars(dirty).items():
        if name not in ("mask", "weights", "group", "trajectory"):
            noise = garbage * torch.randint(-1, 2, column.shape, generator=sign)
            setattr(dirty, name, torch.where(dirty.mask > 0, column, noise))
    for name, value in columns_of(clean).items():
        assert columns_of(dirty)[name].equal(value), name
    (expected, gradients), (found, of_dirty) = (
        losses_and_gradients(clean),
        losses_and_gradients(dirty),
    )
    for name, value in expected.items():
        assert found[name].equal(value), name
    for expected, got in zip(gradients, of_dirty, strict=True):
        assert got.equal(expected) and got[dirty.mask == 0].eq(0).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_failed_trajectory_changes_nothing_for_the_others(seed):
    case = make_full_case(seed)
    rows = torch.cat([torch.arange(len(case.mask)), torch.tensor([0, 0])])
    more = SimpleNamespace(**{name: column[rows].clone() for name, column in vars(case).items()})
    more.mask[-2:], more.trajectory[-2:], more.rewards[-2:] = 0, torch.tensor([5000, 5001]), 7.0
    more.group[-1] = 5000
    for name, value in columns_of(case).items():
        got = columns_of(more)[name]
        torch.testing.assert_close(got if got.dim() == 0 else got[:-2], value)
        assert got.dim() == 0 or got[-2:].eq(0).all()
    for average in ("token", "sequence", "constant"):
        got = token_weights(more.mask, more.trajectory, average, 8)
        torch.testing.assert_close(got[:-2], token_weights(case.mask, case.trajectory, average, 8))


def test_a_batch_without_a_trained_token_gives_zeros():
    case = make_full_case(0, torch.float32)
    case.mask, case.weights = torch.zeros_like(case.mask), torch.zeros_like(case.mask)
    found, gradients = losses_and_gradients(case)
    for name, value in {
        **columns_of(case),
        **found,
        "logps": gradients[0],
        "values": gradients[1],
    }.items():
        assert value.eq(0).all(), name


def test_no_input_is_edited():
    case = make_full_case(0)
    before = {name: column.clone() for name, column in vars(case).items()}
    losses_of(case), columns_of(case), trajectory_rewards(case.rewards, case.trajectory)
    for average in ("token", "sequence", "constant"):
        token_weights(case.mask, case.trajectory, average, 8)
    for name, column in vars(case).items():
        assert column.equal(before[name]), name


def test_only_torch_is_imported():
    for module in (advantages, losses):
        imported = {value.__name__ for value in vars(module).values() if type(value) is type(torch)}
        assert imported == {"torch"}, module


# TRL's own code (1.16: its PPO trainer is gone, so GAE and the value loss have no counterpart there)


def make_trl(**settings):
    """A GRPOTrainer with nothing but the attributes that its loss and its scoring read."""
    trainer_module = pytest.importorskip("trl.trainer.grpo_trainer")
    trainer = trainer_module.GRPOTrainer.__new__(trainer_module.GRPOTrainer)
    arguments = SimpleNamespace(
        delta=settings.pop("delta", None),
        use_bias_correction_kl=False,
        steps_per_generation=1,
        per_device_train_batch_size=8,
        gradient_checkpointing_kwargs=None,
    )
    defaults = dict(
        args=arguments,
        model=torch.nn.Linear(1, 1),
        beta=0.0,
        epsilon_low=0.2,
        epsilon_high=0.28,
        loss_type="grpo",
        importance_sampling_level="token",
        top_entropy_quantile=1.0,
        aux_loss_enabled=False,
        use_vllm=False,
        off_policy_mask_threshold=None,
        vllm_importance_sampling_correction=False,
        max_completion_length=11,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        accelerator=SimpleNamespace(
            num_processes=1,
            process_index=0,
            device=torch.device("cpu"),
            gather=lambda x: x,
            reduce=lambda x, reduction: x,
        ),
    )
    trainer.__dict__.update({**defaults, **settings})
    return trainer


def trl_case(seed):
    """Two groups of three answers with a tool's tokens inside; every row has something to train, as TRL expects."""
    noise = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 8, (6,), generator=noise)
    case = SimpleNamespace(
        completion_mask=(torch.arange(7) < lengths[:, None]).double(), lengths=lengths.tolist()
    )
    case.tool_mask = (torch.rand(6, 7, generator=noise) < 0.7).double()
    case.tool_mask[:, 0] = 1
    case.mask = case.completion_mask * case.tool_mask
    case.old_logps = -torch.rand(6, 7, generator=noise, dtype=torch.float64)
    for name, scale in (("logps", 0.25), ("ref_logps", 0.3), ("engine_logps", 0.2)):
        drift = torch.randn(6, 7, generator=noise, dtype=torch.float64)
        setattr(case, name, case.old_logps + scale * drift)
    case.rewards = torch.randn(6, generator=noise, dtype=torch.float64)
    case.advantages = torch.randn(6, generator=noise, dtype=torch.float64)
    case.group = torch.tensor([0, 0, 0, 1, 1, 1])
    return case


@pytest.mark.parametrize(
    "settings, average, options",
    [
        (dict(loss_type="grpo"), "sequence", {}),
        (dict(loss_type="dr_grpo"), "constant", {}),
        (dict(loss_type="dapo"), "token", {}),
        (dict(loss_type="bnpo"), "token", {}),
        (dict(loss_type="dapo", delta=1.4), "token", dict(dual_clip=1.4)),
        (
            dict(loss_type="grpo", importance_sampling_level="sequence"),
            "sequence",
            dict(loss="gspo"),
        ),
        (dict(loss_type="cispo", epsilon_high=1.28), "token", dict(loss="cispo")),
        (dict(loss_type="grpo", beta=0.3), "sequence", {}),
        (
            dict(loss_type="dapo", use_vllm=True, vllm_importance_sampling_correction=True),
            "token",
            {},
        ),
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_policy_loss_against_trl(seed, settings, average, options):
    case, trainer = trl_case(seed), make_trl(**settings)
    logps = case.logps.requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (
        logps,
        torch.zeros_like(logps),
        None,
    )
    correction = importance_weights(case.old_logps, case.engine_logps, case.mask, "token_tis", 2.0)
    expected = trainer._compute_loss(
        None,
        {
            "prompt_ids": torch.zeros(6, 1),
            "prompt_mask": torch.ones(6, 1),
            "completion_ids": torch.zeros(6, 7),
            "completion_mask": case.completion_mask,
            "tool_mask": case.tool_mask,
            "advantages": case.advantages,
            "old_per_token_logps": case.old_logps,
            "ref_per_token_logps": case.ref_logps,
            "importance_sampling_ratio": correction,
            "num_items_in_batch": case.mask.sum(),
        },
    )
    weights = token_weights(case.mask, torch.arange(6), average, 11)
    loss, metrics = policy_loss(
        logps,
        case.old_logps,
        case.advantages[:, None].expand(6, 7),
        case.mask,
        weights,
        0.2,
        0.28,
        correction=correction if trainer.use_vllm else None,
        **options,
    )
    if trainer.beta:
        loss = loss + trainer.beta * (kl_estimate(logps, case.ref_logps, "k3") * weights).sum()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    gradients = [torch.autograd.grad(value, logps)[0] for value in (loss, expected)]
    assert gradients[0].abs().sum() > 0
    torch.testing.assert_close(*gradients)
    if average == "token" and not options:  # TRL does not count what delta, its dual clip, stops
        logged = trainer._metrics["train"]["clip_ratio/region_mean"]
        assert logged == [pytest.approx(metrics["clip_ratio"].item())]


@pytest.mark.parametrize(
    "mode, kind",
    [
        ("token_truncate", "token_tis"),
        ("token_mask", "token_mask"),
        ("sequence_mask", "sequence_mask"),
    ],
)
@pytest.mark.parametrize("seed", range(4))
def test_advantages_and_corrections_against_trl(seed, mode, kind):
    """One call of TRL's scoring gives its group advantages (one answer unscorable, as our failed ones), its correction
    and its difference of logps."""
    case, failed = trl_case(seed), 4
    scored = case.rewards.clone()
    scored[failed] = math.nan
    low = 1 / 1.3 if mode == "token_mask" else None
    trainer = make_trl(
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_max=1.3,
        vllm_importance_sampling_clip_min=low,
        environment_factories=None,
        environments=None,
        tools=None,
        _tokenizer=SimpleNamespace(pad_token_id=0),
        pad_to_multiple_of=None,
        mask_truncated_completions=False,
        num_iterations=1,
        num_generations=3,
        reward_weights=torch.ones(1),
        reward_funcs=[None],
        reward_func_names=["score"],
        multi_objective_aggregation="sum_then_normalize",
        scale_rewards="group",
        _logs=defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        _pending_extra_logs={},
        _pending_metrics={},
        log_multimodal=False,
        log_completions=False,
    )

    def ragged(column):
        return [row[:n] for row, n in zip(column.tolist(), case.lengths, strict=True)]

    trainer.args.gradient_accumulation_steps = 1
    trainer._is_vlm = False
    trainer.model.is_gradient_checkpointing = False
    trainer._calculate_rewards = lambda *args: scored[:, None]
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (
        case.old_logps[:, :width],
        None,
        None,
    )
    width = max(case.lengths)
    trainer._generate = lambda prompts: (
        [[1]] * 6,
        [[1] * n for n in case.lengths],
        ragged(case.tool_mask.long()),
        [""] * 6,
        ragged(case.engine_logps),
        {},
        None,
        None,
    )
    expected = trainer._generate_and_score_completions([{"prompt": "question"}] * 6)

    correction = (
        importance_weights(case.old_logps, case.engine_logps, case.mask, kind, 1.3) * case.mask
    )
    theirs = expected["importance_sampling_ratio"].expand(6, width) * case.mask[:, :width]
    torch.testing.assert_close(
        correction[:, :width], theirs, check_dtype=False, rtol=1e-5, atol=1e-6
    )
    weights = token_weights(case.mask, torch.arange(6), "token")
    logged = trainer._metrics["train"]["sampling/sampling_logp_difference/mean"]
    found = rollout_mismatch(case.old_logps, case.engine_logps, weights)["logp_difference"].item()
    assert logged == [pytest.approx(found, rel=1e-5)]

    mask, rewards = case.mask.clone(), torch.zeros_like(case.mask)
    mask[failed] = 0
    rewards[:, 0] = case.rewards
    advantages = group_advantages(rewards, mask, case.group, torch.arange(6), True)
    torch.testing.assert_close(
        advantages, expected["advantages"][:, None] * mask, check_dtype=False
    )
    assert trainer._metrics["train"]["frac_reward_zero_std"] == [0]
