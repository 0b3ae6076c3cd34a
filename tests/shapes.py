"""Shapes of real models, and a small one. There are no weights."""

from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
UNTIED = {"tie_word_embeddings": False}
# name -> (family, the values of SIZES, what differs from the defaults of `make_config`)
SHAPES: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "qwen3-0.6b": ("qwen3", (1024, 3072, 28, 16, 8, 128), {}),
    "qwen3-1.7b": ("qwen3", (2048, 6144, 28, 16, 8, 128), {}),
    "qwen3-4b": ("qwen3", (2560, 9728, 36, 32, 8, 128), {}),
    "qwen3-8b": ("qwen3", (4096, 12288, 36, 32, 8, 128), UNTIED),
    "qwen3-14b": ("qwen3", (5120, 17408, 40, 40, 8, 128), UNTIED),
    "qwen3-32b": ("qwen3", (5120, 25600, 64, 64, 8, 128), UNTIED),
    "qwen2.5-1.5b": ("qwen2", (1536, 8960, 28, 12, 2, 128), {}),
    "qwen2.5-7b": ("qwen2", (3584, 18944, 28, 28, 4, 128), {"vocab_size": 152064, **UNTIED}),
    # Sizes that 8 processes divide, so that all layouts are possible.
    "small": ("qwen3", (256, 512, 2, 8, 8, 32), {"vocab_size": 1024}),
    # One of its two layers sees 48 tokens.
    "small-windows": (
        "qwen2",
        (256, 512, 2, 8, 8, 32),
        {
            "vocab_size": 1024,
            "use_sliding_window": True,
            "sliding_window": 48,
            "max_window_layers": 1,
            **UNTIED,
        },
    ),
}
ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def make_config(name: str, **changes: Any) -> PreTrainedConfig:
    """The config of the model `name`; `changes` are attributes that differ from its shape's."""
    family, sizes, others = SHAPES[name]
    settings = {"vocab_size": 151936, "max_position_embeddings": 40960, "tie_word_embeddings": True}
    settings |= dict(zip(SIZES, sizes, strict=True)) | others | changes
    config = CONFIG_MAPPING[family](
        **settings, bos_token_id=1, eos_token_id=2, pad_token_id=0, dtype="bfloat16"
    )
    config.architectures = [ARCHITECTURES[family]]
    return config
