"""Tests of rl2/algorithms and of the losses of the trainers.

Formulas are compared with loops in plain Python and closed-form gradients.
"""

import math
import random
import statistics
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from common import (
    advantage_inputs,
    make_samples,
    policy_inputs,
    preference_inputs,
)
from configs import key_types
from torch.nn.functional import softplus

from rl2.algorithms import losses, names
from rl2.algorithms.advantages import (
    ADVANTAGE_ESTIMATORS,
    Estimator,
    RewardPart,
    gae,
    group_advantages,
    maxrl,
    whiten,
)
from rl2.algorithms.losses import (
    IMPORTANCE_CORRECTIONS,
    KL_ESTIMATORS,
    POLICY_LOSSES,
    PREFERENCE_LOSSES,
    PolicyLoss,
    importance_weights,
    kl_estimate,
    reference_point,
    rollout_mismatch,
    token_weights,
    value_loss,
    weighted_kl,
)
from rl2.batch import collate
from rl2.config.schema import DPOLossConfig, PPOConfig
from rl2.model.token_model import TokenScores
from rl2.trainer import dpo, rm, sft
from rl2.trainer.ppo import actor_loss, average_updates, can_drop_rows, needs_old_logps
from rl2.worker import UpdateResult

SEEDS = range(6)
NOTHING_TRAINED = 6  # the seed of a case whose trajectories have all failed
LOSSES = [
    dict(loss="ppo", clip=0.2, clip_high=0.2),
    dict(loss="ppo", clip=0.2, clip_high=0.28),
    dict(loss="ppo", clip=0.1, clip_high=0.1, dual_clip=1.2),
    dict(loss="ppo", clip=0.2, clip_high=0.2, off_policy_limit=0.02),
    dict(loss="gspo", clip=0.05, clip_high=0.1),
    dict(loss="gspo", clip=0.05, clip_high=0.05, dual_clip=1.1),
    dict(loss="cispo", clip=0.2, clip_high=0.1),
    dict(loss="dppo", clip=0.02, clip_high=0.04),
    dict(loss="dppo", clip=0.05, clip_high=0.9),
    dict(loss="reinforce", clip=math.inf, clip_high=math.inf),
]


def policy_loss(case, loss, correction=None, off_policy_limit=None, **settings):
    """Call `losses.policy_loss` on the columns of the case."""
    columns = (case.logps, case.old_logps, case.advantages, case.mask)
    inputs = policy_inputs(*columns, engine_logps=case.engine_logps, **settings)
    compute = POLICY_LOSSES[loss].compute
    return losses.policy_loss(compute, inputs, case.weights, correction, off_policy_limit)


def preference_loss(case, loss, **settings):
    """Call `preference_loss` of DPO on the columns of the case, as far as the loss needs them."""
    needs = PREFERENCE_LOSSES[loss].needs
    batch = SimpleNamespace(
        mask=case.mask,
        token_weights=case.weights,
        ref_logps=case.ref_logps if "ref_logps" in needs else None,
        reference_point=case.z0 if "reference_point" in needs else None,
        label=case.label,
    )
    return dpo.preference_loss(DPOLossConfig(loss=loss, **settings), batch, TokenScores(case.logps))


def make_case(seed, dtype=torch.float64, huge_padding=True):
    """Random columns of ragged groups of trajectories.

    A trajectory has one to three rows. The rows of different trajectories are interleaved. Some
    tokens are not sampled, and some trajectories have no sampled token. The ids of groups and
    trajectories are not sorted.
    """
    rng = random.Random(seed)
    groups = []  # the group id of each trajectory
    for group in rng.sample(range(100), rng.randint(1, 4)):
        groups += [group] * rng.randint(1, 4)
    trajectories = rng.sample(range(1000), len(groups))
    rows = []
    for group, trajectory in zip(groups, trajectories, strict=True):
        rows += [(group, trajectory)] * rng.randint(1, 3)
    rng.shuffle(rows)
    failure_rate = 1 if seed == NOTHING_TRAINED else 0.15
    failed = {trajectory for trajectory in trajectories if rng.random() < failure_rate}
    width = rng.randint(1, 8)
    mask = []
    for _, trajectory in rows:
        is_alive = trajectory not in failed
        mask.append([float(is_alive and rng.random() < 0.7) for _ in range(width)])
    mask[0][0] = float(rows[0][1] not in failed)
    case = SimpleNamespace(mask=torch.tensor(mask, dtype=dtype))
    case.group = torch.tensor([group for group, _ in rows])
    case.trajectory = torch.tensor([trajectory for _, trajectory in rows])
    generator = torch.Generator().manual_seed(seed)

    def normal(scale=1.0):
        return scale * torch.randn(len(rows), width, generator=generator, dtype=dtype)

    case.old_logps = -normal().abs()
    case.logps = case.old_logps + normal(0.2)
    case.engine_logps = case.old_logps + normal(0.15)
    case.rewards = torch.randint(0, 2, case.mask.shape, generator=generator).to(dtype)
    case.advantages = normal()
    case.correction = normal().abs()
    case.old_values = normal()
    case.returns = normal()
    case.values = case.old_values + normal(0.3)
    case.weights = torch.rand(case.mask.shape, generator=generator, dtype=dtype) * case.mask
    # Some tokens are much rarer in the engine, so that the ratio to it meets its cap.
    case.engine_logps -= 4 * (torch.rand(case.mask.shape, generator=generator) < 0.1)
    if huge_padding:
        spoil_padding(case, generator)
    return case


