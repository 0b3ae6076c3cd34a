"""The head: log-probabilities and entropies of chosen tokens, and KL divergences from a teacher,
without holding the logits of all tokens where they are large.

Shapes: P scored pairs, E hidden size, V vocabulary (or this process's part of it).
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from rl2.model.exact import exact_scores
from rl2.model.logits import HeadInputs, LogitSettings, cap_slope
from rl2.parallel.device import device_kind
from rl2.parallel.tensor import sum_softmax

# Logits that are held at a time: 32 and 512 MiB in fp32. Few enough for a CPU's caches, and enough
# columns for a GPU to make reading the hidden states worth it.
LOGITS_PER_CHUNK = {"cpu": 2**23, "cuda": 2**27}
# So many logits are held from the forward to the backward pass on a CPU, 512 MiB in fp32. Their
# product is the slowest one of an update.
MOST_KEPT_LOGITS = 2**27


def head_scores(
    head: HeadInputs,
    targets: Tensor,
    with_entropy: bool = False,
    *,
    group: dist.ProcessGroup | None = None,
    exact: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """targets [P] -> (log-probabilities, entropies), [P] in fp32.

    They are those of softmax(hidden @ weight.T / divisor), among the candidates if there are some:
    of each target, and of the whole. The products are in fp32: in bf16 those between 16 and 32
    would be multiples of 1/8. The bias [V] is added to them. With a cap a logit x becomes cap *
    tanh(x / cap), before the division.

    The entropies are None without `with_entropy`. With `group`, the weight is this process's part
    of the vocabulary; the parts are in order of rank. With `exact` the log-probabilities have the
    bits of the embedded engine's.
    """
    hidden, weight, bias = head.hidden, head.weight, head.bias
    return _Head.apply(hidden, weight, bias, targets, head.settings, with_entropy, exact, group)


class _Head(torch.autograd.Function):
    """A chunk of the vocabulary at a time; the backward pass computes the logits z again unless the
    forward pass has kept them.

    With p = softmax(z), d logp_t / dz = 1[t] - p and dH / dz = -p (log p + H), where H = lse - sum
    p z. Chunks are columns of the logits, so each row of the weight is read once, and its gradient
    written once. What is accumulated over chunks is smaller: the statistics of the softmax, and the
    gradient of the hidden states.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, settings, with_entropy, exact, group):
        ctx.settings = settings
        ctx.group = group
        if group:  # targets become columns of our part; they may lie outside it
            targets = targets - len(weight) * dist.get_rank(group)
        head = HeadInputs(hidden, weight, settings, bias)
        keeps_logits = (
            ctx.needs_input_grad[0]
            and device_kind(hidden.device) == "cpu"
            and len(hidden) * len(weight) <= MOST_KEPT_LOGITS
        )
        if exact:
            logps, lse, entropy, kept = exact_scores(
                head,
                targets,
                with_entropy=with_entropy,
                keeps_logits=keeps_logits,
                logits_per_slice=LOGITS_PER_CHUNK["cpu"],
            )
        else:
            logps, lse, entropy, kept = _scores_by_chunks(
                head, targets, with_entropy, keeps_logits, group
            )
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy, kept)
        return logps, entropy

    @staticmethod
    def backward(ctx, d_logps, d_entropy):
        hidden, weight, bias, targets, lse, entropy, kept = ctx.saved_tensors
        settings: LogitSettings = ctx.settings
        head = HeadInputs(hidden, weight, settings, bias)

        def gradient_of(columns: slice) -> Tensor:
            products = head.products(columns) if kept is None else kept[: len(hidden), columns]
            logits = settings.finish(products, columns)
            slope = None
            if settings.cap is not None:
                slope = cap_slope(logits, settings.divisor, settings.cap)
            log_p = logits.sub_(lse[:, None])
            if entropy is None:
                d_logits = log_p.exp_().mul_(-d_logps[:, None])
            else:  # -p (d_logps + d_entropy (log p + H))
                p = log_p.exp()
                scale = log_p.add_(entropy[:, None]).mul_(d_entropy[:, None]).add_(d_logps[:, None])
                d_logits = p.mul_(scale).neg_()
            index, is_here = _targets_within(targets, columns)
            d_logits.scatter_add_(1, index, (d_logps * is_here)[:, None])
            if slope is not None:
                d_logits = d_logits * slope
            if settings.divisor != 1.0:
                d_logits.div_(settings.divisor)
            # The gradients end in the type of the weights, so their products need no more.
            return d_logits.to(hidden.dtype)

        d_hidden, d_weight, d_bias = _gradients_by_chunks(ctx, head, gradient_of)
        return d_hidden, d_weight, d_bias, None, None, None, None, None


