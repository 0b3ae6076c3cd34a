"""Tests how adapters are handed to vLLM and read back, with a stand-in for vLLM's LoRA manager.

tests/vllm_cpu/test_adapters.py tests it with the real one.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import Literal

import pytest
import torch
from common import make_model
from transformers import AutoConfig, AutoModelForCausalLM

from rl2.engine.vllm_adapters import Adapters, lora_arguments
from rl2.model import lora
from rl2.model.lora import LoraSettings

QKV = ["q_proj", "k_proj", "v_proj"]
ROOM = 8  # rank of the stand-in's buffers


class Record(SimpleNamespace):
    """An object of vLLM, with the names of its fields."""

    fields: tuple[str, ...] = ()

    def __init__(self, *values):
        super().__init__(**dict(zip(self.fields, values, strict=True)))


class LoRAModel(Record):
    fields = ("id", "rank", "loras")


class LoRALayerWeights(Record):
    fields = ("name", "rank", "alpha", "a", "b", "scale")


class LoRARequest(Record):
    fields = ("lora_name", "lora_int_id", "lora_path")


class StandIn:
    """An LLMEngine and its LoRA manager: one slot, and q, k and v are parts of one layer."""

    def __init__(self, model):
        self.modules = {}
        self.packed_modules = {}
        self.lora_index_to_id = [None]
        self.lora_config = SimpleNamespace(lora_dtype=torch.float32, max_lora_rank=ROOM)
        self._adapter_manager = self
        for name, layer in model.named_modules():
            parent, _, kind = name.rpartition(".")
            if kind == "q_proj":
                parts = [model.get_submodule(f"{parent}.{part}") for part in QKV]
                self.modules[f"{parent}.qkv_proj"] = self.make_layer(parts)
                self.packed_modules[f"{parent}.qkv_proj"] = [f"{parent}.{part}" for part in QKV]
            elif kind == "o_proj":
                self.modules[name] = self.make_layer([layer])

    def make_layer(self, parts):
        return SimpleNamespace(
            lora_a_stacked=[torch.zeros(1, 1, ROOM, part.in_features) for part in parts],
            lora_b_stacked=[torch.zeros(1, 1, part.out_features, ROOM) for part in parts],
        )

    def collective_rpc(self, function):
        runner = SimpleNamespace(lora_manager=self)
        return [function(SimpleNamespace(model_runner=runner))]

    def remove_lora(self, number):
        assert self.lora_index_to_id == [number]
        self.lora_index_to_id = [None]

    def add_lora(self, request):
        assert self.lora_index_to_id == [None]
        adapters = self._load_adapter(request)
        self.lora_index_to_id = [adapters.id]
        for name, module in self.modules.items():
            layers = self.packed_modules.get(name, [name])
            for layer, a, b in zip(
                layers, module.lora_a_stacked, module.lora_b_stacked, strict=True
            ):
                weights = adapters.loras.get(layer)
                a.zero_()
                b.zero_()
                if weights is not None:
                    a[0, 0, : weights.rank] = weights.a
                    weights.b *= weights.scale  # in place, as vLLM
                    b[0, 0, :, : weights.rank] = weights.b


@pytest.fixture(autouse=True)
def with_vllm(monkeypatch):
    for name, value in (
        ("config.lora", {"MaxLoRARanks": Literal[1, 8, 16]}),
        ("lora.lora_model", {"LoRAModel": LoRAModel}),
        ("lora.lora_weights", {"LoRALayerWeights": LoRALayerWeights}),
        ("lora.request", {"LoRARequest": LoRARequest}),
    ):
        module = ModuleType(f"vllm.{name}")
        vars(module).update(value)
        monkeypatch.setitem(sys.modules, f"vllm.{name}", module)
    for name in ("vllm", "vllm.config", "vllm.lora"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))


@pytest.fixture
def name(tmp_path):
    return make_model(tmp_path / "model")


def make_adapted(name, **settings):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name))
        plain = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name))
    lora.inject(model, LoraSettings(**{"rank": 3, "alpha": 64.0, **settings}))
    return model, StandIn(plain)


def make_tensors(model, seed):
    generator = torch.Generator().manual_seed(seed)
    adapters = [(key, x) for key, x in model.named_parameters() if lora.is_adapter(key)]
    return {key: torch.randn(x.shape, generator=generator) for key, x in adapters}


def test_adapters_are_replaced_and_wrong_ones_are_named(name):
    model, engine = make_adapted(name, targets=["q_proj", "v_proj", "o_proj"], alpha=5.0)
    adapters = Adapters(engine, model)
    with pytest.raises(RuntimeError, match="has no adapters"):
        adapters.held()
    requests = set()
    for seed in range(3):
        tensors = make_tensors(model, seed)
        sent = {key: value.clone() for key, value in tensors.items()}
        adapters.load(tensors)
        requests.add((adapters.request.lora_name, adapters.request.lora_int_id))
        assert engine.lora_index_to_id == [adapters.request.lora_int_id]
        assert all(torch.equal(sent[key], tensors[key]) for key in sent), "the trainer's changed"
        assert adapters.different(adapters.held(), tensors) == []
    assert len(requests) == 3, "vLLM's prefix cache goes by the name"
    q_proj = engine.modules["model.layers.0.self_attn.qkv_proj"].lora_b_stacked[0]
    b = tensors["model.layers.0.self_attn.q_proj.lora_B.default.weight"]
    torch.testing.assert_close(q_proj[0, 0, :, :3], b * 5 / 3)
    older = make_tensors(model, 1)
    assert len(adapters.different(adapters.held(), older)) == 2 * 3
    for layer in ("q_proj", "k_proj"):  # the latter has no adapter
        stale = engine.modules["model.layers.1.self_attn.qkv_proj"]
        stale.lora_a_stacked[QKV.index(layer)][0, 0, 5, 1] += 1
        different = adapters.different(adapters.held(), tensors)
        assert f"model.layers.1.self_attn.{layer}" in different


def test_adapters_that_were_lost_are_not_read_from_a_folder(name):
    model, engine = make_adapted(name, targets=["o_proj"])
    adapters = Adapters(engine, model)
    adapters.load(make_tensors(model, 0))
    lost = adapters.request
    engine.lora_index_to_id = [None]
    with pytest.raises(RuntimeError, match="has lost the adapters"):
        engine.add_lora(lost)
    with pytest.raises(RuntimeError, match="has lost them"):
        adapters.held()


def test_the_room_is_for_the_adapters_alone(name):
    model, _ = make_adapted(name, rank=9, targets=["layers.1.mlp.up_proj", "o_proj"])
    arguments = lora_arguments(model)
    assert arguments["max_lora_rank"] == 16 and arguments["max_loras"] == 1
    assert arguments["lora_target_modules"] == ["o_proj", "up_proj"]
    model, _ = make_adapted(name, rank=17)
    with pytest.raises(ValueError, match="actor.lora_rank=17: .* up to 16"):
        lora_arguments(model)


def test_layers_that_vllm_does_not_adapt_are_named(name):
    model, engine = make_adapted(name, targets=["o_proj", "up_proj"])
    with pytest.raises(ValueError, match=r"2 layers .*mlp\.up_proj"):
        Adapters(engine, model)
