"""The token model: a Hugging Face body, a head that scores chosen tokens only, and how both are
loaded and sharded.

Shapes: L packed tokens, P scored pairs, E hidden size, V vocabulary, B sequences, T columns.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from rl2.batch import Pack
from rl2.model import lora
from rl2.model.head import head_scores
from rl2.model.lora import LoraSettings
from rl2.parallel import fsdp, tensor
from rl2.parallel.mesh import Mesh
from rl2.parallel.ring import PackedAttention, Ring

# Keys of a model's config that change the logits or the attention in ways rl2 does not compute,
# with their neutral value.
NEUTRAL_VALUES = {
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
}


@dataclass
class TokenScores:
    """What a model says about the scored tokens: pairs [P], or columns [B, T] once unpacked."""

    logps: Tensor | None = None  # log-probability of each token
    entropy: Tensor | None = None  # entropy of the distribution that the token is drawn from
    values: Tensor | None = None  # a critic's value of the state before the token

    def map(self, function: Callable[[Tensor], Tensor]) -> "TokenScores":
        """`function` applied to each of the tensors that are there."""
        scores = {name: column for name, column in vars(self).items() if column is not None}
        return TokenScores(**{name: function(column) for name, column in scores.items()})


class TokenModel(nn.Module):
    """`hf` with its head replaced by scores of (hidden state, target) pairs.

    Logits [L, V] never exist; `head_dtype` is what those of a chunk are rounded to. `export_dtype`
    is what an export is written in.
    """

    def __init__(
        self,
        hf: PreTrainedModel,
        ring: Ring,
        tp: dist.ProcessGroup | None = None,
        export_dtype: torch.dtype = torch.float32,
        head_dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        self.hf: Any = hf
        self.ring = ring
        self.tp = tp
        self.export_dtype = export_dtype
        self.head_dtype = head_dtype
        self.attention_cost = attention_cost(hf)
        self.is_critic = hf.get_output_embeddings() is None

    def forward(
        self, pack: Pack, temperature: float = 1.0, with_entropy: bool = False
    ) -> TokenScores:
        """The scores of the pairs [P]: a critic's values, else log-probabilities and entropies."""
        assert pack.chunks is not None, "zigzag has not cut the pack"
        attend = PackedAttention(pack.chunks, pack.prefixes, pack.tokens.device, self.ring)
        body = self.hf.base_model(
            pack.tokens, position_ids=pack.positions, use_cache=False, attend=attend
        )
        hidden = body.last_hidden_state[0, pack.hidden_index]  # [P, E]
        if self.is_critic:
            # In fp32: bf16 has too few numbers to tell similar rewards apart.
            return TokenScores(values=hidden.float() @ self.hf.score.weight[0].float())
        weight = self.hf.get_output_embeddings().weight  # [V, E], or this process's part of V
        if self.tp is not None:
            weight = weight.to_local()
        logps, entropy = head_scores(
            hidden, weight, pack.targets, temperature, with_entropy, self.tp, self.head_dtype
        )
        return TokenScores(logps=logps, entropy=entropy if with_entropy else None)


def attention_cost(hf: PreTrainedModel) -> float:
    """The c in n + c n^2, which a sequence of n tokens costs in units of a token's matrix products.

    The forward pass of n tokens takes 2 n FLOPs a weight, and causal attention 2 n^2 FLOPs a layer
    and query channel, so c is layers x query channels / weights.
    """
    config = hf.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    channels = config.num_hidden_layers * config.num_attention_heads * head_dim
    return channels / sum(parameter.numel() for parameter in hf.parameters())


def load_model(
    name: str,
    mesh: Mesh,
    *,
    compute_dtype: torch.dtype,
    head_dtype: torch.dtype = torch.float32,
    critic: bool = False,
    trainable: bool = False,
    gradient_checkpointing: bool = False,
    lora_settings: LoraSettings | None = None,
) -> TokenModel:
    """A Hugging Face causal LM, or a critic (its body with a scalar head), sharded over `mesh`.

    A trainable model keeps its parameters in fp32 and casts them to `compute_dtype` for compute; a
    frozen one keeps them in `compute_dtype`. The logits are in `head_dtype`, see `head_scores`.
    With `lora_settings` only the adapters and a critic's head are trained and in fp32. All
    processes must call. ValueError for a model that rl2 computes wrongly or cannot cut.
    """
    model_class = AutoModelForSequenceClassification if critic else AutoModelForCausalLM
    labels = {"num_labels": 1} if critic else {}
    config = AutoConfig.from_pretrained(name, **labels)
    export_dtype = config.dtype or compute_dtype  # read here: loading the weights overwrites it
    check_supported(name, config)
    if mesh.tp is not None:
        tensor.check_tp_size(name, config, mesh.tp.size())
    all_in_fp32 = trainable and lora_settings is None
    parameter_dtype = torch.float32 if all_in_fp32 else compute_dtype
    with init_empty_weights(include_buffers=False):
        hf = model_class.from_config(config, attn_implementation="rl2", dtype=parameter_dtype)
        lora.inject(hf, lora_settings)
    hf.tie_weights()  # meta parameters lose their ties
    # Rank 0 reads the weights and scatters them: a node holds one full copy, not one a process.
    full = None
    if dist.get_rank() == 0:
        full = read_weights(model_class, name, config, parameter_dtype, lora_settings)
    if mesh.tp is not None:
        tensor.parallelize(hf, mesh.tp)
    tp_group = mesh.tp.get_group() if mesh.tp is not None else None
    model = TokenModel(hf, Ring(mesh.sp), tp_group, export_dtype, head_dtype).train(trainable)
    fsdp.shard(model, mesh, compute_dtype if trainable else None, gradient_checkpointing)
    fsdp.scatter(model, full, mesh)
    return model


def read_weights(
    model_class: Any,
    name: str,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    lora_settings: LoraSettings | None,
) -> dict[str, Tensor]:
    """The whole weights of the model `name` by their names in it, with new adapters."""
    hf, report = model_class.from_pretrained(
        name, config=config, dtype=dtype, output_loading_info=True
    )
    lora.inject(hf, lora_settings)
    weights = hf.state_dict()
    if "score.weight" in report["missing_keys"]:
        # A critic made from a language model starts from V = 0, not from noise.
        weights["score.weight"].zero_()
    return weights


def check_supported(name: str, config: PreTrainedConfig) -> None:
    """ValueError if the config of the model `name` asks for something that rl2 does not compute."""
    for key, neutral in NEUTRAL_VALUES.items():
        value = getattr(config, key, neutral)
        if value not in (neutral, None):
            raise ValueError(
                f"{name} sets {key}={value}, which rl2 does not compute: choose another model"
            )
    kinds = set(getattr(config, "layer_types", None) or [])
    if not kinds <= {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"{name} has attention layers of the kinds {sorted(kinds)}; rl2 computes full and "
            "sliding attention only: choose another model"
        )