def _gradients_by_chunks(
    ctx, head: HeadInputs, gradient_of: Callable[[slice], Tensor]
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of hidden states, weight and bias, from those of the products [P, columns]."""
    hidden, weight = head.hidden, head.weight
    d_hidden = torch.zeros_like(hidden, dtype=torch.float32)
    d_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None  # None: frozen
    d_bias = None
    if head.bias is not None and ctx.needs_input_grad[2]:
        d_bias = torch.empty_like(head.bias)
    for columns in _chunks(head):
        d_logits = gradient_of(columns)
        d_hidden += d_logits @ weight[columns]
        if d_weight is not None:
            d_weight[columns] = d_logits.T @ hidden
        if d_bias is not None:
            d_bias[columns] = d_logits.sum(0, dtype=torch.float32)
    if ctx.group:
        dist.all_reduce(d_hidden, group=ctx.group)
    return d_hidden.to(hidden.dtype), d_weight, d_bias


def _scores_by_chunks(
    head: HeadInputs,
    targets: Tensor,
    with_entropy: bool,
    keeps_logits: bool,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """(log-probabilities, log-sum-exps, entropies or None) [P] and the products [P, V] or None.

    `targets` are columns of the weight, which may lie outside it.
    """
    kept = torch.empty(len(head.hidden), len(head.weight)) if keeps_logits else None
    sums = _SoftmaxSums(head.hidden)
    target_logit = sums.total
    for columns in _chunks(head):
        products = head.products(columns)
        if kept is not None:
            kept[:, columns] = products
        logits = head.settings.finish(products, columns)
        index, is_here = _targets_within(targets, columns)
        target_logit = target_logit + logits.gather(1, index).squeeze(1) * is_here
        sums.add(logits, logits if with_entropy else None)
    lse = sums.lse()
    mean = sums.weighted / sums.total  # sum p z, the mean logit; 0 without the entropy
    if group:
        lse, target_logit, mean = sum_softmax(lse, target_logit, mean, group)
    entropy = lse - mean if with_entropy else None
    return target_logit - lse, lse, entropy, kept


class _SoftmaxSums:
    """What is known of the softmax of logits z [P, V] after some of their columns."""

    def __init__(self, hidden: Tensor):
        zeros = torch.zeros(len(hidden), device=hidden.device)
        self.top = zeros - torch.inf  # [P] the largest z
        self.total = zeros  # [P] the sum of exp(z - top)
        self.weighted = zeros  # [P] that of value exp(z - top)

    def add(self, logits: Tensor, values: Tensor | None = None) -> None:
        """Adds logits [P, columns] and their values. Without values the logits are overwritten."""
        new_top = torch.maximum(self.top, logits.amax(1))
        scale = (self.top - new_top).exp()
        shifted = logits.sub_(new_top[:, None]) if values is None else logits - new_top[:, None]
        exp = shifted.exp_()
        self.top = new_top
        self.total = self.total * scale + exp.sum(1)
        if values is not None:
            self.weighted = self.weighted * scale + exp.mul_(values).sum(1)

    def lse(self) -> Tensor:
        """The log-sum-exp [P] of the logits so far."""
        return self.total.log() + self.top


def full_kl(
    policy: HeadInputs, teacher: HeadInputs, *, group: dist.ProcessGroup | None = None
) -> Tensor:
    """KL(policy || teacher) of each pair [P] in fp32, in nats.

    The tensors of the policy get a gradient, those of the teacher get none. `group` is as in
    `head_scores`, and so are the candidates: both heads have the same ones.

    Models with the same tokens may pad their vocabularies to different sizes. Then both
    distributions are among the ids that both have; not with `group`, where the parts would not
    have the same ids: PPO refuses that at the start.
    """
    assert group is None or len(policy.weight) == len(teacher.weight)
    num_shared = min(len(policy.weight), len(teacher.weight))
    policy, teacher = policy.first_tokens(num_shared), teacher.first_tokens(num_shared)
    return _FullKL.apply(policy.hidden, policy.weight, policy.bias, policy.settings, teacher, group)


class _FullKL(torch.autograd.Function):
    """A chunk of the vocabulary at a time. The backward pass computes the logits again.

    With p = softmax(z) of the policy and q = softmax(y) of the teacher, KL = sum p (log p - log q)
    = sum p (z - y) - lse(z) + lse(y), and dKL / dz = p (log p - log q - KL).
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, settings, teacher, group):
        ctx.settings = settings
        ctx.teacher_settings = teacher.settings
        ctx.group = group
        policy = HeadInputs(hidden, weight, settings, bias)
        sums = _SoftmaxSums(hidden)
        teacher_sums = _SoftmaxSums(hidden)
        for columns in _chunks(policy):
            z = policy.logits(columns)
            y = teacher.logits(columns)
            sums.add(z, z - y)
            teacher_sums.add(y)
        lse, teacher_lse = sums.lse(), teacher_sums.lse()
        difference = sums.weighted / sums.total
        if group:
            zeros = torch.zeros_like(lse)
            lse, _, difference = sum_softmax(lse, zeros, difference, group)
            teacher_lse, _, _ = sum_softmax(teacher_lse, zeros, zeros, group)
        kl = difference - lse + teacher_lse
        of_teacher = (teacher.hidden, teacher.weight, teacher.bias)  # freed after the backward pass
        ctx.save_for_backward(hidden, weight, bias, *of_teacher, lse, teacher_lse, kl)
        return kl

    @staticmethod
    def backward(ctx, d_kl):
        hidden, weight, bias, *of_teacher, lse, teacher_lse, kl = ctx.saved_tensors
        teacher_hidden, teacher_weight, teacher_bias = of_teacher
        teacher = HeadInputs(teacher_hidden, teacher_weight, ctx.teacher_settings, teacher_bias)
        settings: LogitSettings = ctx.settings
        policy = HeadInputs(hidden, weight, settings, bias)
        scale = d_kl / settings.divisor

        def gradient_of(columns: slice) -> Tensor:
            z = policy.logits(columns)
            y = teacher.logits(columns)
            log_p = z - lse[:, None]
            log_q = y - teacher_lse[:, None]
            d_logits = log_p.exp() * (log_p - log_q - kl[:, None]) * scale[:, None]
            if settings.cap is not None:
                d_logits = d_logits * cap_slope(z, settings.divisor, settings.cap)
            return d_logits.to(hidden.dtype)

        d_hidden, d_weight, d_bias = _gradients_by_chunks(ctx, policy, gradient_of)
        return d_hidden, d_weight, d_bias, None, None, None


def _targets_within(targets: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """[P, 1] the target's place within the columns, and [P] 1.0, or 0.0 where it is elsewhere."""
    is_here = (targets >= columns.start) & (targets < columns.stop)
    index = (targets - columns.start).clamp(0, columns.stop - columns.start - 1)
    return index[:, None], is_here.float()


def _chunks(head: HeadInputs) -> list[slice]:
    """Slices of the vocabulary, of few enough logits; their weight is no larger than these."""
    num_columns = len(head.weight)
    num_logits = LOGITS_PER_CHUNK[device_kind(head.hidden.device)]
    size = max(1, num_logits // max(1, *head.hidden.shape))
    return [slice(i, min(i + size, num_columns)) for i in range(0, num_columns, size)]
