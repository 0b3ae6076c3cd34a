"""Low-rank adapters beside frozen weights that FSDP2 shards, through peft (LoRA: Hu et al., 2021,
arXiv:2106.09685).

An adapted layer computes W x + scale B A x, with W [out, in] frozen, A [rank, in] drawn by peft and
B [out, rank], which starts at 0, so that training starts from the model itself. peft names the
three NAME.base_layer.weight, NAME.lora_A.default.weight and NAME.lora_B.default.weight. Of these
names tensor.py and nf4.py know a part, other files nothing. An engine with the same layers has the
same names.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

from rl2.config.schema import WorkerConfig
from rl2.model import nf4
from rl2.model.attachment import Attachment, ModelSettings, Read
from rl2.model.classes import find_routers, idle_parts, is_adapter
from rl2.progress import track

ADAPTER = "default"  # peft's name of the only adapter
BASE = ".base_layer."  # in the names of the weights that have an adapter beside them
PREFIX = "base_model.model."  # of names in its files, which leave the adapter's name out
WEIGHTS = "adapter_model.safetensors"  # of its files
# peft refuses adapters of out_proj in models of these types.
NO_OUT_PROJ = {"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"}


class Adapters(Attachment):
    """The adapters of a model with lora_rank above 0.

    They are all that is trained, beside a critic's head. With quantize_base the linear layers of
    the base are in 4 bits.
    """

    def __init__(self, config: WorkerConfig, hf: PreTrainedModel):
        self.config = config
        self.quantized: dict[str, nf4.Nf4Linear] = {}  # by the name of the weight
        for name, layer in hf.named_modules():
            if isinstance(layer, nf4.Nf4Linear):
                self.quantized[f"{name}.weight"] = layer

    @classmethod
    def attach(cls, settings: ModelSettings, hf: PreTrainedModel) -> "Adapters | None":
        if not settings.freezes_base:
            return None
        with init_empty_weights(include_buffers=False):
            inject(hf, settings.config)
            if settings.config.quantize_base:
                # Layers of routers stay: their rounding would change the choice of experts.
                names, _ = _linear_layers(hf, with_routers=False)
                nf4.replace_linears(hf, [f"{hf.base_model_prefix}.{name}" for name in names])
        return cls(settings.config, hf)

    def after_read(self, hf: PreTrainedModel) -> None:
        inject(hf, self.config)
        if self.quantized:
            print(
                f"{self.config.model_name}: {len(self.quantized)} linear layers of the base are "
                "stored in nf4; engines and exports get the dequantised weights, with the adapters "
                "merged in"
            )

    def change(self, name: str, weight: Tensor) -> Tensor:
        return nf4.quantize(weight) if name in self.quantized else weight

    @contextmanager
    def at_start(self, hf: PreTrainedModel) -> Iterator[None]:
        """The adapters count nothing."""
        # Not by peft's enable_adapters(False): that freezes the adapters too, and FSDP2 fixes in
        # the first forward pass which parameters are trained.
        layers = _adapted_layers(hf).values()
        for layer in layers:
            layer.set_scale(ADAPTER, 0.0)
        try:
            yield
        finally:
            for layer in layers:
                layer.set_scale(ADAPTER, 1.0)

    def iter_exported(self, hf: PreTrainedModel, read: Read) -> Iterator[tuple[str, DTensor]]:
        """Every parameter by its Hugging Face name, sharded as it is, its adapter added in fp32.

        What is stored in 4 bits is dequantised. One at a time is read, with its adapter.
        """
        layers = _adapted_layers(hf)
        quantized = {layer.weight: layer for layer in self.quantized.values()}

        def read_weight(parameter: nn.Parameter) -> DTensor:
            layer = quantized.get(parameter)
            return read(parameter) if layer is None else layer.dequantized(read(parameter))

        for name, parameter in track(list(hf.named_parameters()), "weights"):
            if is_adapter(name):
                continue
            hf_name = name.replace(BASE, ".")
            layer = layers.get(name.removesuffix(f"{BASE}weight"))
            if layer is None:
                yield hf_name, read_weight(parameter)
            else:
                yield hf_name, _merge(parameter, layer, read_weight)

    def save(self, hf: PreTrainedModel, folder: str, read: Read) -> None:
        """Writes what is trained as FOLDER/adapter for `peft.PeftModel.from_pretrained(model,
        FOLDER/adapter)`, where `model` is loaded from the name of the base.
        """
        full = {}
        for name, parameter in hf.named_parameters():
            if parameter.requires_grad:
                peft_name = PREFIX + name.replace(f".{ADAPTER}.", ".")
                full[peft_name] = read(parameter).full_tensor().cpu()
        if dist.get_rank() > 0:
            return
        body: Any = hf.base_model
        config = copy(body.peft_config[ADAPTER])
        config.task_type = "CAUSAL_LM"
        config.modules_to_save = None
        if hf.get_output_embeddings() is None:  # a critic
            config.task_type = "SEQ_CLS"
            config.modules_to_save = ["score"]
        config.base_model_name_or_path = self.config.model_name
        config.inference_mode = True
        config.save_pretrained(f"{folder}/adapter")
        save_file(full, f"{folder}/adapter/{WEIGHTS}", metadata={"format": "pt"})


def inject(hf: PreTrainedModel, config: WorkerConfig) -> None:
    """Puts adapters beside linear layers of the body of `hf` and freezes all but a critic's head.

    What is trained becomes fp32; what is frozen stays in its dtype. ValueError for a target that
    names no layer.
    """
    from peft import LoraConfig, inject_adapter_in_model

    linear_names, excluded_names = _linear_layers(hf, not config.freeze_router)
    kinds = sorted({_kind(name) for name in linear_names})
    if not kinds:
        raise ValueError(
            f"lora_rank={config.lora_rank}: {type(hf).__name__} has no linear layer "
            "(torch.nn.Linear) that can have an adapter; set lora_rank=0, or choose another model"
        )
    for target in config.lora_targets:
        if not any(f".{name}".endswith(f".{target}") for name in linear_names):
            raise ValueError(
                f"lora_targets: no layer that can have an adapter is called {target}; there are "
                f"{', '.join(kinds)}"
            )
    alpha: Any = config.lora_alpha  # peft takes a float, though its type says int
    adapters = LoraConfig(
        r=config.lora_rank,
        lora_alpha=alpha,
        target_modules=config.lora_targets or kinds,
        exclude_modules=excluded_names or None,
    )
    inject_adapter_in_model(adapters, hf.base_model)
    for name, parameter in hf.named_parameters():
        is_trained = is_adapter(name) or name.startswith("score.")
        parameter.requires_grad_(is_trained)
        if is_trained:
            parameter.data = parameter.data.float()


def inject_for_engine(hf: PreTrainedModel, config: WorkerConfig, dtype: torch.dtype) -> None:
    """Puts the adapters of `inject`, in `dtype`, into the model of an engine.

    They are noise, also B, so that trials of kernels mean something; the trainer has their values.
    """
    with torch.random.fork_rng(devices=[]):  # the trainer's numbers stay the same
        inject(hf, config)
        for layer in _adapted_layers(hf).values():
            nn.init.normal_(layer.lora_B[ADAPTER].weight)
    for name, parameter in hf.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.to(dtype)


def _linear_layers(hf: PreTrainedModel, with_routers: bool) -> tuple[list[str], list[str]]:
    """(the linear layers that can have an adapter, those that are excluded), by name in the body.

    Excluded are layers of towers and, unless `with_routers`, of routers. Layers of kinds that peft
    cannot adapt are in neither list.
    """
    excluded = {part for tower in idle_parts(hf) for part in tower.modules()}
    if not with_routers:
        excluded |= find_routers(hf)
    linear_names: list[str] = []
    excluded_names: list[str] = []
    for name, module in hf.base_model.named_modules():
        if not isinstance(module, nn.Linear) or is_adapter(name):
            continue
        if module in excluded:
            excluded_names.append(name)
        else:
            linear_names.append(name)
    unfit = _unfit_kinds(hf, {_kind(name) for name in linear_names})
    return [name for name in linear_names if _kind(name) not in unfit], excluded_names


def _kind(name: str) -> str:
    """The last part of a layer's name, such as q_proj."""
    return name.removesuffix(".base_layer").rpartition(".")[2]


