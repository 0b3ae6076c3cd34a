"""A small copy of a model's config: every kind of layer, narrow, with few experts, short windows
and a small vocabulary.

A key that this file does not know keeps its value: the copy is then slower, never another
architecture.
"""

import re
from copy import deepcopy

from accelerate import init_empty_weights
from torch import nn
from transformers import PreTrainedConfig

from rl2.model.classes import AutoClass

VOCABULARY = 96
FIRST_PLAIN_TOKEN = 32  # smaller ids are those of special tokens
WINDOW_TOKENS = 8
INNER_WIDTH = 64  # of an MLP
EXPERTS = 4
CHOSEN_EXPERTS = 2
MIN_LAYERS = 2

# The largest value that a key of this name keeps.
LIMITS = {
    r"^vocab_size": VOCABULARY,
    r"(window|chunk)(_size|_len|_length)?$|^local_attention$|^sliding_windows$": WINDOW_TOKENS,
    r"(intermediate_size|ffn_dim|ffn_hidden_size|n_inner)$": INNER_WIDTH,
    r"^zero_expert_num$": EXPERTS,
    r"^linear_num_heads$": 2,
    r"^(num_experts_per_tok(en)?|moe_k|moe_top_?k|top_k_experts)$": CHOSEN_EXPERTS,
}
NUM_EXPERTS = re.compile(r"^(num|n|moe_num)_(local_|routed_)?experts$")
# Multiples of the hidden size by chance.
NOT_A_WIDTH = re.compile(r"layer|position|context|head|expert|group|top|rank|token")
# Heads of recurrent layers: (heads or groups, those that share them), by the names of their keys.
RECURRENT_HEADS = (
    ("linear_num_key_heads", "linear_num_value_heads"),
    ("n_groups", "mamba_num_heads"),
)
# State spaces have this many heads, or heads of this size, so that their width is a multiple of
# the hidden size.
PARTS_OF_WIDTH = ("mamba_n_heads", "mamba_headdim")
DEPTH = re.compile(r"^(depth|num_layers|num_hidden_layers|encoder_layers)$")
TOWER_WIDTH = re.compile(r"^intermediate_size$|ffn_dim$")
LAYER_NUMBER = re.compile(r"layer_?(idx|index|id|number|num|i)$|^(idx|index)$")


def shrink(model_class: AutoClass, config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns a small copy of the config of a text model.

    It has the first layers, up to the last one that is of a new kind. `model_class` is the auto
    class that makes the model. ValueError for a config without attention heads.
    """
    small = deepcopy(config)
    text = small.get_text_config()
    _shrink_sizes(text)
    _shrink_towers(small, text)
    num_layers = _count_layers_of_all_kinds(model_class, small)
    for key, value in vars(text).items():
        if isinstance(value, list | tuple) and len(value) == text.num_hidden_layers:
            setattr(text, key, value[:num_layers])
    text.num_hidden_layers = num_layers
    return small


def _shrink_sizes(text: PreTrainedConfig) -> None:
    """Fewer heads of the same size, and all else narrower."""
    for key in ("hidden_size", "num_attention_heads"):
        if not getattr(text, key, None):
            raise ValueError(
                f"its config has no {key}; rl2 trains transformers with one stack of attention "
                "layers, no state space or recurrent models, and none of several stacks"
            )
    width = text.hidden_size
    heads = text.num_attention_heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    few_key_heads = min(key_heads, 2)
    few_heads = few_key_heads * min(heads // key_heads, 2)
    narrow = width // heads * few_heads
    # Of experts; each needs two.
    num_groups = getattr(text, "n_group", None) or getattr(text, "num_expert_group", None) or 1
    num_experts = max(EXPERTS, 2 * num_groups)
    for key, value in list(vars(text).items()):
        if key.endswith("token_id"):
            if isinstance(value, int) and value >= 0:  # the embedding of padding has to exist
                setattr(text, key, value % FIRST_PLAIN_TOKEN)
        elif type(value) is int and value > 0:
            setattr(text, key, _shrink_size(key, value, width, narrow, num_experts))
    _shrink_recurrent_heads(text, width, narrow)
    text.hidden_size = narrow
    text.num_attention_heads = few_heads
    if hasattr(text, "num_key_value_heads"):
        text.num_key_value_heads = few_key_heads


def _shrink_recurrent_heads(text: PreTrainedConfig, width: int, narrow: int) -> None:
    """Fewer heads of state spaces and gated delta rules."""
    for few, many in RECURRENT_HEADS:
        if hasattr(text, few) and hasattr(text, many):
            ratio = getattr(text, many) // getattr(text, few)
            setattr(text, few, min(getattr(text, few), 2))
            setattr(text, many, getattr(text, few) * min(ratio, 2))
    has_own_width = hasattr(text, "mamba_d_ssm")  # Falcon-H1
    for key in PARTS_OF_WIDTH:
        if hasattr(text, key) and not has_own_width:
            setattr(text, key, getattr(text, key) * narrow // width)


def _shrink_towers(config: PreTrainedConfig, text: PreTrainedConfig) -> None:
    """One layer with a narrow MLP in each part that is not the text model: it only has to exist."""
    for key in config.sub_configs:
        tower = getattr(config, key, None)
        if not isinstance(tower, PreTrainedConfig) or tower is text:
            continue
        for name, value in list(vars(tower).items()):
            if type(value) is int and DEPTH.search(name):
                setattr(tower, name, min(value, 1))
            elif type(value) is int and TOWER_WIDTH.search(name):
                setattr(tower, name, min(value, INNER_WIDTH))


def _shrink_size(key: str, value: int, width: int, narrow: int, num_experts: int) -> int:
    for pattern, limit in LIMITS.items():
        if re.search(pattern, key):
            return min(value, limit)
    if NUM_EXPERTS.search(key):
        return min(value, num_experts)
    if value % width == 0 and not NOT_A_WIDTH.search(key):
        return value // width * narrow
    return value


def _count_layers_of_all_kinds(model_class: AutoClass, config: PreTrainedConfig) -> int:
    """Returns how many layers from the first one on have every kind of layer of the model."""
    with init_empty_weights():
        hf = model_class.from_config(config)
    total = config.get_text_config().num_hidden_layers
    count = min(MIN_LAYERS, total)
    for module in hf.modules():
        if isinstance(module, nn.ModuleList) and len(module) == total:
            kinds = [_kind(layer) for layer in module]
            count = max([count, *(kinds.index(kind) + 1 for kind in kinds)])
    return count


def _kind(layer: nn.Module) -> str:
    """Returns the classes and plain attributes of a layer and its modules, without its number."""
    parts: list[object] = []
    for name, module in layer.named_modules():
        parts += [name, type(module).__name__]
        for key, value in vars(module).items():
            is_plain = isinstance(value, int | float | str | tuple | None)
            if is_plain and not LAYER_NUMBER.search(key):
                parts.append((key, value))
    return repr(parts)
