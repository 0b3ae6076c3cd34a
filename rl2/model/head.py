"""The head: log-probabilities and entropies of chosen tokens, without ever holding the logits of
all tokens.

Shapes: P scored pairs, E hidden size, V vocabulary (or this process's part of it).
"""

import torch
import torch.distributed as dist
from torch import Tensor

from rl2.parallel.tensor import sum_softmax

# Logits that are held at a time: 32 and 512 MiB in fp32. Few enough for a CPU's caches, and enough
# rows for a GPU to make reading the weight worth it.
LOGITS_PER_CHUNK = {"cpu": 2**23, "cuda": 2**27}


def head_scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    with_entropy: bool = False,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """hidden [P, E], weight [V, E], targets [P] -> (log-probabilities, entropies), [P] in fp32.

    They are those of softmax(hidden @ weight.T / temperature): of each target, and of the whole.

    The entropy means nothing without `with_entropy`. With `group`, weight is this process's part of
    the vocabulary; the parts are in order of rank.
    """
    return _Head.apply(hidden, weight, targets, temperature, with_entropy, group)


class _Head(torch.autograd.Function):
    """A chunk of logits z at a time; the backward pass computes them again.

    With p = softmax(z), d logp_t / dz = 1[t] - p and dH / dz = -p (log p + H), where H = lse - sum
    p z. The forward pass goes by rows, which the softmax is over. The backward pass goes by
    columns: each row of the weight's gradient is written once, and only the gradient of the hidden
    states, which is smaller, is accumulated.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, with_entropy, group):
        num = len(hidden)
        vocabulary = len(weight)
        target_logit = torch.zeros(num, device=hidden.device)
        mean = torch.zeros(num, device=hidden.device)  # sum p z, the mean logit
        lse = torch.zeros(num, device=hidden.device)
        if group:  # targets become columns of our part; they may lie outside it
            targets = targets - vocabulary * dist.get_rank(group)
        is_ours = ((targets >= 0) & (targets < vocabulary)).float()
        for rows in _chunks(num, vocabulary, hidden.device):
            logits = _logits(hidden[rows], weight, temperature)  # [rows, V]
            index = targets[rows, None].clamp(0, vocabulary - 1)
            target_logit[rows] = logits.gather(1, index).squeeze(1) * is_ours[rows]
            top = logits.max(1, keepdim=True).values
            # Only the entropy needs the logits again; without it their memory is reused.
            exp = (logits - top).exp_() if with_entropy else logits.sub_(top).exp_()
            total = exp.sum(1)
            lse[rows] = total.log() + top.squeeze(1)
            if with_entropy:
                mean[rows] = exp.mul_(logits).sum(1) / total
        if group:
            lse, target_logit, mean = sum_softmax(lse, target_logit, mean, group)
        entropy = lse - mean
        ctx.save_for_backward(hidden, weight, targets, lse, entropy)
        ctx.temperature = temperature
        ctx.with_entropy = with_entropy
        ctx.group = group
        return target_logit - lse, entropy

    @staticmethod
    def backward(ctx, d_logps, d_entropy):
        hidden, weight, targets, lse, entropy = ctx.saved_tensors
        d_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        d_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None  # None: frozen
        for columns in _chunks(len(weight), len(hidden), hidden.device):
            log_p = _logits(hidden, weight[columns], ctx.temperature).sub_(lse[:, None])
            d_logits = _gradient_of_all_logits(
                log_p, d_logps[:, None], d_entropy[:, None], entropy[:, None], ctx.with_entropy
            )
            is_here = (targets >= columns.start) & (targets < columns.stop)
            pairs = is_here.nonzero().squeeze(1)  # the pairs whose target is in these columns
            d_logits[pairs, targets[pairs] - columns.start] += d_logps[pairs]
            d_logits = d_logits.div_(ctx.temperature).to(hidden.dtype)
            d_hidden += d_logits @ weight[columns]
            if d_weight is not None:
                d_weight[columns] = d_logits.T @ hidden
        if ctx.group:
            dist.all_reduce(d_hidden, group=ctx.group)
        return d_hidden.to(hidden.dtype), d_weight, None, None, None, None


def _gradient_of_all_logits(log_p, d_logps, d_entropy, entropy, with_entropy) -> Tensor:
    """-p (d_logps + d_entropy (log p + H)): log_p is [P, columns], the others are [P, 1].

    log_p is overwritten.
    """
    if not with_entropy:
        return log_p.exp_().mul_(-d_logps)
    p = log_p.exp()
    scale = log_p.add_(entropy).mul_(d_entropy).add_(d_logps)
    return p.mul_(scale).neg_()


def _logits(hidden, weight, temperature) -> Tensor:
    """[P, E] and [V, E] -> [P, V] in fp32."""
    logits = (hidden @ weight.T).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _chunks(num, width, device) -> list[slice]:
    """Slices of `num` rows of `width` logits each."""
    size = max(1, LOGITS_PER_CHUNK[device.type] // max(1, width))
    return [slice(start, min(start + size, num)) for start in range(0, num, size)]
