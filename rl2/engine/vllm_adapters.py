"""LoRA's adapters in vLLM: handed over in memory, and read back from the layers that apply them.

vLLM puts layers with room for one adapter around those of its model, and joins some of the
trainer's: q_proj, k_proj and v_proj are parts of qkv_proj. A request names its adapter. Every load
has a name of its own, since vLLM's prefix cache goes by it: keys and values of an earlier adapter
are never found.
"""

from collections.abc import Mapping
from itertools import count
from typing import Any, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rl2.model.lora import LayerAdapter, adapter_ranks, layer_adapters

Matrices = tuple[Tensor, Tensor]  # A [max_rank, in] and scale B [out, max_rank] of a layer


def lora_arguments(model: PreTrainedModel) -> dict[str, Any]:
    """vLLM's engine arguments for the adapters that `model` has, see `lora.inject`.

    ValueError for a rank that is too large for vLLM.
    """
    from vllm.config.lora import MaxLoRARanks

    ranks = adapter_ranks(model)
    rank = max(ranks.values())
    allowed = [size for size in get_args(MaxLoRARanks) if size >= rank]
    if not allowed:
        largest = max(get_args(MaxLoRARanks))
        raise ValueError(
            f"actor.lora_rank={rank}: vLLM applies adapters of ranks up to {largest}; set "
            "rollout.lora=merged"
        )
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": min(allowed),
        # Otherwise it makes room for adapters of the embedding and the head as well.
        "lora_target_modules": sorted({name.rpartition(".")[2] for name in ranks}),
    }


class Adapters:
    """The adapters of an LLMEngine in this process, whose layers those of `model` name.

    ValueError for a layer that vLLM does not adapt.
    """

    request: Any = None  # vLLM's name of those that are loaded, for requests; None before

    def __init__(self, engine: Any, model: PreTrainedModel):
        self.engine = engine
        self.model = model
        self.ids = count(1)
        self.next: Any = None  # what vLLM takes when it asks for adapters
        [worker_manager] = engine.collective_rpc(lambda worker: worker.model_runner.lora_manager)
        worker_manager._load_adapter = self._take
        self.manager = worker_manager._adapter_manager
        missing = sorted(adapter_ranks(model).keys() - self._layers().keys())
        if missing:
            raise ValueError(
                f"rollout.lora=adapter: vLLM does not adapt {len(missing)} layers of this model: "
                f"{missing[:3]}; set rollout.lora=merged, or leave them out of actor.lora_targets"
            )

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces the adapters by `tensors`, all of them, by the names in `model`."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.lora_weights import LoRALayerWeights
        from vllm.lora.request import LoRARequest

        dtype = self.manager.lora_config.lora_dtype
        layers = {}
        for name, (a, b, scale) in layer_adapters(self.model, tensors).items():
            # Copies: vLLM multiplies B by the scale, in place.
            a, b = (matrix.detach().to("cpu", dtype, copy=True) for matrix in (a, b))
            layers[name] = LoRALayerWeights(name, len(a), len(a), a, b, scale)
        number = next(self.ids)
        if self.request is not None:
            self.engine.remove_lora(self.request.lora_int_id)
        self.next = LoRAModel(number, self.manager.lora_config.max_lora_rank, layers)
        self.request = LoRARequest(f"rl2-{number}", number, "memory")
        self.engine.add_lora(self.request)
        self.next = None

    def _take(self, request: Any) -> Any:
        """In the place of reading a folder. vLLM asks when it does not have what a request names.

        RuntimeError unless `load` is asking.
        """
        if self.next is None or self.next.id != request.lora_int_id:
            raise RuntimeError(f"vLLM has lost the adapters {request.lora_name}")
        return self.next

    def held(self) -> dict[str, Matrices]:
        """Copies of what vLLM's layers multiply with, by the names of the trainer's layers."""
        slots = self.manager.lora_index_to_id
        if self.request is None or self.request.lora_int_id not in slots:
            raise RuntimeError("vLLM has no adapters: none were loaded, or it has lost them")
        slot = slots.index(self.request.lora_int_id)
        layers = self._layers()
        return {name: (a[slot, 0].clone(), b[slot, 0].clone()) for name, (a, b) in layers.items()}

    def different(self, held: Mapping[str, Matrices], tensors: Mapping[str, Tensor]) -> list[str]:
        """The names of layers whose adapters in `held` are not `tensors`, bit by bit, sorted.

        Layers without an adapter hold zeros.
        """
        adapters = layer_adapters(self.model, tensors)
        return sorted(name for name in held if not _is_held(held[name], adapters.get(name)))

    def _layers(self) -> dict[str, Matrices]:
        """vLLM's own buffers, [slots, 1, ...], by the names of the trainer's layers."""
        layers: dict[str, Matrices] = {}
        for name, module in self.manager.modules.items():
            names = self.manager.packed_modules.get(name, [name])
            if len(names) == len(module.lora_a_stacked):  # or it is joined in another way
                buffers = zip(module.lora_a_stacked, module.lora_b_stacked, strict=True)
                layers.update(zip(names, buffers, strict=True))
        return layers


def _is_held(held: Matrices, adapter: LayerAdapter | None) -> bool:
    expected_a, expected_b = (torch.zeros_like(matrix) for matrix in held)
    if adapter is not None:
        rank = len(adapter.a)
        expected_a[:rank] = adapter.a
        expected_b[:, :rank] = adapter.b.to(expected_b) * adapter.scale
    return torch.equal(held[0], expected_a) and torch.equal(held[1], expected_b)