def spoil_padding(case, generator):
    """Makes the columns of the case huge where no token is sampled: nothing may depend on them."""
    for name, column in vars(case).items():
        if column.shape == case.mask.shape and name not in ("mask", "weights"):
            signs = torch.randint(0, 2, column.shape, generator=generator) * 2 - 1
            huge = signs.to(column.dtype) * (torch.finfo(column.dtype).max / 4)
            setattr(case, name, torch.where(case.mask > 0, column, huge))


def sampled_cells(mask, trajectory):
    """{trajectory: [(row, column) of each sampled token, in order of time]}."""
    cells = defaultdict(list)
    for b, row in enumerate(mask.tolist()):
        for t, sampled in enumerate(row):
            if sampled:
                cells[trajectory[b].item()].append((b, t))
    return cells


def assert_cells(tensor, values):
    """Assert that `tensor` holds `values`, {(row, column): value}, and 0 in all other cells."""
    expected = torch.zeros_like(tensor)
    for cell, value in values.items():
        expected[cell] = value
    torch.testing.assert_close(tensor, expected, rtol=1e-9, atol=1e-9)


def assert_metrics(metrics, expected):
    """Assert that the metrics are scalars without a gradient, equal to `expected`."""
    assert metrics.keys() == expected.keys()
    for name, value in metrics.items():
        assert value.shape == () and not value.requires_grad, name
        assert value.item() == pytest.approx(expected[name], rel=1e-9, abs=1e-9), name


# KL


def test_kl_estimates_and_their_gradients_in_expectation():
    """The expectations over all tokens of a softmax.

    k1 and k3 are unbiased. The gradient of k2 is that of KL(policy || reference), the gradient of
    k3 is that of KL(reference || policy), and the gradient of k1 is zero. Weighted by the ratio to
    the policy that sampled, all have the gradient of KL(policy || reference).
    """
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    ref, sampling = torch.randn(2, 6, dtype=torch.float64).log_softmax(-1)
    logps = logits.log_softmax(0)
    probs = logps.exp().detach()
    estimates = {name: (probs * kl_estimate(logps, ref, name)).sum() for name in ("k1", "k2", "k3")}
    reverse_kl = (logps.exp() * (logps - ref)).sum()
    forward_kl = (ref.exp() * (ref - logps)).sum()
    assert estimates["k1"].item() == pytest.approx(reverse_kl.item())
    assert estimates["k3"].item() == pytest.approx(reverse_kl.item())

    def gradient(loss):
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    torch.testing.assert_close(gradient(estimates["k2"]), gradient(reverse_kl))
    torch.testing.assert_close(gradient(estimates["k3"]), gradient(forward_kl))
    torch.testing.assert_close(gradient(estimates["k1"]), torch.zeros_like(logits))
    assert (gradient(forward_kl) - gradient(reverse_kl)).abs().max() > 0.05
    for name in estimates:  # weighted, of the tokens of another policy
        weighted = weighted_kl(kl_estimate(logps, ref, name), logps - sampling, name)
        found = gradient((sampling.exp() * weighted).sum())
        torch.testing.assert_close(found, gradient(reverse_kl))


# Advantages


def parts_of(case):
    """Two reward parts, the second of weight 2: values [B] that are those of the trajectory."""
    return {
        "a": RewardPart((case.trajectory % 3).to(case.mask.dtype), 1.0),
        "b": RewardPart((case.trajectory % 7 / 7).to(case.mask.dtype), 2.0),
    }


def inputs_of(case, **settings):
    columns = {"reward_parts": parts_of(case)}
    columns |= {"values": case.values, "old_logps": case.old_logps, "teacher_logps": case.logps}
    others = {**columns, **settings}
    return advantage_inputs(case.mask, case.rewards, case.group, case.trajectory, **others)


def compare_in_groups(case, advantage, values=None):
    """{trajectory: advantage(its value, those of its group)}. The values are the rewards."""
    cells_of = sampled_cells(case.mask, case.trajectory)
    if values is None:
        values = {t: sum(case.rewards[c].item() for c in cells) for t, cells in cells_of.items()}
    group_of = {t: case.group[cells[0][0]].item() for t, cells in cells_of.items()}
    members = defaultdict(list)
    for trajectory, group in group_of.items():
        members[group].append(values[trajectory])
    return {t: advantage(values[t], members[group]) for t, group in group_of.items()}


