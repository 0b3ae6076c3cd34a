"""Models with towers: a text model that is trained, beside parts that see images or hear audio.

Prompts are text, so a tower takes no part in training. It is loaded and frozen, and goes unchanged
to the engine and into the exported folder, which the original class loads.
"""

import shutil
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING
from transformers.utils import cached_file

# What a processor of images or audio is read from.
PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


def language_model_class(config: PreTrainedConfig) -> Any:
    """The auto class that loads a language model: with its towers if its files have some.

    transformers also has classes that leave the towers out (Qwen3.5); exports would lack them.
    """
    kind = type(config)
    if kind in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        model_class: Any = MODEL_FOR_MULTIMODAL_LM_MAPPING[kind]
        whole = model_class.__name__
        if kind not in MODEL_FOR_CAUSAL_LM_MAPPING or whole in (config.architectures or []):
            return AutoModelForMultimodalLM
    return AutoModelForCausalLM


def empty_language_model(config: PreTrainedConfig) -> Any:
    """The language model of a config without memory: names and shapes of its weights alone."""
    with torch.device("meta"):
        return language_model_class(config).from_config(config)


def is_language_model(config: PreTrainedConfig) -> bool:
    """Whether `language_model_class` can load it."""
    kind = type(config)
    return kind in MODEL_FOR_CAUSAL_LM_MAPPING or kind in MODEL_FOR_MULTIMODAL_LM_MAPPING


def find_towers(hf: Any) -> list[tuple[str, nn.Module]]:
    """The largest modules of `hf` that are neither its text model nor its head, by name."""
    return list(_outside(hf, "", _text_parts(hf)))


def _text_parts(hf: Any) -> set[nn.Module]:
    """The text model of `hf` and its head, or all of a model without towers."""
    if hf.config.get_text_config() is hf.config:
        return {hf, *hf.children()}
    parts = (hf.get_decoder(), hf.get_output_embeddings(), getattr(hf, "score", None))
    return {part for part in parts if part is not None}


def _outside(module: nn.Module, prefix: str, text: set[Any]) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if child in text:
            continue
        if any(part in text for part in child.modules()):
            yield from _outside(child, f"{prefix}{name}.", text)
        elif any(True for _ in child.parameters()):
            yield f"{prefix}{name}", child


def freeze_towers(hf: Any, dtype: torch.dtype | None = None) -> None:
    """Freezes all of `hf` but its text part, and puts the towers into `dtype` if it is given."""
    text = {id(weight) for part in _text_parts(hf) for weight in part.parameters()}
    for weight in hf.parameters():
        if id(weight) not in text:  # also a weight beside the towers (LLaVA-NeXT)
            weight.requires_grad_(False)
    if dtype is not None:
        for _, tower in find_towers(hf):
            tower.to(dtype)


def copy_processor(hf: Any, folder: str) -> None:
    """Copies the files of the model's processor of images or audio to `folder`."""
    for file in PROCESSOR_FILES:
        path = cached_file(
            hf.config.name_or_path,
            file,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
        if path is not None:
            shutil.copy(path, folder)
