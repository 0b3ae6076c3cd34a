"""Reads the weights of a model from files in the format of Hugging Face.

transformers loads what it can and logs the rest. Here its report decides whether the weights are
those of the model that config.json describes.
"""

import json
import logging
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from logging.handlers import BufferingHandler
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import cached_file
from transformers.utils import logging as transformers_logging

from rl2.model.classes import AutoClass, empty_language_model, language_model_class

INDEX = "model.safetensors.index.json"
# Ways of quantization that transformers can undo while it loads, without another package.
DEQUANTIZED = ("fp8", "mxfp4")
# Constants (positions, causal masks) that older files hold beside the weights.
CONSTANT = re.compile(
    r"(inv_freq|cos_cached|sin_cached|position_ids|masked_bias|causal_mask|\.(attn|attention)\.bias)$"
)


def quantization_problem(config: PreTrainedConfig) -> str | None:
    """Why the quantized weights of a model cannot be trained; None if they can, or are plain."""
    for part in (config, config.get_text_config()):
        quantization = getattr(part, "quantization_config", None)
        if quantization is None:
            continue
        method = quantization.get("quant_method", "unknown method")
        if method not in DEQUANTIZED:
            return (
                f"its weights are quantized ({method}), and rl2 trains plain ones; give the "
                "unquantized model that it was made from (with actor.quantize_base=nf4, LoRA "
                "stores it in 4 bits)"
            )
    return None


def without_quantization(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the config of the dequantized model, which is what is trained and exported."""
    config = deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def read_weights(
    model_class: AutoClass,
    name: str,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    attn_implementation: str | None = None,
    device_map: str | None = None,
) -> tuple[PreTrainedModel, set[str]]:
    """Returns the model in host memory, dequantized, and the names of a critic's new weights.

    The last two arguments are those of from_pretrained. ValueError if the weights are not those of
    the model.
    """
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        config = deepcopy(config)
        config.quantization_config = quantization | {"dequantize": True}
    with _captured_log() as log:
        try:
            loaded: Any = model_class.from_pretrained(
                name,
                config=config,
                dtype=dtype,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # the report has them
                attn_implementation=attn_implementation,
                device_map=device_map,
            )
        except RuntimeError as error:
            text = "\n".join(record.getMessage() for record in log)
            broken = set(re.findall(r"^(\S+) +\| CONVERSION", text, re.MULTILINE))
            if not broken:
                raise
            reason = "are not whole in the files, or have parts of different shapes"
            raise _unusable(name, f"{_some(broken)} {reason}") from error
    hf, report = loaded
    is_critic = hf.get_output_embeddings() is None
    new = {"score.weight"} & report["missing_keys"] if is_critic else set()
    missing = report["missing_keys"] - new
    unexpected = report["unexpected_keys"]
    unexpected = {key for key in unexpected if not CONSTANT.search(key)}
    unexpected -= ignored_weights(hf, unexpected)
    if is_critic and unexpected:
        unexpected -= empty_language_model(config).state_dict().keys()  # its head
    untied = hf.get_expanded_tied_weights_keys(all_submodels=True).keys() - hf.all_tied_weights_keys
    problems: list[str] = []
    if unexpected:
        problems.append(f"the model of config.json lacks {_some(unexpected)}, which the files have")
    if missing:
        problems.append(f"the files lack {_some(missing)}")
    if report["mismatched_keys"]:
        mismatched = {
            f"{key} ({list(in_file)} in the files, {list(in_model)} in the model)"
            for key, in_file, in_model in report["mismatched_keys"]
        }
        problems.append(f"config.json says other shapes of {_some(mismatched)}")
    if untied:
        problems.append(
            f"config.json ties {_some(untied)} to the embeddings, but the files have other values; "
            "set tie_word_embeddings to false there"
        )
    if problems:
        raise _unusable(name, "; ".join(problems))
    return hf, new


def check_weight_files(name: str) -> None:
    """ValueError unless the files have the weights that config.json describes, by names and shapes.

    For a model that an engine alone reads. No weight is read, so an own head beside a config that
    ties it is not found. Weights that are quantized in the files are the engine's matter.
    """
    config = AutoConfig.from_pretrained(name)
    if getattr(config, "quantization_config", None) is None:
        read_weights(language_model_class(config), name, config, torch.float32, device_map="meta")


def ignored_weights(hf: PreTrainedModel, names: Iterable[str]) -> set[str]:
    """Returns which weights of the files the class of `hf` leaves out on purpose.

    These are what transformers ignores, and the layers that predict several tokens ahead.
    """
    text = hf.config.get_text_config()
    end = getattr(text, "num_hidden_layers", 0)
    num_extra = getattr(text, "num_nextn_predict_layers", None) or 0
    patterns = [rf"(^|\.)layers\.{layer}\." for layer in range(end, end + num_extra)]
    patterns += hf._keys_to_ignore_on_load_unexpected or ()
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}


def lost_weights(name: str, hf: PreTrainedModel) -> str | None:
    """Names the weights of the files that are ignored, so that an export lacks them."""
    names: Iterable[str] = []
    index = cached_file(name, INDEX, _raise_exceptions_for_missing_entries=False)
    path = cached_file(name, "model.safetensors", _raise_exceptions_for_missing_entries=False)
    if index is not None:
        with open(index) as file:
            names = json.load(file)["weight_map"]
    elif path is not None:
        with safe_open(path, "pt") as file:
            names = file.keys()
    own = hf.state_dict().keys()
    body = f"{hf.base_model_prefix}."  # files of a body alone leave it out
    lost = ignored_weights(hf, names) - own - {key.removeprefix(body) for key in own}
    lost = {key for key in lost if not CONSTANT.search(key)}
    return _some(lost) if lost else None


def _unusable(name: str, problem: str) -> ValueError:
    remedy = "config.json and the weights have to be of one model; copy both from their source"
    if "v_head." in problem:  # TRL's AutoModelForCausalLMWithValueHead
        remedy = "v_head is TRL's value head: save the model below it, model.pretrained_model"
    return ValueError(f"the weights of {name} cannot be used: {problem}. {remedy}")


def _some(names: set[str]) -> str:
    first = ", ".join(sorted(names)[:3])
    return f"{len(names)} of them, such as {first}" if len(names) > 3 else first


@contextmanager
def _captured_log() -> Iterator[list[logging.LogRecord]]:
    """A context in which what transformers logs goes to a list."""
    handler = BufferingHandler(sys.maxsize)
    transformers_logging.disable_default_handler()
    transformers_logging.add_handler(handler)
    try:
        yield handler.buffer
    finally:
        transformers_logging.remove_handler(handler)
        transformers_logging.enable_default_handler()