def on_tokens(case, values):
    """{cell: the value of its trajectory}."""
    cells_of = sampled_cells(case.mask, case.trajectory)
    return {cell: value for t, value in values.items() for cell in cells_of[t]}


def over_mean(reward, rewards):
    return reward - statistics.mean(rewards)


def over_mean_in_deviations(reward, rewards):
    std = statistics.stdev(rewards) if len(rewards) > 1 else 1.0
    return over_mean(reward, rewards) / (std + 1e-4)


def over_the_others(reward, rewards):
    if len(rewards) == 1:
        return 0.0
    return reward - (sum(rewards) - reward) / (len(rewards) - 1)


def over_mean_in_means(reward, rewards):
    mean = statistics.mean(rewards)
    return (reward - mean) / mean if mean else 0.0


def loop_gdpo(case):
    """The standardised parts of each trajectory, added, over their deviation in the batch."""
    totals = Counter()
    for part in parts_of(case).values():
        values = dict(zip(case.trajectory.tolist(), part.values.tolist(), strict=True))
        found = compare_in_groups(case, over_mean_in_deviations, values)
        totals.update({t: part.weight * value for t, value in found.items()})
    std = statistics.stdev(totals.values()) + 1e-4 if len(totals) > 1 else 1.0
    return on_tokens(case, {t: total / std for t, total in totals.items()})


def whitened(cells):
    """{cell: (value - mean) / standard deviation} over all cells."""
    if len(cells) < 2:
        return dict.fromkeys(cells, 0.0)
    mean = statistics.mean(cells.values())
    std = math.sqrt(statistics.variance(cells.values()) + 1e-8)
    return {cell: (value - mean) / std for cell, value in cells.items()}


def loop_gae(case, values, gamma, lamda):
    advantages = {}
    for cells in sampled_cells(case.mask, case.trajectory).values():
        advantage = next_value = 0.0
        for cell in reversed(cells):
            value = values[cell].item()
            delta = case.rewards[cell].item() + gamma * next_value - value
            advantage = delta + gamma * lamda * advantage
            advantages[cell] = advantage
            next_value = value
    return advantages


def loop_reinforce_plus_plus(case, gamma):
    return whitened(loop_gae(case, torch.zeros_like(case.values), gamma, 1.0))


def loop_distillation(case):
    cells = map(tuple, case.mask.nonzero().tolist())
    return {cell: (case.logps - case.old_logps)[cell].item() for cell in cells}


def by_group(advantage):
    return lambda case: on_tokens(case, compare_in_groups(case, advantage))


ESTIMATES = [
    ("reinforce", dict(norm_var=False), by_group(over_mean)),
    ("reinforce", dict(norm_var=True), by_group(over_mean_in_deviations)),
    ("rloo", {}, by_group(over_the_others)),
    ("maxrl", {}, by_group(over_mean_in_means)),
    ("gdpo", {}, loop_gdpo),
    ("reinforce_plus_plus", dict(gamma=0.9), partial(loop_reinforce_plus_plus, gamma=0.9)),
    ("reinforce_plus_plus_baseline", {}, lambda case: whitened(by_group(over_mean)(case))),
    ("distillation", {}, loop_distillation),
]


@pytest.mark.parametrize(("estimator", "settings", "loop"), ESTIMATES)
@pytest.mark.parametrize("seed", [*SEEDS, NOTHING_TRAINED])
def test_an_estimator_is_its_loop_and_edits_nothing(seed, estimator, settings, loop):
    case = make_case(seed)
    advantages = ADVANTAGE_ESTIMATORS[estimator].compute(inputs_of(case, **settings))
    assert_cells(advantages, loop(case))
    for name, column in vars(make_case(seed)).items():
        assert getattr(case, name).equal(column), name


@pytest.mark.parametrize("seed", range(10))
def test_turns_are_their_loop(seed):
    case = make_case(seed)
    expected = torch.zeros_like(case.mask)
    turns = Counter()  # so far, by trajectory
    for row, trajectory in enumerate(case.trajectory.tolist()):
        was_sampled = False
        for t, is_sampled in enumerate(case.mask[row].tolist()):
            turns[trajectory] += is_sampled > was_sampled
            expected[row, t] = turns[trajectory] if is_sampled else 0
            was_sampled = is_sampled
    assert inputs_of(case).turns.equal(expected.long())


def test_maxrl_needs_a_mean_that_is_not_negative():
    rewards = torch.tensor([[1.0], [-4.0], [0.0], [0.0], [2.0]])
    group = torch.tensor([0, 0, 0, 0, 1])
    with pytest.raises(ValueError, match="-0.75"):
        maxrl(advantage_inputs(torch.ones(5, 1), rewards, group))


