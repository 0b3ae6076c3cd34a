"""Shapes of real models, and a small one. There are no weights."""

from typing import Any

from common import CONFIGS
from transformers import PreTrainedConfig

SHAPES = {
    "qwen3-0.6b": {
        "family": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "qwen3-1.7b": {
        "family": "qwen3",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "qwen3-4b": {
        "family": "qwen3",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "qwen3-8b": {
        "family": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "qwen3-14b": {
        "family": "qwen3",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "qwen3-32b": {
        "family": "qwen3",
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
    "qwen2.5-1.5b": {
        "family": "qwen2",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "head_dim": 128,
    },
    "qwen2.5-7b": {
        "family": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    "qwen2.5-32b": {
        "family": "qwen2",
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
    # Sizes that 8 processes divide, so that all layouts are possible.
    "small": {
        "family": "qwen3",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 32,
        "vocab_size": 1024,
    },
    # One of its two layers sees 48 tokens.
    "small-windows": {
        "family": "qwen2",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 32,
        "vocab_size": 1024,
        "use_sliding_window": True,
        "sliding_window": 48,
        "max_window_layers": 1,
        "tie_word_embeddings": False,
    },
}
ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def make_config(name: str, **changes: Any) -> PreTrainedConfig:
    """The config of the model `name`; `changes` are attributes that differ from its shape's."""
    shape = {**SHAPES[name], **changes}
    family = shape.pop("family")
    settings = {"vocab_size": 151936, "max_position_embeddings": 40960, "tie_word_embeddings": True}
    config = CONFIGS[family](
        **settings | shape, bos_token_id=1, eos_token_id=2, pad_token_id=0, dtype="bfloat16"
    )
    config.architectures = [ARCHITECTURES[family]]
    return config
