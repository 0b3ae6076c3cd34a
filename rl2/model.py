"""The token model: a Hugging Face body, a head that scores chosen tokens only, and how both are sharded.

Shapes: L packed tokens, P scored pairs, E hidden size, V vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from .parallel import fsdp, tensor
from .parallel.ring import PackedAttention, Ring
from .parallel.tensor import sum_softmax

# Logits held at a time, 32 and 512 MiB in fp32: few enough for a CPU's caches, enough rows for a GPU to read the weight for.
HEAD_CHUNK = {"cpu": 2**23, "cuda": 2**27}
# What changes the logits after the head, or what a token sees, and is not computed here.
UNSUPPORTED = {
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
}


@dataclass
class Scores:
    """What a model says of the scored tokens: pairs [P], or columns [B, T] once unpacked. A loss sees whole sequences."""

    logps: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None

    def map(self, function) -> "Scores":
        """`function` of each that is there."""
        return Scores(**{name: None if x is None else function(x) for name, x in vars(self).items()})


class TokenModel(nn.Module):
    """`hf` with its head replaced by scores of (hidden state, target) pairs, so that [L, V] logits never exist."""

    def __init__(self, hf: nn.Module, ring: Ring, tp: dist.ProcessGroup | None = None):
        super().__init__()
        self.hf, self.ring, self.tp = hf, ring, tp
        # n tokens cost 2 n FLOPs a weight, and 2 n^2 a layer and channel of the queries in causal attention.
        size = getattr(hf.config, "head_dim", None) or hf.config.hidden_size // hf.config.num_attention_heads
        channels = hf.config.num_hidden_layers * hf.config.num_attention_heads * size
        self.quadratic = channels / sum(parameter.numel() for parameter in hf.parameters())
        self.is_critic = hf.get_output_embeddings() is None
        self.stored_dtype = torch.float32  # what an export is written in

    def forward(self, pack, temperature: float = 1.0, entropy: bool = False) -> Scores:
        attend = PackedAttention(pack.chunks, pack.prefixes, pack.tokens.device, self.ring)
        body = self.hf.base_model(pack.tokens, position_ids=pack.positions, use_cache=False, attend=attend)
        hidden = body.last_hidden_state[0, pack.hidden]  # [P, E]
        if self.is_critic:
            return Scores(values=self.hf.score(hidden).squeeze(-1).float())
        weight = self.hf.get_output_embeddings().weight
        if self.tp is not None:
            weight = weight.to_local()
        logps, entropies = _Head.apply(hidden, weight, pack.targets, temperature, entropy, self.tp)
        return Scores(logps=logps, entropy=entropies if entropy else None)


class _Head(torch.autograd.Function):
    """log softmax(hidden @ weight.T / temperature) at the targets, and its entropy, a chunk of logits at a time.

    With `group`, weight holds this process's part of the vocabulary, in order of rank. Backward recomputes the logits z.
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
        d_hidden, d_weight = torch.zeros_like(hidden, dtype=torch.float32), torch.empty_like(weight)
        for columns in _chunks(len(weight), len(hidden), hidden.device):
            logits = _logits(hidden, weight[columns], ctx.temperature).sub_(lse[:, None])  # log p
            probs = logits.exp() if ctx.with_entropy else logits.exp_()
            if ctx.with_entropy:
                scale = logits.add_(entropy[:, None]).mul_(d_entropy[:, None]).add_(d_logps[:, None])
                d_logits = probs.mul_(scale).neg_()
            else:
                d_logits = probs.mul_(-d_logps[:, None])
            (here,) = ((targets >= columns.start) & (targets < columns.stop)).nonzero(as_tuple=True)
            d_logits[here, targets[here] - columns.start] += d_logps[here]
            d_logits = d_logits.div_(ctx.temperature).to(hidden.dtype)
            d_hidden += d_logits @ weight[columns]
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


def load_model(name: str, critic: bool, dtype: torch.dtype, checkpointing: bool, mesh, masters: bool) -> TokenModel:
    """A Hugging Face causal LM (or a critic: its body with a scalar head) sharded over `mesh` with FSDP2.

    The first process reads the weights and scatters them, so a node holds one full copy, not one a process. `masters`:
    parameters are kept in fp32 and cast to `dtype` for compute; else they are kept in `dtype`.
    """
    cls = AutoModelForSequenceClassification if critic else AutoModelForCausalLM
    config = AutoConfig.from_pretrained(name, **({"num_labels": 1} if critic else {}))
    stored = config.dtype or dtype
    _check(name, config)
    if mesh.tp is not None:
        tensor.check(name, config, mesh.tp.size())
    held = torch.float32 if masters else dtype
    full = None
    if dist.get_rank() == 0:
        source, loaded = cls.from_pretrained(name, config=config, dtype=held, output_loading_info=True)
        full = source.state_dict()
        if "score.weight" in loaded["missing_keys"]:
            full["score.weight"].zero_()  # a critic made from a language model starts from V = 0, not from noise
    with init_empty_weights(include_buffers=False):
        hf = cls.from_config(config, attn_implementation="rl2", dtype=held)
    hf.tie_weights()  # which meta parameters do not survive
    if mesh.tp is not None:
        tensor.parallelize(hf, mesh.tp)
    model = TokenModel(hf, Ring(mesh.sp), mesh.tp and mesh.tp.get_group()).train(masters)
    model.stored_dtype = stored
    fsdp.shard(model, mesh, dtype if masters else None, checkpointing)
    fsdp.scatter(model, full, mesh)
    return model


def _check(name, config):
    for key, neutral in UNSUPPORTED.items():
        if getattr(config, key, neutral) not in (neutral, None):
            raise ValueError(
                f"{name} sets {key}={getattr(config, key)}, which rl2 does not compute: choose another model"
            )
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or getattr(config, "use_sliding_window", False):
        raise ValueError(
            f"{name} has attention layers of the kinds {sorted(kinds)}; rl2 computes full causal attention only"
        )