@pytest.mark.parametrize("reward", [0.1, 1 / 3, 1e6 + 0.1])
def test_equal_rewards_give_exactly_zero(reward):
    inputs = advantage_inputs(torch.ones(7, 1), torch.full((7, 1), reward))
    assert group_advantages(replace(inputs, norm_var=True)).eq(0).all()
    for name in ("reinforce", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        assert ADVANTAGE_ESTIMATORS[name].compute(inputs).eq(0).all()
    assert whiten(inputs.rewards, inputs.mask).eq(0).all()


@pytest.mark.parametrize("gamma, lamda", [(0.9, 0.95), (1.0, 0.0), (0.97, 1.0)])
@pytest.mark.parametrize("seed", [*SEEDS, NOTHING_TRAINED])
def test_gae(seed, gamma, lamda):
    case = make_case(seed)
    expected = loop_gae(case, case.values, gamma, lamda)
    advantages, returns = gae(inputs_of(case, gamma=gamma, lamda=lamda))
    assert_cells(advantages, expected)
    assert_cells(returns, {cell: x + case.values[cell].item() for cell, x in expected.items()})


# Averages


@pytest.mark.parametrize("seed", [*SEEDS, NOTHING_TRAINED])
def test_token_weights(seed):
    case = make_case(seed)
    rows_of = sampled_cells(case.mask, case.trajectory)
    groups = {trajectory: case.group[cells[0][0]].item() for trajectory, cells in rows_of.items()}
    tokens_of_group = Counter()
    for trajectory, cells in rows_of.items():
        tokens_of_group[groups[trajectory]] += len(cells)
    expected = {average: {} for average in names.TOKEN_AVERAGES}
    for trajectory, cells in rows_of.items():
        group_size = tokens_of_group[groups[trajectory]]
        for cell in cells:
            expected["prompt"][cell] = 1 / group_size / len(tokens_of_group)
            expected["token"][cell] = 1 / tokens_of_group.total()
            expected["sequence"][cell] = 1 / len(cells) / len(rows_of)
            expected["constant"][cell] = 1 / 16 / len(rows_of)
    for average, cells in expected.items():
        assert_cells(token_weights(case.mask, case.trajectory, average, 16, case.group), cells)


# Policy loss


def policy_formula(
    case, loss, clip, clip_high, dual_clip=None, correction=None, off_policy_limit=None
):
    """Returns the loss, with its gradient, and the metrics, of the trained tokens of each row."""
    low, high = 1 - clip, 1 + clip_high
    total, sums = 0.0, defaultdict(float)
    for row, is_trained in enumerate(case.mask > 0):
        columns = (case.logps, case.old_logps, case.engine_logps, case.advantages, case.weights)
        logps, old_logps, engine_logps, advantages, weights = (x[row][is_trained] for x in columns)
        log_ratio = logps - old_logps
        ratio = log_ratio.exp()
        if loss == "gspo":  # the value is that of the row, the gradient flows through the token
            ratio = log_ratio.mean().exp().detach() * (logps - logps.detach()).exp()
        elif loss == "dppo":
            ratio = (logps - engine_logps).exp()
        metrics = {"approx_kl": log_ratio.exp() - 1 - log_ratio, "ratio": ratio}
        if loss == "reinforce":
            losses = -advantages * logps
        elif loss == "cispo":
            metrics["clip_ratio"] = ratio > high
            losses = -ratio.clamp(max=high).detach() * advantages * logps
        elif loss == "dppo":
            moved = logps.exp() - engine_logps.exp()
            is_outside = torch.where(advantages > 0, moved > high - 1, moved < low - 1)
            metrics["clip_ratio"] = is_outside
            capped = torch.where(ratio > 20, 20 * (1 + logps - logps.detach()), ratio)
            losses = -advantages * capped * ~is_outside
        else:
            is_clipped = torch.where(advantages > 0, ratio > high, ratio < low)
            losses = -advantages * torch.where(is_clipped, ratio.clamp(low, high), ratio)
            if dual_clip is not None:
                is_large = (advantages < 0) & (losses > -dual_clip * advantages)
                losses = torch.where(is_large, -dual_clip * advantages, losses)
                is_clipped = is_clipped | is_large
            metrics["clip_ratio"] = is_clipped
        if correction is not None:
            losses = losses * correction[row][is_trained]
        if off_policy_limit is not None:
            surprise = (engine_logps - logps).mean()
            metrics["off_policy_masked"] = (advantages < 0) & (surprise > off_policy_limit)
            losses = losses * ~metrics["off_policy_masked"]
        total = total + (weights * losses).sum()
        for name, values in metrics.items():
            sums[name] += (weights * values).sum().item()
    return total, sums


@pytest.mark.parametrize("options", LOSSES)
@pytest.mark.parametrize("seed", [*SEEDS, NOTHING_TRAINED])
def test_policy_loss_and_its_gradient(seed, options):
    case = make_case(seed)
    correction = case.correction if seed % 2 else None
    logps = case.logps.requires_grad_()
    expected, metrics = policy_formula(case, correction=correction, **options)
    check_loss(logps, policy_loss(case, correction=correction, **options), expected, metrics)


@pytest.mark.parametrize("loss", POLICY_LOSSES)
@pytest.mark.parametrize("shift", [1e3, -1e3])
def test_an_extreme_ratio_gives_finite_numbers(loss, shift):
    logps = torch.tensor([[-1.0, -1.0, -1.0]], requires_grad=True)
    old = torch.full((1, 3), -1.0 - shift)
    ones = torch.ones(1, 3)
    case = SimpleNamespace(logps=logps, old_logps=old, engine_logps=old, mask=ones, weights=ones)
    case.advantages = torch.tensor([[1.0, -1.0, 0.0]])
    value, metrics = policy_loss(case, loss)
    value.backward()
    mismatch = rollout_mismatch(logps, old, ones)
    for tensor in (value, logps.grad, *metrics.values(), *mismatch.values()):
        assert tensor.isfinite().all()
    for estimator in ("k1", "k2", "k3"):
        assert kl_estimate(logps, old, estimator).isfinite().all()


# Mismatch


@pytest.mark.parametrize("cap", [1.05, 1.3])
@pytest.mark.parametrize("seed", SEEDS)
def test_importance_weights(seed, cap):
    case = make_case(seed)
    expected = {correction: torch.zeros_like(case.mask) for correction in IMPORTANCE_CORRECTIONS}
    for row, is_trained in enumerate(case.mask > 0):
        rho = (case.old_logps - case.engine_logps)[row][is_trained].exp()
        product = rho.prod()
        geometric_mean = product ** (1 / len(rho)) if len(rho) else product
        weights = {
            "token_tis": rho.clamp(max=cap),
            "token_mask": rho * (rho >= 1 / cap) * (rho <= cap),
            "sequence_mask": product * (product <= cap),
            "geometric_mask": float(1 / cap <= geometric_mean <= cap),
        }
        for correction, value in weights.items():
            expected[correction][row][is_trained] = value
    old_logps = case.old_logps.requires_grad_()
    engine_logps = case.engine_logps.requires_grad_()
    for correction in IMPORTANCE_CORRECTIONS:
        weights = importance_weights(old_logps, engine_logps, case.mask, correction, cap)
        assert weights.shape == case.mask.shape and not weights.requires_grad
        torch.testing.assert_close(weights * case.mask, expected[correction])


@pytest.mark.parametrize("seed", SEEDS)
def test_rollout_mismatch(seed):
    case = make_case(seed)
    is_trained = case.mask > 0
    differences = (case.engine_logps - case.old_logps)[is_trained]
    numbers = {
        "logp_difference": differences.abs(),
        "kl_k1": differences,
        "kl_k3": (-differences).exp() - 1 + differences,
        "outside": ((-differences).exp() - 1).abs() > 0.1,
        "ratio": (-differences).exp(),
        "ratio_squared": (-2 * differences).exp(),
    }
    weights = case.weights[is_trained]
    expected = {name: (x * weights).sum().item() for name, x in numbers.items()}
    old_logps = case.old_logps.requires_grad_()
    assert_metrics(rollout_mismatch(old_logps, case.engine_logps, case.weights), expected)


def test_effective_sample_size():
    """(sum of r)^2 / (sum of r^2) over all tokens of the step, divided by their number.

    One update saw a token with the ratio 1, the other one with the ratio 3: 2^2 / 5.
    """
    updates = [
        {"mismatch_ratio": 1.0, "mismatch_ratio_squared": 1.0},
        {"mismatch_ratio": 3.0, "mismatch_ratio_squared": 9.0},
    ]
    logged = average_updates("actor", updates)
    assert logged == {"actor/mismatch_ratio": 2, "actor/effective_sample_size": 0.8}
    sums = {"mismatch_ratio": 0.0, "mismatch_ratio_squared": 0.0}
    nothing_run = UpdateResult(0.0, 0.0, 0.1, False, sums, {}).to_log(0.0)
    logged |= {"actor/loss": 0, "actor/grad_norm": 0, "actor/lr": 0.1, "actor/skipped": 0}
    assert average_updates("actor", [*updates, nothing_run]) == logged, "no mean over no token"
    assert average_updates("critic", [{"loss": 1.0}, {"loss": 2.0}]) == {"critic/loss": 1.5}


# Value loss


@pytest.mark.parametrize("seed", SEEDS)
def test_value_loss_and_its_gradient(seed):
    case = make_case(seed)
    is_trained = case.mask > 0
    values = case.values.requires_grad_()
    columns = (values, case.old_values, case.returns, case.weights)
    value, old_value, target, weight = (column[is_trained] for column in columns)
    error = (value - target) ** 2
    clipped_error = (torch.clip(value, old_value - 0.2, old_value + 0.2) - target) ** 2
    expected = (weight * torch.where(error >= clipped_error, error, clipped_error)).sum()
    metrics = {"clip_ratio": weight * (clipped_error > error), "value": weight * value}
    sums = {name: x.sum().item() for name, x in metrics.items()}
    check_loss(values, value_loss(*columns, 0.2), expected, sums)


# Losses of data sets


def make_pairs(seed):
    """Four pairs of rows with ragged masks. Each row has weight 1/8, and each pair has a margin."""
    generator = torch.Generator().manual_seed(seed)
    case = SimpleNamespace()
    for name in ("logps", "ref_logps", "values"):
        setattr(case, name, 2 * torch.randn(8, 5, generator=generator, dtype=torch.float64))
    case.logps, case.ref_logps = -case.logps.abs(), -case.ref_logps.abs()
    case.mask = (torch.rand(8, 5, generator=generator) < 0.6).double()
    case.mask[:, 2] = 1
    case.weights = token_weights(case.mask, torch.arange(8), "sequence")
    case.margin = torch.randn(4, generator=generator, dtype=torch.float64).repeat_interleave(2)
    case.label = (torch.arange(8) % 3 == 0).double()
    case.z0 = torch.full((8,), 0.4, dtype=torch.float64)
    spoil_padding(case, generator)
    return case


def trained_parts(column, mask):
    """The trained cells [t] of each row of a column."""
    return [row[is_trained > 0] for row, is_trained in zip(column, mask, strict=True)]


def pairs_of(rows):
    return zip(rows[::2], rows[1::2], strict=True)


def add_pair_metrics(metrics, chosen_reward, rejected_reward):
    """Add the metrics of one of four pairs to the means in `metrics`."""
    metrics["chosen_reward"] += chosen_reward.item() / 4
    metrics["rejected_reward"] += rejected_reward.item() / 4
    metrics["accuracy"] += (chosen_reward > rejected_reward).item() / 4
    metrics["margin"] += (chosen_reward - rejected_reward).item() / 4


def sum_of_k3(log_ratios):
    return (log_ratios.exp() - 1 - log_ratios).sum().item()


def check_loss(column, found, expected, expected_metrics):
    """Compare (loss, metrics) with an expected loss and metrics, also the gradients in a column."""
    loss, metrics = found
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    assert_metrics(metrics, expected_metrics)
    gradients = [torch.autograd.grad(value, column)[0] for value in (loss, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


PAIR_LOSSES = ("sigmoid", "hinge", "ipo", "simpo", "orpo")


def pair_formula(loss, chosen, rejected, beta, smoothing, target):
    """The loss of a pair, of the trained tokens' log p, or log(p / p_reference), of its replies."""
    m = chosen.sum() - rejected.sum()
    if loss == "sigmoid":
        return (1 - smoothing) * softplus(-beta * m) + smoothing * softplus(beta * m)
    if loss == "hinge":
        return (1 - beta * m).clamp(min=0)
    chosen, rejected = chosen.mean(), rejected.mean()
    if loss == "ipo":
        return (chosen - rejected - 1 / (2 * beta)) ** 2
    if loss == "simpo":
        return softplus(target - beta * (chosen - rejected))
    odds = [mean - (1 - mean.exp()).log() for mean in (chosen, rejected)]
    return -chosen + beta * softplus(odds[1] - odds[0])


@pytest.mark.parametrize(("smoothing", "sft_coef"), [(0.0, 0.3), (0.2, 0.0)])
@pytest.mark.parametrize("loss", PAIR_LOSSES)
@pytest.mark.parametrize("seed", SEEDS)
def test_preference_losses(seed, loss, smoothing, sft_coef):
    case = make_pairs(seed)
    beta, target = 0.7, 0.4
    logps = case.logps.requires_grad_()
    ref_logps = case.ref_logps if PREFERENCE_LOSSES[loss].needs else None
    rows = trained_parts(logps, case.mask)
    gains = rows if ref_logps is None else trained_parts(logps - ref_logps, case.mask)
    expected, metrics = 0.0, defaultdict(float)
    for pair, (chosen, _) in zip(pairs_of(gains), pairs_of(rows), strict=True):
        value = pair_formula(loss, *pair, beta, smoothing, target)
        expected += (value - sft_coef * chosen.mean()) / 4
        rewards = [beta * (row.mean() if ref_logps is None else row.sum()) for row in pair]
        add_pair_metrics(metrics, *rewards)
        if sft_coef:
            metrics["chosen_loss"] -= chosen.mean().item() / 4
        for row in pair:
            if ref_logps is not None:
                metrics["kl"] += sum_of_k3(row) / len(row) / 8
    found = preference_loss(
        case,
        loss,
        beta=beta,
        label_smoothing=smoothing,
        target_margin=target,
        sft_coef=sft_coef,
    )
    check_loss(logps, found, expected, metrics)


@pytest.mark.parametrize("logp", [0.0, -1e-30, -1e3])
def test_orpo_is_finite_where_a_reply_is_certain_or_impossible(logp):
    logps = torch.tensor([logp, -1.0], requires_grad=True)
    inputs = preference_inputs(torch.zeros(2), logps=logps)
    loss = PREFERENCE_LOSSES["orpo"].compute(inputs)
    loss.backward()
    assert loss.isfinite() and logps.grad.isfinite().all()


@pytest.mark.parametrize("seed", SEEDS)
def test_kto(seed):
    case = make_pairs(seed)
    beta, weights, z0 = 0.3, {1: 1.5, 0: 0.7}, case.z0[0].item()
    logps = case.logps.requires_grad_()
    expected, expected_metrics = 0.0, defaultdict(float)
    rows = trained_parts(logps - case.ref_logps, case.mask)
    for log_ratios, label in zip(rows, case.label.tolist(), strict=True):
        reward = beta * (log_ratios.sum() - z0)
        margin = reward if label else -reward
        expected += weights[label] * (1 - margin.sigmoid()) / 8
        expected_metrics["reward"] += reward.item() / 8
        expected_metrics["margin"] += margin.item() / 8
        expected_metrics["accuracy"] += (margin > 0).item() / 8
        expected_metrics["reference_point"] += z0 / 8
        expected_metrics["kl"] += sum_of_k3(log_ratios) / len(log_ratios) / 8
    found = preference_loss(case, "kto", beta=beta, desirable_weight=1.5, undesirable_weight=0.7)
    check_loss(logps, found, expected, expected_metrics)


def test_a_loss_of_single_replies_without_a_reference(monkeypatch):
    """The sum of log-probabilities is trained; the reward is beta times their mean."""
    case = SimpleNamespace(
        logps=torch.tensor([[-1.0, -3.0, -9.0], [-2.0, -9.0, -9.0]], requires_grad=True),
        mask=torch.tensor([[1.0, 1, 0], [1, 0, 0]]),
        label=torch.tensor([0.0, 1.0]),
    )
    case.weights = case.mask / case.mask.sum(1, keepdim=True) / 2
    own = losses.PreferenceLoss(lambda x: -x.logps, needs=(), in_pairs=False)
    monkeypatch.setitem(PREFERENCE_LOSSES, "kto", own)
    found = preference_loss(case, "kto", beta=0.5)
    metrics = {"reward": -1.0, "margin": 0.0, "accuracy": 0.5}
    check_loss(case.logps, found, -(case.logps * case.mask).sum() / 2, metrics)


def test_the_reference_point_by_hand():
    """The mean over rows of the sum over tokens, and never below 0."""
    logps = torch.tensor([[-1.0, -2.0, 9.0], [-1.0, -1.0, -1.0]], requires_grad=True)
    ref_logps = torch.tensor([[-2.0, -4.0, -9.0], [-1.0, -0.5, -1.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    point = reference_point(logps, ref_logps, mask)
    assert point.item() == (3 - 0.5) / 2 and not point.requires_grad
    assert reference_point(ref_logps, logps, mask).item() == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_reward_loss(seed):
    case = make_pairs(seed)
    last_columns = [int(row.nonzero()[-1]) for row in case.mask]
    weights = torch.zeros_like(case.mask)
    weights[range(8), last_columns] = 1 / 8
    values = case.values.requires_grad_()
    expected, expected_metrics = 0.0, defaultdict(float)
    pairs = pairs_of(values[range(8), last_columns])
    for (chosen, rejected), margin in zip(pairs, case.margin[::2], strict=True):
        expected += softplus(margin - (chosen - rejected)) / 4
        add_pair_metrics(expected_metrics, chosen, rejected)
    batch = SimpleNamespace(token_weights=weights, pair_margin=case.margin)
    found = rm.reward_loss(batch, TokenScores(values=values))
    check_loss(values, found, expected, expected_metrics)


def test_a_rank_without_rows_gets_zeros():
    case = SimpleNamespace(**{name: column[:0] for name, column in vars(make_case(0)).items()})
    pairs = SimpleNamespace(**{name: column[:0] for name, column in vars(make_pairs(0)).items()})
    results = [policy_loss(case, correction=case.correction, **options) for options in LOSSES]
    results += [preference_loss(pairs, loss) for loss in PREFERENCE_LOSSES]
    batch = SimpleNamespace(token_weights=pairs.weights, pair_margin=pairs.margin)
    results.append(rm.reward_loss(batch, TokenScores(values=pairs.values)))
    results.append(sft.sft_loss(batch, TokenScores(pairs.logps)))
    results.append(value_loss(case.values, case.old_values, case.returns, case.weights, 0.2))
    mismatch = rollout_mismatch(case.old_logps, case.engine_logps, case.weights)
    results.append((0, mismatch))
    for loss, metrics in results:
        assert all(value == 0 for value in (loss, *metrics.values()))


# What losses and estimators declare


def other_value(name, value):
    """Another value for a field of the inputs of a function."""
    if name == "group":
        return torch.arange(len(value))
    if name == "reward_parts":
        return {"a": RewardPart(value["a"].values + torch.rand(len(value["a"].values)), 1.0)}
    if torch.is_tensor(value):
        return value + torch.rand(value.shape)
    return not value if isinstance(value, bool) else value / 2 + 0.03


def full_inputs(declared):
    """Inputs of a function, with a value of everything."""
    case = make_case(0, huge_padding=False)
    if isinstance(declared, Estimator):
        return inputs_of(case)
    if isinstance(declared, PolicyLoss):
        columns = (case.logps, case.old_logps, case.advantages, case.mask)
        others = {"ref_logps": case.old_logps, "ages": case.mask, "dual_clip": 1.1}
        return policy_inputs(*columns, clip=0.1, clip_high=0.1, **others)
    logps = torch.tensor([-2.0, -4.0])
    point, labels = torch.zeros(2), torch.tensor([True, False])
    return preference_inputs(logps / 8, beta=0.1, logps=logps, reference_point=point, labels=labels)


@pytest.mark.parametrize(
    "declared",
    [*ADVANTAGE_ESTIMATORS.values(), *POLICY_LOSSES.values(), *PREFERENCE_LOSSES.values()],
)
def test_a_built_in_function_depends_on_what_it_declares_alone(declared):
    inputs = full_inputs(declared)

    def result(inputs):
        returned = declared.compute(inputs)
        return returned[0] if isinstance(returned, tuple) else returned

    for name in (*declared.all_needs, *type(declared).settings):
        is_gain = name == "ref_logps" and not hasattr(inputs, name)
        field = "gains" if is_gain else name
        changed = {field: other_value(field, getattr(inputs, field))}
        depends = not result(replace(inputs, **changed)).equal(result(inputs))
        assert depends == (name in (*declared.needs, *declared.settings)), name


def keys_of_terms():
    """("kl.type", "loss") and every number of the actor, with a value that has an effect."""
    numbers = [name for name, types in key_types(PPOConfig) if float in types]
    return [("kl.type", "loss"), *((n, 1.5) for n in numbers if n.startswith("actor."))]


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_rows_that_may_be_dropped_have_no_gradient(loss):
    """No loss and no term of `actor_loss` has one, unless can_drop_rows is False for it."""
    num_dropped = []
    for name, value in keys_of_terms():
        config = PPOConfig()
        config.actor.loss, config.kl.coef = loss, 0.1
        section, _, field = name.partition(".")
        setattr(getattr(config, section), field, value)
        batch = collate(make_samples(num_groups=2, group_size=3))
        batch.advantages = batch.mask * torch.tensor([1.0, -1, 0, 0, 0, 0])[:, None]
        batch.old_logps = batch.engine_logps - 0.1
        batch.ref_logps = batch.engine_logps + 1
        batch.token_weights = batch.mask.float()
        logps = (batch.engine_logps - 0.1).requires_grad_()
        entropy = torch.ones_like(logps).requires_grad_()
        total, _ = actor_loss(config.actor, config.kl, batch, TokenScores(logps, entropy))
        gradients = torch.autograd.grad(total, (logps, entropy))
        assert gradients[0][:2].any()
        has_gradient = any(gradient[2:].any() for gradient in gradients)
        assert has_gradient != can_drop_rows(config), name
        num_dropped.append(not has_gradient)
    assert num_dropped.count(False) == 2  # the KL term and the entropy bonus


@pytest.mark.parametrize(
    ("key", "value", "is_scored"),
    [
        ("actor.clip", 0.1, False),
        ("actor.update_per_rollout", 2, True),
        ("actor.epochs_per_rollout", 2, True),
        ("kl.type", "loss", False),
        ("kl.type", "reward", True),
        ("teacher.base_url", "http://teacher", True),
        ("adv.estimator", "distillation", True),
    ],
)
def test_the_policy_scores_a_rollout_only_where_that_is_needed(key, value, is_scored):
    config = PPOConfig()
    section, name = key.split(".")
    setattr(getattr(config, section), name, value)
    assert needs_old_logps(config) == is_scored


def test_the_listed_names_are_those_of_the_tables():
    """--help lists the names without the tables, which need torch."""
    assert names.ADVANTAGE_ESTIMATOR_NAMES == tuple(ADVANTAGE_ESTIMATORS)
    assert names.POLICY_LOSS_NAMES == tuple(POLICY_LOSSES)
    assert names.PREFERENCE_LOSS_NAMES == tuple(PREFERENCE_LOSSES)
    assert names.KL_ESTIMATOR_NAMES == tuple(KL_ESTIMATORS)
    assert names.IMPORTANCE_CORRECTION_NAMES == tuple(IMPORTANCE_CORRECTIONS)
