"""The mathematics: KL estimates, advantages, losses. Pure functions of tensors and plain values.

Shapes: B sequences, T columns (each beside the token that is predicted), N trajectories, S sampled tokens of the
longest trajectory, G groups. `mask` [B, T] is 1 where the policy sampled the token and it is trained; `trajectory` [B]
says which sequences are one conversation, in order of time; `group` [B] which answer the same prompt. Whatever finite
values stand where mask or weights are 0 are ignored, however large. Losses and metrics are sums weighted by `weights`
[B, T] of `loss_weights`, so that summing them over any split of the rows gives the value of the whole.
"""

import torch
from torch import Tensor


def _where(mask, values):
    """Values where the mask is set, 0 elsewhere, before anything that could overflow."""
    return torch.where(mask > 0, values, 0.0)


def _exp(x):
    """e^x, finite in fp32 and bf16 for any finite x: an infinite ratio whose gradient the clip stops would be 0 * inf.
    No ratio that is still of use is near the bound."""
    return x.clamp(max=80).exp()


def _sum_by(index, values, num):
    """[num]: the sum of the values of each index."""
    return values.new_zeros(num).index_add(0, index, values)


def kl_estimate(logps: Tensor, ref_logps: Tensor, estimator: str) -> Tensor:
    """KL(policy || reference) of each sampled token, from d = logp - ref_logp: k1 = d, k2 = d^2 / 2,
    k3 = exp(-d) - 1 + d (Schulman, "Approximating KL divergence", 2020). In a loss, k2's on-policy gradient is the KL
    gradient, k3's is not, and k1's is 0 in expectation. In a reward, k1 is unbiased."""
    d = (logps - ref_logps).clamp(
        -1e4, 1e4
    )  # far from any real one: keeps what stands at padding finite
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        return _exp(-d) - 1 + d
    raise ValueError(f"KL estimator {estimator!r}: choose k1, k2 or k3")


def token_weights(
    mask: Tensor, trajectory: Tensor, average: str, constant: int | None = None
) -> Tensor:
    """The weight [B, T] of each token in the mean that a loss is, over the rows of one optimizer step. `token`: all
    trained tokens alike (DAPO, arXiv:2503.14476); `sequence`: the mean over trajectories of each one's token mean
    (GRPO, arXiv:2402.03300); `constant`: the sum over tokens divided by trajectories * `constant`, a length (Dr. GRPO,
    arXiv:2503.20783), so that the weights do not sum to 1, and metrics weighted by them are no means. Trajectories
    without a trained token do not count; where there is no other, all weights are 0."""
    ids, index = trajectory.unique(return_inverse=True)
    lengths = _sum_by(index, mask.sum(1), len(ids))
    num = (lengths > 0).sum().clamp(min=1)
    if average == "token":
        return mask / mask.sum().clamp(min=1)
    if average == "sequence":
        return mask / (lengths.clamp(min=1)[index, None] * num)
    if average != "constant":
        raise ValueError(f"average {average!r}: choose token, sequence or constant")
    if not constant or constant < 0:
        raise ValueError(
            f"the constant of average 'constant' is {constant}: give a length, such as max_new_tokens"
        )
    return mask / (num * constant)


