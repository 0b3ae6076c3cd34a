"""Low-rank adapters beside frozen weights that FSDP2 shards, through peft (LoRA: Hu et al., 2021, arXiv:2106.09685).

An adapted layer computes W x + scale B A x, with W [out, in] frozen, A [r, in] drawn by peft and B [out, r], which starts
at 0, so that training starts from the model itself. peft names the three NAME.base_layer.weight,
NAME.lora_A.default.weight and NAME.lora_B.default.weight; nothing outside this file knows that.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor

ADAPTER = "default"  # what peft calls the only one


def inject(hf: nn.Module, adapters: tuple[int, float | None, list[str]] | None) -> None:
    """Puts adapters (rank, alpha, targets; None = none) beside the linear layers of the body of `hf` whose names end in
    one of `targets` (none = beside all) and freezes the rest, but for the head of a critic. The scale is alpha / rank, 2
    if alpha is None. What is trained becomes fp32; what is frozen stays in its dtype. ValueError for a target that is
    not there."""
    if adapters is None:
        return
    from peft import LoraConfig, inject_adapter_in_model

    rank, alpha, targets = adapters
    linear = [
        name for name, module in hf.base_model.named_modules() if isinstance(module, nn.Linear)
    ]
    kinds = sorted({name.rpartition(".")[2] for name in linear})
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in linear):
            raise ValueError(
                f"lora_targets: no linear layer is called {target}; there are {', '.join(kinds)}"
            )
    alpha = 2 * rank if alpha is None else alpha
    inject_adapter_in_model(
        LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets or kinds), hf.base_model
    )
    for name, parameter in hf.named_parameters():
        trained = ".lora_" in name or name.startswith("score.")
        parameter.requires_grad_(trained)
        if trained:
            parameter.data = parameter.data.float()


def _layers(hf):
    """(name, layer) of what is adapted."""
    return [(name, module) for name, module in hf.named_modules() if hasattr(module, "lora_A")]


@contextmanager
def disabled(hf: nn.Module):
    """`hf` without its adapters: the model that training started from."""
    # Not peft's enable_adapters(False): that freezes the adapters too, and FSDP2 settles in the first forward what is
    # trained. Adding 0 changes no value.
    for _, layer in _layers(hf):
        layer.set_scale(ADAPTER, 0.0)
    try:
        yield
    finally:
        for _, layer in _layers(hf):
            layer.set_scale(ADAPTER, 1.0)


def merged(hf: nn.Module) -> Iterator[tuple[str, DTensor]]:
    """Every parameter by its Hugging Face name, sharded as it is, with its adapter, if it has one, added in fp32."""
    layers = dict(_layers(hf))
    for name, parameter in hf.named_parameters():
        if ".lora_" in name:
            continue
        weight = parameter.detach()
        layer = layers.get(name.removesuffix(".base_layer.weight"))
        if layer is not None:
            a, b = (part[ADAPTER].weight.detach() for part in (layer.lora_A, layer.lora_B))
            weight = weight.to(torch.float32, copy=True)
            rows = weight.to_local()
            delta = layer.scaling[ADAPTER] * (
                b.to_local() @ a.full_tensor()
            )  # FSDP2 cuts W and B by the same rows
            rows.copy_(
                torch.where(delta == 0, rows, rows + delta)
            )  # -0.0 + 0.0 would be other bits than the engine's
        yield name.replace(".base_layer.", "."), weight


def save(hf: nn.Module, folder: str, base: str) -> None:
    """Writes what is trained as a folder for `peft.PeftModel.from_pretrained(model, folder)`, where `model` is that of
    the name `base`. All processes must call."""
    full = {
        "base_model.model." + name.replace(f".{ADAPTER}.", "."): parameter.detach()
        .full_tensor()
        .cpu()
        for name, parameter in hf.named_parameters()
        if parameter.requires_grad
    }
    if dist.get_rank() == 0:
        critic = hf.get_output_embeddings() is None
        config = copy(hf.base_model.peft_config[ADAPTER])
        config.task_type, config.modules_to_save = (
            ("SEQ_CLS", ["score"]) if critic else ("CAUSAL_LM", None)
        )
        config.base_model_name_or_path, config.inference_mode = base, True
        config.save_pretrained(folder)
        save_file(full, f"{folder}/adapter_model.safetensors", metadata={"format": "pt"})
