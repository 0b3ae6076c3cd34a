"""Weights on their way to SGLang and vLLM are those of the model's files."""

from pathlib import Path

import pytest
import torch
from common import GLM4_MOE, MIXTURES, RECURRENT, SPECIAL, make_model
from safetensors.torch import load_file
from test_special_models import save_family
from transformers import AutoConfig, AutoModelForCausalLM

from rl2.engine.checkpoint_format import CheckpointFormat
from rl2.model.classes import empty_language_model, language_model_class
from rl2.parallel.fsdp import persistent_buffers

FAMILIES = {
    "glm4_moe": GLM4_MOE,  # has a buffer
    "hrm_text": {"num_layers_per_stack": 1, "num_key_value_heads": 4},  # files join weights
    "llama": {},
    **MIXTURES,  # one has other names in files
    **SPECIAL,
    **RECURRENT,
}


def check_files(name):
    """What the trainer sends becomes what is stored; a tied head is in neither.

    It sends parameters and buffers by their names in transformers.
    """
    config = AutoConfig.from_pretrained(name)
    model = language_model_class(config).from_pretrained(name, dtype=torch.float32)
    sent = [*model.named_parameters(), *persistent_buffers(model)]
    converted = list(CheckpointFormat(empty_language_model(config)).convert(sent))
    stored = load_file(Path(name) / "model.safetensors")
    assert sorted(key for key, _ in converted) == sorted(stored)
    for key, weight in converted:
        assert torch.equal(weight, stored[key]), key


@pytest.mark.parametrize(
    "family, tied", [("llama", True), ("mixtral", True), *((name, False) for name in FAMILIES)]
)
def test_weights_are_those_of_the_files(tmp_path, family, tied):
    check_files(make_model(tmp_path / "model", family, **{"tied": tied, **FAMILIES[family]}))


@pytest.mark.parametrize("family", ["gemma3", "qwen2_5_vl"])
def test_weights_of_models_with_a_tower(tmp_path, family):
    check_files(save_family(family, tmp_path / "model"))


def test_experts_leave_before_the_next_weight_is_made(tmp_path):
    """So that no more than one whole weight is in memory."""
    name = make_model(tmp_path / "model", "qwen3_moe", **FAMILIES["qwen3_moe"])
    made = []

    def make():
        for key, weight in AutoModelForCausalLM.from_pretrained(name).named_parameters():
            made.append(key)
            yield key, weight

    sources = {}
    empty = empty_language_model(AutoConfig.from_pretrained(name))
    for key, _ in CheckpointFormat(empty).convert(make()):
        sources.setdefault(made[-1], []).append(key)
    assert list(sources) == made
    prefix = "model.layers.1.mlp.experts"
    assert sources[f"{prefix}.down_proj"] == [f"{prefix}.{i}.down_proj.weight" for i in range(4)]
