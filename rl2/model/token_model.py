"""The token model: a Hugging Face body, a head that scores chosen tokens only, and how both are sharded.

Shapes: L packed tokens, P scored pairs, E hidden size, V vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from rl2.model import lora
from rl2.model.head import head_scores
from rl2.parallel import fsdp, tensor
from rl2.parallel.ring import PackedAttention, Ring

# What changes the logits after the head, or what a token sees, and is not computed here.
UNSUPPORTED = {
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
}


@dataclass
class TokenScores:
    """What a model says of the scored tokens: pairs [P], or columns [B, T] once unpacked. A loss sees whole sequences."""

    logps: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None

    def map(self, function) -> "TokenScores":
        """`function` of each that is there."""
        return TokenScores(
            **{name: None if x is None else function(x) for name, x in vars(self).items()}
        )


class TokenModel(nn.Module):
    """`hf` with its head replaced by scores of (hidden state, target) pairs, so that [L, V] logits never exist."""

    def __init__(self, hf: nn.Module, ring: Ring, tp: dist.ProcessGroup | None = None):
        super().__init__()
        self.hf, self.ring, self.tp = hf, ring, tp
        # n tokens cost 2 n FLOPs a weight, and 2 n^2 a layer and channel of the queries in causal attention.
        size = (
            getattr(hf.config, "head_dim", None)
            or hf.config.hidden_size // hf.config.num_attention_heads
        )
        channels = hf.config.num_hidden_layers * hf.config.num_attention_heads * size
        self.attention_cost = channels / sum(parameter.numel() for parameter in hf.parameters())
        self.is_critic = hf.get_output_embeddings() is None
        self.stored_dtype = torch.float32  # what an export is written in

    def forward(self, pack, temperature: float = 1.0, entropy: bool = False) -> TokenScores:
        attend = PackedAttention(pack.chunks, pack.prefixes, pack.tokens.device, self.ring)
        body = self.hf.base_model(
            pack.tokens, position_ids=pack.positions, use_cache=False, attend=attend
        )
        hidden = body.last_hidden_state[0, pack.hidden_index]  # [P, E]
        if self.is_critic:
            return TokenScores(
                values=hidden.float() @ self.hf.score.weight[0].float()
            )  # bf16 tells few rewards apart
        weight = self.hf.get_output_embeddings().weight
        if self.tp is not None:
            weight = weight.to_local()
        logps, entropies = head_scores(hidden, weight, pack.targets, temperature, entropy, self.tp)
        return TokenScores(logps=logps, entropy=entropies if entropy else None)


def load_model(
    name: str,
    critic: bool,
    dtype: torch.dtype,
    checkpointing: bool,
    mesh,
    masters: bool,
    adapters: tuple | None = None,
) -> TokenModel:
    """A Hugging Face causal LM (or a critic: its body with a scalar head) sharded over `mesh` with FSDP2.

    The first process reads the weights and scatters them, so a node holds one full copy, not one a process. `masters`:
    parameters are kept in fp32 and cast to `dtype` for compute; else they are kept in `dtype`. With `adapters` (rank,
    alpha, targets) these and a critic's head are what is trained, and all that has masters.
    """
    cls = AutoModelForSequenceClassification if critic else AutoModelForCausalLM
    config = AutoConfig.from_pretrained(name, **({"num_labels": 1} if critic else {}))
    stored = config.dtype or dtype
    _check(name, config)
    if mesh.tp is not None:
        tensor.check(name, config, mesh.tp.size())
    held = torch.float32 if masters and not adapters else dtype
    with init_empty_weights(include_buffers=False):
        hf = cls.from_config(config, attn_implementation="rl2", dtype=held)
        lora.inject(hf, adapters)
    hf.tie_weights()  # which meta parameters do not survive
    full = None
    if dist.get_rank() == 0:
        source, loaded = cls.from_pretrained(
            name, config=config, dtype=held, output_loading_info=True
        )
        lora.inject(source, adapters)
        full = source.state_dict()
        if "score.weight" in loaded["missing_keys"]:
            full[
                "score.weight"
            ].zero_()  # a critic made from a language model starts from V = 0, not from noise
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
