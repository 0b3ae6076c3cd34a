"""Tests of rl2/algorithms and of the losses of the trainers.

Estimators are compared with loops in plain Python, losses with formulas on whole columns.
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
from common import advantage_inputs, make_samples, policy_inputs, preference_inputs
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

assert_close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-9)
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


def make_case(seed, huge_padding=True):
    """Random columns of ragged groups of trajectories.

    A trajectory has one to three rows. The rows of different trajectories are interleaved. Some
    tokens are not sampled, and some trajectories have no sampled token. The ids of groups and
    trajectories are not sorted.
    """
    # From here on there are groups that have failed or have one trajectory, and rows of one token.
    rng = random.Random(1460 + seed)
    groups = []  # the group id of each trajectory
    for group in rng.sample(range(100), rng.randint(1, 4)):
        groups += [group] * rng.randint(1, 4)
    rows = []  # (group, trajectory, whether it has failed)
    failure_rate = 1 if seed == NOTHING_TRAINED else 0.15
    for group, trajectory in zip(groups, rng.sample(range(1000), len(groups)), strict=True):
        rows += [(group, trajectory, rng.random() < failure_rate)] * rng.randint(1, 3)
    rng.shuffle(rows)
    case = SimpleNamespace()
    case.group, case.trajectory, failed = map(torch.tensor, zip(*rows, strict=True))
    shape = (len(rows), rng.randint(1, 8))
    generator = torch.Generator().manual_seed(seed)
    sampled = torch.rand(shape, generator=generator) < 0.7
    sampled[0, 0] = True
    case.mask = (sampled & ~failed[:, None]).double()

    def normal(scale=1.0):
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    case.old_logps = -normal().abs()
    case.logps = case.old_logps + normal(0.2)
    case.engine_logps = case.old_logps + normal(0.15)
    case.rewards = torch.randint(0, 2, shape, generator=generator).double()
    case.advantages = normal()
    case.correction = normal().abs()
    case.old_values = normal()
    case.returns = normal()
    case.values = case.old_values + normal(0.3)
    case.weights = torch.rand(shape, generator=generator).double() * case.mask
    # Some tokens are much rarer in the engine, so that the ratio to it meets its cap.
    case.engine_logps -= 4 * (torch.rand(shape, generator=generator) < 0.1)
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


def trained(mask, column):
    """The column with 0 where no token is trained, and the mean over the tokens of each row."""
    column = torch.where(mask > 0, column, 0.0)
    return column, column.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


def sampled_cells(mask, trajectory):
    """{trajectory: [(row, column) of each sampled token, in order of time]}."""
    cells = defaultdict(list)
    for b, row in enumerate(mask.tolist()):
        for t, sampled in enumerate(row):
            if sampled:
                cells[trajectory[b].item()].append((b, t))
    return cells


def assert_metrics(metrics, expected):
    """Assert that the metrics are scalars without a gradient, equal to `expected`."""
    assert metrics.keys() == expected.keys()
    for name, value in metrics.items():
        assert value.shape == () and not value.requires_grad, name
        wanted = torch.as_tensor(expected[name], dtype=torch.float64).item()
        assert value.item() == pytest.approx(wanted, rel=1e-9, abs=1e-9), name


# KL


def test_kl_estimates_and_their_gradients_in_expectation():
    """The expectations over all tokens of a softmax: k1 and k3 are unbiased.

    The gradients are 0, that of KL(policy || reference), and that of KL(reference || policy).
    Weighted by the ratio to the policy that sampled, all are that of KL(policy || reference).
    """
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    ref, sampling = torch.randn(2, 6, dtype=torch.float64).log_softmax(-1)
    logps = logits.log_softmax(0)
    reverse_kl = (logps.exp() * (logps - ref)).sum()
    forward_kl = (ref.exp() * (ref - logps)).sum()

    def gradient(loss):
        return torch.autograd.grad(loss, logits, retain_graph=True)[0]

    for name, same_gradient in {"k1": 0 * forward_kl, "k2": reverse_kl, "k3": forward_kl}.items():
        estimate = kl_estimate(logps, ref, name)
        expectation = (logps.exp().detach() * estimate).sum()
        assert name == "k2" or expectation.item() == pytest.approx(reverse_kl.item())
        assert_close(gradient(expectation), gradient(same_gradient))
        weighted = (sampling.exp() * weighted_kl(estimate, logps - sampling, name)).sum()
        assert_close(gradient(weighted), gradient(reverse_kl))
    assert (gradient(forward_kl) - gradient(reverse_kl)).abs().max() > 0.05


# Advantages


def parts_of(case):
    """Two reward parts, the second of weight 2: values [B] that are those of the trajectory."""
    return {
        "a": RewardPart((case.trajectory % 3).to(case.mask.dtype), 1.0),
        "b": RewardPart((case.trajectory % 7 / 7).to(case.mask.dtype), 2.0),
    }


def inputs_of(case, **settings):
    columns = {"reward_parts": parts_of(case), "values": case.values}
    columns |= {"old_logps": case.old_logps, "teacher_logps": case.logps}
    others = columns | settings
    return advantage_inputs(case.mask, case.rewards, case.group, case.trajectory, **others)


def compare_in_groups(case, advantage, values=None):
    """{trajectory: advantage(its value, those of its group)}. The values are the rewards."""
    cells_of = sampled_cells(case.mask, case.trajectory)
    if values is None:
        values = {t: sum(case.rewards[c].item() for c in cells) for t, cells in cells_of.items()}
    group_of = dict(zip(case.trajectory.tolist(), case.group.tolist(), strict=True))
    members = defaultdict(list)
    for trajectory in cells_of:
        members[group_of[trajectory]].append(values[trajectory])
    return {t: advantage(values[t], members[group_of[t]]) for t in cells_of}


def on_tokens(case, values):
    """[B, T] of {trajectory: value}."""
    rows = [[values.get(trajectory, 0.0)] for trajectory in case.trajectory.tolist()]
    return torch.tensor(rows, dtype=torch.float64) * case.mask


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


def whitened(case, column):
    sampled = column[case.mask > 0]
    if len(sampled) < 2:
        return torch.zeros_like(column)
    return (column - sampled.mean()) / (sampled.var() + 1e-8).sqrt() * case.mask


def loop_gae(case, values, gamma, lamda):
    advantages = torch.zeros_like(case.mask)
    for cells in sampled_cells(case.mask, case.trajectory).values():
        advantage = next_value = 0.0
        for cell in reversed(cells):
            delta = case.rewards[cell] + gamma * next_value - values[cell]
            advantage = delta + gamma * lamda * advantage
            advantages[cell] = advantage
            next_value = values[cell]
    return advantages


def loop_reinforce_plus_plus(case):
    return whitened(case, loop_gae(case, torch.zeros_like(case.values), 0.9, 1.0))


def by_group(advantage):
    return lambda case: on_tokens(case, compare_in_groups(case, advantage))


ESTIMATES = [
    ("reinforce", dict(norm_var=False), by_group(over_mean)),
    ("reinforce", dict(norm_var=True), by_group(over_mean_in_deviations)),
    ("rloo", {}, by_group(over_the_others)),
    ("maxrl", {}, by_group(over_mean_in_means)),
    ("gdpo", {}, loop_gdpo),
    ("reinforce_plus_plus", dict(gamma=0.9), loop_reinforce_plus_plus),
    ("reinforce_plus_plus_baseline", {}, lambda case: whitened(case, by_group(over_mean)(case))),
    ("distillation", {}, lambda case: trained(case.mask, case.logps - case.old_logps)[0]),
]


@pytest.mark.parametrize(("estimator", "settings", "loop"), ESTIMATES)
@pytest.mark.parametrize("seed", [*SEEDS, NOTHING_TRAINED])
def test_an_estimator_is_its_loop_and_edits_nothing(seed, estimator, settings, loop):
    case = make_case(seed)
    advantages = ADVANTAGE_ESTIMATORS[estimator].compute(inputs_of(case, **settings))
    assert_close(advantages, loop(case))
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
    for rows in (7, 1):
        assert whiten(inputs.rewards[:rows], inputs.mask[:rows]).eq(0).all()


@pytest.mark.parametrize("gamma, lamda", [(0.9, 0.95), (1.0, 0.0), (0.97, 1.0)])
@pytest.mark.parametrize("seed", [*SEEDS, NOTHING_TRAINED])
def test_gae(seed, gamma, lamda):
    case = make_case(seed)
    expected = loop_gae(case, case.values, gamma, lamda)
    advantages, returns = gae(inputs_of(case, gamma=gamma, lamda=lamda))
    assert_close(advantages, expected)
    assert_close(returns, expected + trained(case.mask, case.values)[0])


# Averages


@pytest.mark.parametrize("seed", [*SEEDS, NOTHING_TRAINED])
def test_token_weights(seed):
    """What an average counts weighs the same, and so do the tokens of each."""
    case = make_case(seed)
    counted = {"token": 0 * case.group, "sequence": case.trajectory, "prompt": case.group}
    assert {*counted, "constant"} == {*names.TOKEN_AVERAGES}
    for average, ids in counted.items():
        expected = torch.zeros_like(case.mask)
        cells_of = sampled_cells(case.mask, ids)
        for cells in cells_of.values():
            for cell in cells:
                expected[cell] = 1 / len(cells) / len(cells_of)
        assert_close(token_weights(case.mask, case.trajectory, average, group=case.group), expected)
    num_trajectories = max(1, len(sampled_cells(case.mask, case.trajectory)))
    weights = token_weights(case.mask, case.trajectory, "constant", 16)
    assert_close(weights, case.mask / 16 / num_trajectories)


# Policy loss


def policy_formula(
    case, loss, clip, clip_high, dual_clip=None, correction=None, off_policy_limit=None
):
    """The loss, with its gradient, and the metrics."""
    low, high = 1 - clip, 1 + clip_high
    columns = (case.logps, case.engine_logps, case.advantages)
    logps, engine_logps, advantages = (trained(case.mask, column)[0] for column in columns)
    log_ratio, mean_log_ratio = trained(case.mask, case.logps - case.old_logps)
    ratio = log_ratio.exp()
    if loss == "gspo":  # the value is that of the row, the gradient flows through the token
        ratio = mean_log_ratio.exp().detach() * (logps - logps.detach()).exp()
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
        losses = losses * correction
    if off_policy_limit is not None:
        _, surprise = trained(case.mask, case.engine_logps - case.logps)
        metrics["off_policy_masked"] = (advantages < 0) & (surprise > off_policy_limit)
        losses = losses * ~metrics["off_policy_masked"]
    sums = {name: (case.weights * values).sum() for name, values in metrics.items()}
    return (case.weights * losses).sum(), sums


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
    log_rho, mean_log_rho = trained(case.mask, case.old_logps - case.engine_logps)
    rho, product, geometric_mean = log_rho.exp(), log_rho.sum(1, True).exp(), mean_log_rho.exp()
    expected = {
        "token_tis": rho.clamp(max=cap),
        "token_mask": rho * (rho >= 1 / cap) * (rho <= cap),
        "sequence_mask": product * (product <= cap),
        "geometric_mask": (geometric_mean >= 1 / cap) & (geometric_mean <= cap),
    }
    assert expected.keys() == IMPORTANCE_CORRECTIONS.keys()
    old_logps = case.old_logps.requires_grad_()
    engine_logps = case.engine_logps.requires_grad_()
    for correction, value in expected.items():
        weights = importance_weights(old_logps, engine_logps, case.mask, correction, cap)
        assert weights.shape == case.mask.shape and not weights.requires_grad
        assert_close(weights * case.mask, value * case.mask)


@pytest.mark.parametrize("seed", SEEDS)
def test_rollout_mismatch(seed):
    case = make_case(seed)
    differences, _ = trained(case.mask, case.engine_logps - case.old_logps)
    numbers = {
        "logp_difference": differences.abs(),
        "kl_k1": differences,
        "kl_k3": (-differences).exp() - 1 + differences,
        "outside": ((-differences).exp() - 1).abs() > 0.1,
        "ratio": (-differences).exp(),
        "ratio_squared": (-2 * differences).exp(),
    }
    expected = {name: (x * case.weights).sum() for name, x in numbers.items()}
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
    values = case.values.requires_grad_()
    columns = (values, case.old_values, case.returns)
    value, old_value, target = (trained(case.mask, column)[0] for column in columns)
    error = (value - target) ** 2
    clipped_error = (torch.clip(value, old_value - 0.2, old_value + 0.2) - target) ** 2
    expected = (case.weights * torch.where(error >= clipped_error, error, clipped_error)).sum()
    metrics = {"clip_ratio": clipped_error > error, "value": value}
    sums = {name: (case.weights * x).sum() for name, x in metrics.items()}
    check_loss(values, value_loss(*columns, case.weights, 0.2), expected, sums)


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


def metrics_of_pairs(rewards):
    """Of the rewards [8] of replies, which weigh the same."""
    chosen, rejected = rewards[::2], rewards[1::2]
    return {
        "chosen_reward": chosen.mean(),
        "rejected_reward": rejected.mean(),
        "accuracy": (chosen > rejected).double().mean(),
        "margin": (chosen - rejected).mean(),
    }


def mean_k3(case):
    """The mean of k3 over the tokens of each reply, and over the replies, which weigh the same."""
    log_ratios = case.logps - case.ref_logps
    _, means = trained(case.mask, log_ratios.exp() - 1 - log_ratios)
    return means.mean()


def check_loss(column, found, expected, expected_metrics):
    """Compare (loss, metrics) with an expected loss and metrics, also the gradients in a column."""
    loss, metrics = found
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    assert_metrics(metrics, expected_metrics)
    gradients = [torch.autograd.grad(value, column)[0] for value in (loss, expected)]
    assert_close(*gradients)


def pair_formula(loss, totals, means, beta, label_smoothing, target_margin):
    """The loss of each pair, of the total and the mean of log p, or log(p / p_reference)."""
    m = totals[::2] - totals[1::2]
    chosen, rejected = means[::2], means[1::2]
    if loss == "sigmoid":
        right, wrong = softplus(-beta * m), softplus(beta * m)
        return (1 - label_smoothing) * right + label_smoothing * wrong
    if loss == "hinge":
        return (1 - beta * m).clamp(min=0)
    if loss == "ipo":
        return (chosen - rejected - 1 / (2 * beta)) ** 2
    if loss == "simpo":
        return softplus(target_margin - beta * (chosen - rejected))
    odds = [mean - (1 - mean.exp()).log() for mean in (chosen, rejected)]
    return -chosen + beta * softplus(odds[1] - odds[0])


@pytest.mark.parametrize(("smoothing", "sft_coef"), [(0.0, 0.3), (0.2, 0.0)])
@pytest.mark.parametrize("loss", ["sigmoid", "hinge", "ipo", "simpo", "orpo"])
@pytest.mark.parametrize("seed", SEEDS)
def test_preference_losses(seed, loss, smoothing, sft_coef):
    case = make_pairs(seed)
    beta = 0.7
    settings = dict(beta=beta, label_smoothing=smoothing, target_margin=0.4)
    logps = case.logps.requires_grad_()
    gains, metrics = logps, {}
    if PREFERENCE_LOSSES[loss].needs:
        gains, metrics = logps - case.ref_logps, {"kl": mean_k3(case)}
    gains, means = trained(case.mask, gains)
    totals, means = gains.sum(1), means[:, 0]
    metrics |= metrics_of_pairs(beta * (totals if PREFERENCE_LOSSES[loss].needs else means))
    expected = pair_formula(loss, totals, means, **settings).mean()
    if sft_coef:
        metrics["chosen_loss"] = -trained(case.mask, logps)[1][::2].mean()
        expected = expected + sft_coef * metrics["chosen_loss"]
    found = preference_loss(case, loss, sft_coef=sft_coef, **settings)
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
    logps = case.logps.requires_grad_()
    log_ratios, _ = trained(case.mask, logps - case.ref_logps)
    rewards = 0.3 * (log_ratios.sum(1) - case.z0)
    margins = torch.where(case.label > 0, rewards, -rewards)
    weights = 1.5 * case.label + 0.7 * (1 - case.label)
    expected = (weights * (1 - margins.sigmoid())).mean()
    metrics = {
        "reward": rewards.mean(),
        "margin": margins.mean(),
        "accuracy": (margins > 0).double().mean(),
        "reference_point": case.z0[0],
        "kl": mean_k3(case),
    }
    found = preference_loss(case, "kto", beta=0.3, desirable_weight=1.5, undesirable_weight=0.7)
    check_loss(logps, found, expected, metrics)


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
    rewards = values[range(8), last_columns]
    expected = softplus(case.margin[::2] - (rewards[::2] - rewards[1::2])).mean()
    batch = SimpleNamespace(token_weights=weights, pair_margin=case.margin)
    found = rm.reward_loss(batch, TokenScores(values=values))
    check_loss(values, found, expected, metrics_of_pairs(rewards))


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


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_rows_that_may_be_dropped_have_no_gradient(loss):
    """No loss and no term of `actor_loss` has one, unless can_drop_rows is False for it."""
    numbers = [name for name, types in key_types(PPOConfig) if float in types]
    keys = [(name, 1.5) for name in numbers if name.startswith("actor.")]
    num_dropped = []
    for name, value in [("kl.type", "loss"), *keys]:
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