def policy_loss(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor,
    clip: float,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    loss: str = "ppo",
    correction: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The surrogate of the policy gradient, a weighted sum over [B, T], and its metrics.

    With rho = exp(logp - old_logp), `ppo`: -min(A rho, A clip(rho, 1 - clip, 1 + clip_high)) (arXiv:1707.06347), at
    most dual_clip * |A| where A < 0 (arXiv:1912.09729; dual_clip > 1). `gspo`: the same with the row's geometric mean
    of rho in place of rho, the gradient flowing through each token's own logp (GSPO-token, arXiv:2507.18071). `cispo`:
    -sg(min(rho, 1 + clip_high)) A logp (arXiv:2506.13585). `clip_high` None is `clip`. `correction` [B, T] of
    `correction_weights` multiplies each token's loss. Only `logps` gets a gradient.

    Metrics: clip_ratio, the share of tokens whose gradient (cispo: whose rho) was clipped, the dual clip included;
    approx_kl, k3 of KL(old || new); ratio, the mean rho that the loss used.
    """
    log_ratio = _where(mask, logps - old_logps.detach())
    approx_kl = kl_estimate(-log_ratio.detach(), torch.zeros_like(log_ratio), "k3")
    advantages = _where(mask, advantages).detach()
    if loss == "gspo":
        mean = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
        log_ratio = mean.detach() + (log_ratio - log_ratio.detach())
    ratio, high = _exp(log_ratio), 1 + (clip if clip_high is None else clip_high)
    if loss == "cispo":
        losses = -ratio.detach().clamp(max=high) * advantages * logps
        clipped = ratio > high
    elif loss in ("ppo", "gspo"):
        bounded = ratio.clamp(1 - clip, high)
        losses = -torch.minimum(advantages * ratio, advantages * bounded)
        clipped = advantages * ratio > advantages * bounded
        if dual_clip is not None:
            limit = dual_clip * advantages.abs()  # where A >= 0 the loss is below 0 anyway
            clipped = clipped | (losses > limit)
            losses = torch.minimum(losses, limit)
    else:
        raise ValueError(f"policy loss {loss!r}: choose ppo, gspo or cispo")
    if correction is not None:
        losses = losses * correction.detach()
    metrics = {"clip_ratio": clipped, "approx_kl": approx_kl, "ratio": ratio.detach()}
    return (losses * weights).sum(), {
        name: (value * weights).sum() for name, value in metrics.items()
    }


def importance_weights(
    old_logps: Tensor, engine_logps: Tensor, mask: Tensor, kind: str, cap: float
) -> Tensor:
    """What each token's loss is multiplied by [B, T] because the engine sampled it with another probability than the
    trainer computes: from rho = exp(old_logp - engine_logp), detached, never from the current logps.

    `token_tis`: min(rho, cap), truncated importance sampling (Yao et al., "Your efficient RL framework secretly brings
    you off-policy RL training", 2025); `token_mask`: rho, or 0 outside [1/cap, cap] (IcePop, arXiv:2510.18855);
    `sequence_mask`: the product of the row's rho, or 0 above cap (TRL); `geometric_mask`: 1, or 0 for a row whose
    geometric mean of rho is outside [1/cap, cap].
    """
    log_rho = _where(mask, old_logps - engine_logps).detach()
    if kind == "token_tis":
        return _exp(log_rho).clamp(max=cap)
    if kind == "token_mask":
        rho = _exp(log_rho)
        return torch.where((rho >= 1 / cap) & (rho <= cap), rho, 0.0)
    total = log_rho.sum(1, keepdim=True)
    if kind == "sequence_mask":
        rho = _exp(total)
        return torch.where(rho <= cap, rho, 0.0).expand_as(log_rho)
    if kind == "geometric_mask":
        rho = _exp(total / mask.sum(1, keepdim=True).clamp(min=1))
        return ((rho >= 1 / cap) & (rho <= cap)).to(log_rho.dtype).expand_as(log_rho)
    raise ValueError(
        f"correction {kind!r}: choose token_tis, token_mask, sequence_mask or geometric_mask"
    )


def rollout_mismatch(old_logps: Tensor, engine_logps: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """How far the trainer's log-probabilities of the sampled tokens are from the engine's: mean absolute difference,
    k1 and k3 of KL(engine || trainer), and the share of tokens whose ratio leaves [0.9, 1.1]."""
    log_rho = _where(weights, old_logps - engine_logps).detach()
    rho, zeros = _exp(log_rho), torch.zeros_like(log_rho)
    found = {
        "logp_difference": log_rho.abs(),
        "kl_k1": kl_estimate(zeros, log_rho, "k1"),
        "kl_k3": kl_estimate(zeros, log_rho, "k3"),
        "outside": (rho < 0.9) | (rho > 1.1),
    }
    return {name: (value * weights).sum() for name, value in found.items()}


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, clip: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The weighted sum of max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2), without the 1/2 that TRL and
    verl put before it. Metrics: clip_ratio, the share of tokens where the clipped error is the larger; value, the mean
    V."""
    values, old_values, returns = (
        _where(weights, x) for x in (values, old_values.detach(), returns.detach())
    )
    bounded = values.clamp(old_values - clip, old_values + clip)
    plain, clipped = (values - returns).square(), (bounded - returns).square()
    metrics = {"clip_ratio": clipped > plain, "value": values}
    loss = (torch.maximum(plain, clipped) * weights).sum()
    return loss, {name: (value.detach() * weights).sum() for name, value in metrics.items()}


def cross_entropy(logps: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of -logp over the trained tokens: of supervised fine-tuning, and under `token` weights the
    logarithm of the perplexity."""
    return -(_where(weights, logps) * weights).sum()


def _preferences(rewards, weights):
    """What is told of the rewards [B] of pairs, row 2i the chosen and 2i + 1 the rejected reply of pair i: the share of
    pairs in the right order, by how much, and the means. A pair [B / 2] weighs as much as its two rows."""
    weights = weights.sum(1)[::2] + weights.sum(1)[1::2]
    chosen, rejected = rewards.detach()[::2], rewards.detach()[1::2]
    found = {"accuracy": chosen > rejected, "margin": chosen - rejected}
    found |= {"chosen_reward": chosen, "rejected_reward": rejected}
    return weights, {name: (value * weights).sum() for name, value in found.items()}


def dpo_loss(
    logps: Tensor,
    ref_logps: Tensor,
    mask: Tensor,
    weights: Tensor,
    beta: float,
    loss: str,
    label_smoothing: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The weighted sum over pairs, row 2i the chosen and 2i + 1 the rejected reply of pair i, and its metrics.

    With d the sum over a reply of logp - ref_logp and m = d_chosen - d_rejected, `sigmoid`: -log sigmoid(beta m)
    (arXiv:2305.18290); `label_smoothing` is the share of pairs taken to be the wrong way round, whose loss has -m
    (conservative DPO, Mitchell, 2023). `hinge`: max(0, 1 - beta m) (SLiC, arXiv:2305.10425). `ipo`:
    (m - 1 / (2 beta))^2 with d the mean over the reply's tokens (arXiv:2310.12036; the mean as its authors and TRL have
    it). Metrics: those of `_preferences` for the rewards beta * sum(logp - ref_logp), and kl, the k3 estimate of
    KL(reference || policy) on the tokens of both, as though the reference had written them.
    """
    totals = _where(mask, logps - ref_logps.detach()).sum(1)
    weights_of_pairs, metrics = _preferences(beta * totals, weights)
    metrics["kl"] = (kl_estimate(ref_logps, logps.detach(), "k3") * weights).sum()
    if loss == "ipo":
        totals = totals / mask.sum(1).clamp(min=1)
    m = totals[::2] - totals[1::2]
    if loss == "sigmoid":
        log_sigmoid = torch.nn.functional.logsigmoid
        losses = -(1 - label_smoothing) * log_sigmoid(beta * m) - label_smoothing * log_sigmoid(
            -beta * m
        )
    elif loss == "hinge":
        losses = (1 - beta * m).clamp(min=0)
    elif loss == "ipo":
        losses = (m - 1 / (2 * beta)).square()
    else:
        raise ValueError(f"DPO loss {loss!r}: choose sigmoid, ipo or hinge")
    return (losses * weights_of_pairs).sum(), metrics


def reward_loss(
    values: Tensor, weights: Tensor, margin: Tensor, center: float = 0.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """The weighted sum over pairs of -log sigmoid(r_chosen - r_rejected - margin) (Bradley-Terry; the margin is Llama 2's,
    arXiv:2307.09288) + center * (r_chosen + r_rejected)^2, which holds the mean near 0 (arXiv:2312.09244). Row 2i is the
    chosen and 2i + 1 the rejected reply of pair i, `margin` [B] the pair's. A row's reward is its value at the one column
    that has a weight. Metrics: those of `_preferences`."""
    rewards = _where(weights, values).sum(1)
    weights, metrics = _preferences(rewards, weights)
    chosen, rejected = rewards[::2], rewards[1::2]
    losses = -torch.nn.functional.logsigmoid(chosen - rejected - margin[::2])
    losses = losses + center * (chosen + rejected).square()
    return (losses * weights).sum(), metrics
