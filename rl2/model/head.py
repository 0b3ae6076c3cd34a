"""The head: log-probabilities and entropies of chosen tokens, without ever holding the logits of all.

Shapes: P scored pairs, E hidden size, V vocabulary.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from rl2.parallel.tensor import sum_softmax

# Logits held at a time, 32 and 512 MiB in fp32: few enough for a CPU's caches, enough rows for a GPU to read the weight for.
HEAD_CHUNK = {"cpu": 2**23, "cuda": 2**27}


def head_scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    entropy: bool = False,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """hidden [P, E], weight [V, E], targets [P] -> log softmax(hidden @ weight.T / temperature) at the targets [P] and, if
    `entropy`, its entropy [P]; fp32. With `group`, weight holds this process's part of the vocabulary, in order of rank."""
    return _Head.apply(hidden, weight, targets, temperature, entropy, group)


class _Head(torch.autograd.Function):
    """A chunk of logits at a time; backward recomputes them, z.

    With p = softmax(z), d logp_t / dz = 1[t] - p and dH / dz = -p (log p + H), where H = lse - sum p z. Forward goes by
    rows, which the softmax is over; backward by columns, so that the gradient of the weight is written once and what is
    added up is that of the hidden states, which is smaller.
    """

    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, with_entropy, group):
        num, vocabulary = len(hidden), len(weight)
        chosen, mean, lse = (torch.zeros(num, device=hidden.device) for _ in range(3))
        targets = targets - (vocabulary * dist.get_rank(group) if group else 0)
        ours = ((targets >= 0) & (targets < vocabulary)).float()
        for rows in _chunks(num, vocabulary, hidden.device):
            logits = _logits(hidden[rows], weight, temperature)
            index = targets[rows, None].clamp(0, vocabulary - 1)
            chosen[rows] = logits.gather(1, index).squeeze(1) * ours[rows]
            top = logits.max(1, keepdim=True).values
            exp = logits.sub_(top).exp_() if not with_entropy else (logits - top).exp_()
            total = exp.sum(1)
            lse[rows] = total.log() + top.squeeze(1)
            if with_entropy:
                mean[rows] = exp.mul_(logits).sum(1) / total
        if group:
            lse, chosen, mean = sum_softmax(lse, chosen, mean, group)
        entropy = lse - mean
        ctx.save_for_backward(hidden, weight, targets, lse, entropy)
        ctx.temperature, ctx.with_entropy, ctx.group = temperature, with_entropy, group
        return chosen - lse, entropy

    @staticmethod
    def backward(ctx, d_logps, d_entropy):
        hidden, weight, targets, lse, entropy = ctx.saved_tensors
        d_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        d_weight = (
            torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        )  # a frozen head needs none
        for columns in _chunks(len(weight), len(hidden), hidden.device):
            logits = _logits(hidden, weight[columns], ctx.temperature).sub_(lse[:, None])  # log p
            probs = logits.exp() if ctx.with_entropy else logits.exp_()
            if ctx.with_entropy:
                scale = (
                    logits.add_(entropy[:, None]).mul_(d_entropy[:, None]).add_(d_logps[:, None])
                )
                d_logits = probs.mul_(scale).neg_()
            else:
                d_logits = probs.mul_(-d_logps[:, None])
            (here,) = ((targets >= columns.start) & (targets < columns.stop)).nonzero(as_tuple=True)
            d_logits[here, targets[here] - columns.start] += d_logps[here]
            d_logits = d_logits.div_(ctx.temperature).to(hidden.dtype)
            d_hidden += d_logits @ weight[columns]
            if d_weight is not None:
                d_weight[columns] = d_logits.T @ hidden
        if ctx.group:
            dist.all_reduce(d_hidden, group=ctx.group)
        return d_hidden.to(hidden.dtype), d_weight, None, None, None, None


def _logits(hidden, weight, temperature):
    logits = (hidden @ weight.T).float()
    return logits if temperature == 1.0 else logits.div_(temperature)


def _chunks(num, width, device):
    size = max(1, HEAD_CHUNK[device.type] // max(1, width))
    return [slice(start, min(start + size, num)) for start in range(0, num, size)]
