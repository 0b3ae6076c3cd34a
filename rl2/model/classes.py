"""Which class of transformers loads a language model, and which parts of it are which."""

import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

# Makes a model from a config or from files.
AutoClass = type[
    AutoModelForCausalLM | AutoModelForMultimodalLM | AutoModelForSequenceClassification
]
# Routers of experts. Classes of transformers: Qwen3MoeTopKRouter, JetMoeTopKGating and others.
CLASS_NAMES = ("router", "topkgating")
MODULE_NAMES = ("router", "gate")  # where the class has another name (Hunyuan)
# What a recurrent layer calls on transformers' cache, and attention does not.
STATE_UPDATES = {"update_conv_state", "update_recurrent_state"}


def language_model_class(config: PreTrainedConfig) -> AutoClass:
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


def empty_language_model(config: PreTrainedConfig) -> PreTrainedModel:
    """The language model of a config without memory: names and shapes of its weights alone."""
    with torch.device("meta"):
        return language_model_class(config).from_config(config)


def is_language_model(config: PreTrainedConfig) -> bool:
    """Whether `language_model_class` can load it."""
    kind = type(config)
    return kind in MODEL_FOR_CAUSAL_LM_MAPPING or kind in MODEL_FOR_MULTIMODAL_LM_MAPPING


def idle_parts(hf: PreTrainedModel) -> list[nn.Module]:
    """The largest modules of `hf` that are neither its text model nor its head.

    They see images or hear audio, so the text of a prompt never runs them.
    """
    return list(_outside(hf, text_parts(hf)))


def text_parts(hf: PreTrainedModel) -> set[nn.Module]:
    """The text model of `hf` and its head, or all of a model without towers."""
    if hf.config.get_text_config() is hf.config:
        return {hf, *hf.children()}
    parts = (hf.get_decoder(), hf.get_output_embeddings(), getattr(hf, "score", None))
    return {part for part in parts if part is not None}


def _outside(module: nn.Module, text: set[nn.Module]) -> Iterator[nn.Module]:
    for child in module.children():
        if child in text:
            continue
        if any(part in text for part in child.modules()):
            yield from _outside(child, text)
        elif any(True for _ in child.parameters()):
            yield child


def find_routers(hf: nn.Module) -> set[nn.Module]:
    """The modules of all routers, and the modules within them."""
    routers: set[nn.Module] = set()
    for name, module in hf.named_modules():
        class_name = type(module).__name__.lower()
        is_named = name.rpartition(".")[2] in MODULE_NAMES
        if is_named or any(part in class_name for part in CLASS_NAMES):
            routers.update(module.modules())
    return routers


def is_recurrent(module: nn.Module) -> bool:
    """Whether the code of `module` itself, not of its children, updates a state."""
    kind: type = type(module)
    return _updates_state(kind)


@cache  # a model has few classes of modules, and many modules of each
def _updates_state(module_class: type) -> bool:
    for kind in module_class.__mro__:
        if kind is nn.Module:
            return False
        for function in vars(kind).values():
            code = getattr(inspect.unwrap(function), "__code__", None)
            if code is not None and STATE_UPDATES.intersection(code.co_names):
                return True
    return False


def is_adapter(name: str) -> bool:
    """Whether the parameter of this name is a matrix of an adapter."""
    return ".lora_" in name
