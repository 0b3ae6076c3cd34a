"""Losses, KL estimates and the weights of tokens in a mean.

Shapes: B sequences, T columns, each beside the token that is predicted. `mask` [B, T] is 1 where a
token is trained; `trajectory` [B] says which sequences are one conversation. Losses and metrics are
sums weighted by `weights` [B, T] of `token_weights`, so the sum over any split of the rows is the
value of the whole. Finite values where mask or weights are 0 have no influence, however large.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from rl2.algorithms.names import TOKEN_AVERAGES

Metrics = dict[str, Tensor]
LossAndMetrics = tuple[Tensor, Metrics]
LARGEST_EXPONENT = 80  # e^80 is finite in fp32 and bf16, and no useful ratio is near it
LARGEST_ENGINE_RATIO = 20.0  # of `dppo`, as in verl


def masked(mask: Tensor, values: Tensor) -> Tensor:
    """Values where the mask is set, 0 elsewhere. Apply it before anything that could overflow."""
    return torch.where(mask > 0, values, 0.0)


def row_means(mask: Tensor, values: Tensor) -> Tensor:
    """[b, 1]: the mean over the trained tokens of each row; 0 without any. Values are masked."""
    return values.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)


def sum_by_index(index: Tensor, values: Tensor, num: int) -> Tensor:
    """[num]: the sum of the values that have each index."""
    return values.new_zeros(num).index_add(0, index, values)


def finite_exp(exponent: Tensor) -> Tensor:
    """e^x, finite for any finite x. A clipped infinite ratio would have the gradient 0 * inf."""
    return exponent.clamp(max=LARGEST_EXPONENT).exp()


@dataclass(frozen=True)
class Declaration:
    """A loss or an estimator, and what it declares to the config and the trainer.

    ValueError for settings or needs that do not exist.
    """

    compute: Callable[[Any], Any]  # of one argument, which has all inputs
    # The settings that it reads, by default all of its kind. The user may set no other.
    settings: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()  # the inputs that take work
    all_needs: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        kind = type(self)
        _check_names(f"{kind.__name__}(settings=...)", self.settings, kind.settings)
        _check_names(f"{kind.__name__}(needs=...)", self.needs, kind.all_needs)

    @property
    def used_settings(self) -> tuple[str, ...]:
        """Those of its settings that have an effect."""
        return self.settings


def _check_names(what: str, names: tuple[str, ...], known: tuple[str, ...]) -> None:
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"{what} does not know {', '.join(unknown)}: choose {', '.join(known)}")


# KL estimates, of d = logp - ref_logp.

KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda d: d,
    "k2": lambda d: d.square() / 2,
    "k3": lambda d: finite_exp(-d) - 1 + d,
}


def kl_estimate(logps: Tensor, ref_logps: Tensor, estimator: str) -> Tensor:
    """KL(policy || reference) at each sampled token [B, T], by k1, k2 or k3.

    Source: Schulman, "Approximating KL divergence", 2020. In a reward, k1 is unbiased. In a loss,
    k2's on-policy gradient is that of the KL, k3's is not, and k1's is 0 in expectation.
    """
    # No real difference is near the bound. It keeps values at padding finite.
    return KL_ESTIMATORS[estimator]((logps - ref_logps).clamp(-1e4, 1e4))


def weighted_kl(estimate: Tensor, log_ratio: Tensor, estimator: str) -> Tensor:
    """The KL estimate at each token [B, T], weighted by rho = p / p_sampled, `log_ratio` its log.

    The tokens of an older policy then give the KL of the current one, and its gradient: with
    d = logp - ref_logp it is rho d grad(logp) per token (DeepSeek-V3.2, arXiv:2512.02556, with k3).
    In k1 and k3 a part of it goes through rho; in k2 none does.
    """
    ratio = finite_exp(log_ratio)
    return estimate * (ratio.detach() if estimator == "k2" else ratio)


def token_weights(
    mask: Tensor,
    trajectory: Tensor,
    average: str,
    constant: int | None = None,
    group: Tensor | None = None,
) -> Tensor:
    """Returns the weight [B, T] of each token in the mean loss of one optimizer step.

    `token`: every trained token weighs the same (DAPO, arXiv:2503.14476). `sequence`: the mean over
    trajectories of each one's token mean (GRPO, arXiv:2402.03300). `prompt`: the mean over the
    prompts that `group` [B] tells apart, of the token mean of all answers to each (ScaleRL,
    arXiv:2510.13786, section 3.2; equation 8 of DAPO). `constant`: the sum over tokens
    divided by trajectories * `constant`, a length (Dr. GRPO, arXiv:2503.20783). The weights of
    `constant` do not sum to 1.

    Trajectories without a trained token do not count. If no token is trained, all weights are 0.
    """
    assert average in TOKEN_AVERAGES, average
    units = trajectory
    if average == "prompt":
        assert group is not None, "average 'prompt' needs the group of each row"
        units = group
    ids, row_index = units.unique(return_inverse=True)
    lengths = sum_by_index(row_index, mask.sum(1), len(ids))
    num_units = (lengths > 0).sum().clamp(min=1)
    if average == "token":
        return mask / lengths.sum().clamp(min=1)
    if average == "constant":
        assert constant, "average 'constant' needs a length, such as max_new_tokens"
        return mask / (num_units * constant)
    return mask / (lengths.clamp(min=1)[row_index, None] * num_units)


@dataclass(frozen=True)
class PolicyInputs:
    """The input of a policy loss: a micro-batch of whole sequences.

    The loss returns the loss of each token [b, T], and metrics of each token {name: [b, T]}, which
    are logged as means. Finite results have no influence where the mask is 0.
    """

    logps: Tensor  # [b, T] the policy's log-probabilities, the only input with a gradient
    old_logps: Tensor  # [b, T] of the old policy: that before the updates, or that which sampled
    engine_logps: Tensor  # [b, T] the engine's, of the tokens that it sampled
    advantages: Tensor  # [b, T] 0 where the mask is 0
    mask: Tensor  # [b, T] float32, as all columns; 1 = trained
    group: Tensor  # [b] rows of one prompt; some of them may be in other micro-batches
    trajectory: Tensor  # [b] rows of one conversation; some may be in other micro-batches too
    clip: float  # this and the following are the settings actor.* of the config
    clip_high: float
    dual_clip: float | None = None
    # The columns below are there if the loss declares that it needs them.
    ref_logps: Tensor | None = None  # [b, T] the reference's
    # [b, T] how many updates older than the weights that start this step's updates those are that
    # sampled the token: above 0 with rollout.partial or rollout.num_processes
    ages: Tensor | None = None

    @cached_property
    def log_ratio(self) -> Tensor:
        """logps - old_logps [b, T], 0 where the mask is 0."""
        return masked(self.mask, self.logps - self.old_logps)


TokenLosses = tuple[Tensor, Metrics]  # [b, T] each


@dataclass(frozen=True)
class PolicyLoss(Declaration):
    """Declares a policy loss."""

    compute: Callable[[PolicyInputs], TokenLosses]
    settings: tuple[str, ...] = ("clip", "clip_high", "dual_clip")
    # "ref_logps" loads a reference model; "ages" refuses trainer.rollouts_from.
    all_needs = ("ref_logps", "ages")
    # Its ratio is that to the engine's probabilities. actor.correction would count it twice.
    corrects_mismatch: bool = False
    # A token of advantage 0 has no gradient, whatever its log-probability is. Then rows without an
    # advantage are not run, which saves their passes. A wrong declaration loses their gradient.
    vanishes_without_advantage: bool = False


def ppo(x: PolicyInputs) -> TokenLosses:
    """-min(A rho, A clip(rho, 1 - clip, 1 + clip_high)), rho = exp(log_ratio) (arXiv:1707.06347).

    Where A < 0 it is at most dual_clip * |A| (arXiv:1912.09729; dual_clip > 1).
    """
    return clipped_losses(x.log_ratio, x)


def gspo(x: PolicyInputs) -> TokenLosses:
    """`ppo` with the geometric mean of the sequence's ratios (GSPO-token, arXiv:2507.18071).

    The gradient flows through each token's own log-probability.
    """
    mean = row_means(x.mask, x.log_ratio)
    sequence_log_ratio = mean.detach() + (x.log_ratio - x.log_ratio.detach())
    return clipped_losses(sequence_log_ratio, x)


def clipped_losses(log_ratio: Tensor, x: PolicyInputs) -> TokenLosses:
    """The loss of `ppo` for a log-ratio [b, T]."""
    ratio = finite_exp(log_ratio)
    bounded = ratio.clamp(1 - x.clip, 1 + x.clip_high)
    losses = -torch.minimum(x.advantages * ratio, x.advantages * bounded)
    clipped = x.advantages * ratio > x.advantages * bounded
    if x.dual_clip is not None:
        limit = x.dual_clip * x.advantages.abs()  # where A >= 0 the loss is below 0 anyway
        clipped = clipped | (losses > limit)
        losses = torch.minimum(losses, limit)
    return losses, {"clip_ratio": clipped, "ratio": ratio.detach()}


def cispo(x: PolicyInputs) -> TokenLosses:
    """-sg(min(rho, 1 + clip_high)) A logp (CISPO, arXiv:2506.13585)."""
    ratio = finite_exp(x.log_ratio)
    high = 1 + x.clip_high
    losses = -ratio.detach().clamp(max=high) * x.advantages * x.logps
    return losses, {"clip_ratio": ratio > high}


def dppo(x: PolicyInputs) -> TokenLosses:
    """-A min(rho, 20), rho = p / p_engine; 0 where p has left the trust region.

    It has left where A > 0 and p - p_engine > clip_high, or A < 0 and p_engine - p > clip. A
    difference of probabilities bounds the total variation, where a ratio holds rare tokens too
    tightly and frequent ones too loosely (DPPO-Binary-TV, arXiv:2602.04879). The trust region is
    around the policy of the engine, so no second correction is needed.
    """
    log_ratio = masked(x.mask, x.logps - x.engine_logps)
    moved = masked(x.mask, x.logps.exp() - x.engine_logps.exp())
    outside = torch.where(x.advantages > 0, moved > x.clip_high, -moved > x.clip)
    ratio = finite_exp(log_ratio)
    # Beyond the cap it is a constant factor of logp, as in CISPO: the token still has a gradient.
    capped = ratio.detach().clamp(max=LARGEST_ENGINE_RATIO)
    losses = -x.advantages * capped * (1 + log_ratio - log_ratio.detach())
    metrics = {"clip_ratio": outside & (x.advantages != 0), "ratio": ratio}
    return torch.where(outside, 0.0, losses), metrics


def reinforce(x: PolicyInputs) -> TokenLosses:
    """-A logp: the plain policy gradient (Williams, 1992), without a ratio.

    It is exact while the policy that sampled is the current one, so in one update a rollout.
    """
    return -x.advantages * x.logps, {}


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo": PolicyLoss(ppo, vanishes_without_advantage=True),
    "gspo": PolicyLoss(gspo, vanishes_without_advantage=True),
    "cispo": PolicyLoss(cispo, settings=("clip_high",), vanishes_without_advantage=True),
    "dppo": PolicyLoss(
        dppo,
        settings=("clip", "clip_high"),
        corrects_mismatch=True,
        vanishes_without_advantage=True,
    ),
    "reinforce": PolicyLoss(reinforce, settings=(), vanishes_without_advantage=True),
}


def policy_loss(
    token_loss: Callable[[PolicyInputs], TokenLosses],
    inputs: PolicyInputs,
    weights: Tensor,
    correction: Tensor | None = None,
    off_policy_limit: float | None = None,
) -> LossAndMetrics:
    """The policy gradient's surrogate `token_loss`, a weighted sum over [b, T], and its metrics.

    `correction` [b, T], of `importance_weights`, multiplies the loss of each token. The loss of
    `unlikely_failures` is 0 if there is a limit for them.

    Metrics: approx_kl, k3 of KL(old || new); ratio, the mean rho (gspo: of the sequence);
    off_policy_masked, the fraction of tokens in such failures; and those of the loss. All but
    reinforce give clip_ratio, the fraction of tokens whose gradient (cispo: whose rho) was clipped,
    the dual clip included.
    """
    inputs = replace(inputs, advantages=masked(inputs.mask, inputs.advantages))
    losses, metrics = token_loss(inputs)
    if correction is not None:
        losses = losses * correction
    if off_policy_limit is not None:
        is_masked = unlikely_failures(inputs, off_policy_limit)
        losses = torch.where(is_masked, 0.0, losses)
        metrics = metrics | {"off_policy_masked": is_masked}
    log_ratio = inputs.log_ratio.detach()
    approx_kl = KL_ESTIMATORS["k3"](-log_ratio)
    metrics = {"ratio": finite_exp(log_ratio)} | metrics | {"approx_kl": approx_kl}
    return (losses * weights).sum(), weighted_sums(metrics, weights)


def unlikely_failures(x: PolicyInputs, limit: float) -> Tensor:
    """[b, T] whether a token has A < 0 in a row whose mean log(p_engine / p) is above the limit.

    The off-policy sequence mask of DeepSeek-V3.2 (arXiv:2512.02556): a bad answer that the policy
    would hardly give any more teaches it little, and makes the training unstable.
    """
    log_ratio = masked(x.mask, x.engine_logps - x.logps.detach())
    return (x.advantages < 0) & (row_means(x.mask, log_ratio) > limit)


def weighted_sums(metrics: Mapping[str, Tensor], weights: Tensor) -> Metrics:
    """The weighted sum of each metric, without a gradient."""
    return {name: (value.detach() * weights).sum() for name, value in metrics.items()}


# The default cap of each correction: TRL's for the product over a sequence, and the one in use for
# single tokens.
IMPORTANCE_CORRECTIONS = {
    "token_tis": 2.0,
    "token_mask": 2.0,
    "sequence_mask": 3.0,
    "geometric_mask": 2.0,
}


def importance_weights(
    old_logps: Tensor, engine_logps: Tensor, mask: Tensor, kind: str, cap: float | None = None
) -> Tensor:
    """The factor [B, T] of each token's loss, for an engine with other probabilities than ours.

    With rho = exp(old_logp - engine_logp), it is by `kind`:
    token_tis: min(rho, cap), truncated importance sampling (Yao et al., "Your efficient RL
    framework secretly brings you off-policy RL training", 2025);
    token_mask: rho, or 0 outside [1/cap, cap] (IcePop, arXiv:2510.18855);
    sequence_mask: the product of the row's rho, or 0 above cap (TRL);
    geometric_mask: 1, or 0 for a row whose geometric mean of rho is outside [1/cap, cap].

    It has no gradient, and never depends on the log-probabilities that an update has changed.
    """
    cap = cap or IMPORTANCE_CORRECTIONS[kind]
    log_rho = masked(mask, old_logps - engine_logps).detach()
    if kind == "sequence_mask":
        log_rho = log_rho.sum(1, keepdim=True)
    elif kind == "geometric_mask":
        log_rho = row_means(mask, log_rho)
    rho = finite_exp(log_rho)
    is_near = (rho >= 1 / cap) & (rho <= cap)
    if kind == "token_tis":
        weights = rho.clamp(max=cap)
    elif kind == "token_mask":
        weights = torch.where(is_near, rho, 0.0)
    elif kind == "sequence_mask":
        weights = torch.where(rho <= cap, rho, 0.0)
    else:
        weights = is_near.to(rho.dtype)
    return weights.expand_as(old_logps)


def rollout_mismatch(old_logps: Tensor, engine_logps: Tensor, weights: Tensor) -> Metrics:
    """How far the trainer's log-probabilities of the sampled tokens are from the engine's.

    logp_difference: the mean absolute difference; kl_k1 and kl_k3: KL(engine || trainer); outside:
    the fraction of tokens whose ratio leaves [0.9, 1.1]; ratio and ratio_squared: the means
    of the ratio trainer / engine and of its square.
    """
    difference = masked(weights, engine_logps - old_logps)
    rho = finite_exp(-difference)
    metrics = {
        "logp_difference": difference.abs(),
        "kl_k1": KL_ESTIMATORS["k1"](difference),
        "kl_k3": KL_ESTIMATORS["k3"](difference),
        "outside": (rho < 0.9) | (rho > 1.1),
        "ratio": rho,
        "ratio_squared": finite_exp(-2 * difference),
    }
    return weighted_sums(metrics, weights)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, clip: float
) -> LossAndMetrics:
    """The weighted sum of max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2).

    It lacks the 1/2 that TRL and verl put before it. Metrics: clip_ratio, the fraction of tokens
    whose clipped error is the larger one; value, the mean V.
    """
    values = masked(weights, values)
    old_values = masked(weights, old_values)
    returns = masked(weights, returns)
    bounded = values.clamp(old_values - clip, old_values + clip)
    plain = (values - returns).square()
    clipped = (bounded - returns).square()
    loss = (torch.maximum(plain, clipped) * weights).sum()
    return loss, weighted_sums({"clip_ratio": clipped > plain, "value": values}, weights)


@dataclass(frozen=True)
class PreferenceInputs:
    """The input of a preference loss: R replies. Of P pairs, each rejected one follows the chosen.

    So x[::2] are those of the chosen replies, and x[1::2] those of the rejected ones.
    Log-probabilities are sums over the tokens of a reply.
    """

    logps: Tensor  # [R] the policy's, with a gradient
    lengths: Tensor  # [R] float32, the tokens of the reply
    beta: float  # this and the following are the settings dpo.* of the config
    label_smoothing: float
    target_margin: float
    desirable_weight: float
    undesirable_weight: float
    labels: Tensor | None = None  # [R] bool, whether the reply is desirable; None of pairs
    # The columns below are there if the loss declares that it needs them.
    gains: Tensor | None = None  # [R] logp - ref_logp, with a gradient
    # [R] the estimate of KL(policy || reference) of `reference_point`, the same for all replies of
    # a step
    reference_point: Tensor | None = None

    @property
    def chosen_gain(self) -> Tensor:
        """[P] the gain of the chosen reply."""
        assert self.gains is not None
        return self.gains[::2]

    @property
    def rejected_gain(self) -> Tensor:
        """[P] the gain of the rejected reply."""
        assert self.gains is not None
        return self.gains[1::2]

    @cached_property
    def margin(self) -> Tensor:
        """[P] chosen_gain - rejected_gain."""
        return self.chosen_gain - self.rejected_gain

    @cached_property
    def mean_margin(self) -> Tensor:
        """[P] the same of the means over the tokens of a reply."""
        assert self.gains is not None
        means = self.gains / self.lengths
        return means[::2] - means[1::2]

    @cached_property
    def chosen_mean_logp(self) -> Tensor:
        """[P] the mean over the tokens of the chosen reply."""
        return self.logps[::2] / self.lengths[::2]

    @cached_property
    def rejected_mean_logp(self) -> Tensor:
        """[P] the mean over the tokens of the rejected reply."""
        return self.logps[1::2] / self.lengths[1::2]


SETTINGS_OF_PAIRS = ("label_smoothing", "target_margin")
SETTINGS_OF_REPLIES = ("desirable_weight", "undesirable_weight")


@dataclass(frozen=True)
class PreferenceLoss(Declaration):
    """Declares a preference loss. The user may always set beta, which metrics use too."""

    compute: Callable[[PreferenceInputs], Tensor]  # the loss of each pair [P] or of each reply [R]
    settings: tuple[str, ...] = ("beta",) + SETTINGS_OF_PAIRS + SETTINGS_OF_REPLIES
    # Each loads a reference model. "reference_point" also scores mismatched replies in each step.
    needs: tuple[str, ...] = ("ref_logps",)
    all_needs = ("ref_logps", "reference_point")
    in_pairs: bool = True  # else the rows are single replies with labels

    @property
    def used_settings(self) -> tuple[str, ...]:
        other_form = SETTINGS_OF_REPLIES if self.in_pairs else SETTINGS_OF_PAIRS
        return tuple(name for name in self.settings if name not in other_form)


def sigmoid(x: PreferenceInputs) -> Tensor:
    """-log sigmoid(beta m): DPO (arXiv:2305.18290).

    `label_smoothing` is the fraction of pairs taken to be the wrong way round, whose loss has -m
    (conservative DPO, Mitchell, 2023).
    """
    right = -(1 - x.label_smoothing) * logsigmoid(x.beta * x.margin)
    return right - x.label_smoothing * logsigmoid(-x.beta * x.margin)


def ipo(x: PreferenceInputs) -> Tensor:
    """(m - 1 / (2 beta))^2 (arXiv:2310.12036), with the mean over tokens as its authors and TRL."""
    return (x.mean_margin - 1 / (2 * x.beta)).square()


def hinge(x: PreferenceInputs) -> Tensor:
    """max(0, 1 - beta m) (SLiC, arXiv:2305.10425)."""
    return (1 - x.beta * x.margin).clamp(min=0)


def simpo(x: PreferenceInputs) -> Tensor:
    """-log sigmoid(beta (mean logp_chosen - mean logp_rejected) - target_margin).

    SimPO (arXiv:2405.14734), whose gamma is `target_margin`. It has no reference.
    """
    difference = x.chosen_mean_logp - x.rejected_mean_logp
    return -logsigmoid(x.beta * difference - x.target_margin)


def orpo(x: PreferenceInputs) -> Tensor:
    """-mean logp_chosen - beta log sigmoid(log odds_chosen - log odds_rejected).

    ORPO (arXiv:2403.07691), whose lambda is `beta`: fine-tuning on the chosen reply plus the odds
    ratio, odds = p / (1 - p) with p = exp(mean logp). It has no reference.
    """
    chosen, rejected = log_odds(x.chosen_mean_logp), log_odds(x.rejected_mean_logp)
    return -x.chosen_mean_logp - x.beta * logsigmoid(chosen - rejected)


def log_odds(logp: Tensor) -> Tensor:
    """log(p / (1 - p)) of log p <= 0. A p of 1 counts as 1 - 1e-6, which keeps it finite."""
    return logp - torch.log(-torch.expm1(logp.clamp(max=-1e-6)))


def kto(x: PreferenceInputs) -> Tensor:
    """1 - sigmoid(beta (gain - z0)) of a desirable reply, 1 - sigmoid(beta (z0 - gain)) of another.

    KTO (arXiv:2402.01306), without the constant lambda - 1. z0 is `reference_point`, and the
    weights are its lambda_D and lambda_U.
    """
    assert x.labels is not None and x.gains is not None and x.reference_point is not None
    advantage = x.beta * (x.gains - x.reference_point)
    desirable = x.desirable_weight * torch.sigmoid(-advantage)
    undesirable = x.undesirable_weight * torch.sigmoid(advantage)
    return torch.where(x.labels, desirable, undesirable)


PREFERENCE_LOSSES: dict[str, PreferenceLoss] = {
    "sigmoid": PreferenceLoss(sigmoid, settings=("beta", "label_smoothing")),
    "ipo": PreferenceLoss(ipo, settings=("beta",)),
    "hinge": PreferenceLoss(hinge, settings=("beta",)),
    "simpo": PreferenceLoss(simpo, settings=("beta", "target_margin"), needs=()),
    "orpo": PreferenceLoss(orpo, settings=("beta",), needs=()),
    "kto": PreferenceLoss(
        kto,
        settings=("beta", "desirable_weight", "undesirable_weight"),
        needs=("ref_logps", "reference_point"),
        in_pairs=False,
    ),
}


def reference_point(logps: Tensor, ref_logps: Tensor, mask: Tensor) -> Tensor:
    """max(0, mean over the rows of sum(logp - ref_logp)): KTO's z0, one number, no gradient.

    The rows [B, T] are prompts with replies to other prompts. The mean estimates
    KL(policy || reference), with a bias that its authors accept to spare the sampling of replies.
    """
    return masked(mask, logps - ref_logps).sum(1).mean().clamp(min=0).detach()


def pair_metrics(rewards: Tensor, weights: Tensor) -> tuple[Tensor, Metrics]:
    """The weights [P] of pairs, and metrics of their replies' rewards [B].

    accuracy: the fraction of pairs in the right order; margin: by how much; chosen_reward and
    rejected_reward: the means. A pair weighs as much as its two rows.
    """
    row_weights = weights.sum(1)
    pair_weights = row_weights[::2] + row_weights[1::2]
    chosen, rejected = rewards.detach()[::2], rewards.detach()[1::2]
    metrics = {
        "accuracy": chosen > rejected,
        "margin": chosen - rejected,
        "chosen_reward": chosen,
        "rejected_reward": rejected,
    }
    return pair_weights, weighted_sums(metrics, pair_weights)


def label_metrics(rewards: Tensor, weights: Tensor, is_desirable: Tensor) -> tuple[Tensor, Metrics]:
    """The weights [B] of labelled replies, and metrics of their rewards [B].

    reward: the mean; margin: the same with the sign turned for undesirable replies; accuracy: the
    fraction of replies in which that is above 0.
    """
    row_weights = weights.sum(1)
    margins = torch.where(is_desirable, rewards, -rewards)
    metrics = {"accuracy": margins > 0, "margin": margins, "reward": rewards}
    return row_weights, weighted_sums(metrics, row_weights)