def _unfit_kinds(hf: PreTrainedModel, kinds: set[str]) -> set[str]:
    """The kinds of linear layers that get no adapter, since peft could not read it, or it would do
    nothing.

    In many models with fused experts (Qwen3-Next, GLM-4.5) peft takes gate_proj and the like for
    the experts, though other layers have these names too.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    unfit = {"dt_proj"}  # Mamba's layers read its weight and do not call it
    if getattr(hf.base_model.config, "model_type", None) in NO_OUT_PROJ:
        unfit.add("out_proj")
    # The kinds of experts come together, or the conversion is refused.
    experts = {"gate_proj", "up_proj", "down_proj"}
    config = LoraConfig(target_modules=sorted(kinds | experts))
    convert_peft_config_for_transformers(config, hf.base_model, None)
    unfit |= (kinds | experts) - set(config.target_modules or ())
    return unfit


def _adapted_layers(hf) -> dict[str, Any]:
    """The layers that have an adapter, by name."""
    return {name: module for name, module in hf.named_modules() if hasattr(module, "lora_A")}


def _merge(parameter: nn.Parameter, layer: Any, read: Read) -> DTensor:
    """W + scale B A of an adapted layer, in fp32.

    W and B are cut by the same rows, and tensor parallelism may cut W and A by the same columns. So
    each process merges its own part.
    """
    shard = read(layer.lora_A[ADAPTER].weight)
    whole_rows = [Replicate() if cut.is_shard(0) else cut for cut in shard.placements]
    a = shard.redistribute(placements=whole_rows).to_local()  # [rank, local columns]
    b = read(layer.lora_B[ADAPTER].weight).to_local()  # [local rows, rank]
    delta = layer.scaling[ADAPTER] * (b @ a)  # [local rows, local columns]
    merged: Any = read(parameter).to(torch.float32, copy=True)
    rows = merged.to_local()
    # Where delta is 0 the weight keeps its bits, which engines compare: -0.0 + 0.0 would be 0.0.
    rows.copy_(torch.where(delta == 0, rows, rows + delta))
    return merged
