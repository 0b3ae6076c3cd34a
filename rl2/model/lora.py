"""Low-rank adapters beside frozen weights that FSDP2 shards, through peft (LoRA: Hu et al., 2021,
arXiv:2106.09685).

An adapted layer computes W x + scale B A x, with W [out, in] frozen, A [rank, in] drawn by peft and
B [out, rank], which starts at 0, so that training starts from the model itself. peft names the
three NAME.base_layer.weight, NAME.lora_A.default.weight and NAME.lora_B.default.weight. Of these
names tensor.py and nf4.py know a part, other files nothing. An engine with the same layers has the
same names.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

from rl2.adapter_folder import WEIGHTS
from rl2.model import nf4
from rl2.model.classes import idle_parts
from rl2.model.moe import find_routers
from rl2.progress import track

ADAPTER = "default"  # peft's name of the only adapter
BASE = ".base_layer."  # in the names of the weights that have an adapter beside them
PREFIX = "base_model.model."  # of names in its files, which leave the adapter's name out
# peft refuses adapters of out_proj in models of these types.
NO_OUT_PROJ = {"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"}


@dataclass(frozen=True)
class LoraSettings:
    """Which adapters a model gets: new ones, or those of a folder, which gives all of it."""

    rank: int
    alpha: float  # the scale is alpha / rank
    targets: list[str] = field(default_factory=list)  # endings of layer names; empty = all layers
    folder: str | None = None  # as peft writes it
    with_routers: bool = True  # whether layers of routers get adapters
    base: str | None = None  # nf4: the frozen linear layers are stored in 4 bits


def inject(hf: PreTrainedModel, settings: LoraSettings | None) -> None:
    """Puts adapters beside linear layers of the body of `hf` and freezes all but a critic's head.

    What is trained becomes fp32; what is frozen stays in its dtype. None puts nothing. ValueError
    for a target that names no layer, and for adapters of a folder that do not fit the model.
    """
    if settings is None:
        return
    from peft import inject_adapter_in_model

    make_config = _new_config if settings.folder is None else _read_config
    inject_adapter_in_model(make_config(hf, settings), hf.base_model)
    for name, parameter in hf.named_parameters():
        is_trained = is_adapter(name) or name.startswith("score.")
        parameter.requires_grad_(is_trained)
        if is_trained:
            parameter.data = parameter.data.float()


def inject_for_engine(hf: PreTrainedModel, settings: LoraSettings, dtype: torch.dtype) -> None:
    """Puts the adapters of `inject`, in `dtype`, into the model of an engine.

    Those of settings.folder have their values. New ones have noise, also B, so that trials of
    kernels mean something; the trainer has their values.
    """
    with torch.random.fork_rng(devices=[]):  # the trainer's numbers stay the same
        inject(hf, settings)
        for layer in _adapted_layers(hf).values():
            nn.init.normal_(layer.lora_B[ADAPTER].weight)
    read_weights(hf, settings)
    for name, parameter in hf.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.to(dtype)


def is_adapter(name: str) -> bool:
    """Whether the parameter of this name is a matrix of an adapter."""
    return ".lora_" in name


def base_name(name: str) -> str:
    """The Hugging Face name of a weight that is no adapter's."""
    return name.replace(BASE, ".")


def _new_config(hf: PreTrainedModel, settings: LoraSettings) -> Any:
    from peft import LoraConfig

    linear_names, excluded_names = _linear_layers(hf, settings.with_routers)
    kinds = sorted({_kind(name) for name in linear_names})
    if not kinds:
        raise ValueError(
            f"lora_rank={settings.rank}: {type(hf).__name__} has no linear layer (torch.nn.Linear) "
            "that can have an adapter; set lora_rank=0, or choose another model"
        )
    _check_targets(settings.targets, linear_names, kinds)
    alpha: Any = settings.alpha  # peft takes a float, though its type says int
    return LoraConfig(
        r=settings.rank,
        lora_alpha=alpha,
        target_modules=settings.targets or kinds,
        exclude_modules=excluded_names or None,
    )


def _linear_layers(hf: PreTrainedModel, with_routers: bool) -> tuple[list[str], list[str]]:
    """(the linear layers that can have an adapter, those that are excluded), by name in the body.

    Excluded are layers of towers and, unless `with_routers`, of routers. Layers of kinds that peft
    cannot adapt are in neither list.
    """
    excluded = {part for _, tower in idle_parts(hf) for part in tower.modules()}
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


def quantize_base(hf: PreTrainedModel, settings: LoraSettings | None) -> None:
    """Makes the linear layers that can have an adapter layers of 4 bits if the settings say so.

    Layers of routers stay: their rounding would change the choice of experts. `inject` comes first.
    ValueError as of `nf4.replace_linears`.
    """
    if settings is not None and settings.base == "nf4":
        body = f"{hf.base_model_prefix}."
        names, _ = _linear_layers(hf, with_routers=False)
        nf4.replace_linears(hf, [body + name for name in names])


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


def _read_config(hf: PreTrainedModel, settings: LoraSettings) -> Any:
    """peft's settings of the adapters in a folder, for the layers that the folder has weights of.

    These say more than its `target_modules`, which may be an expression on the names of another
    class of models.
    """
    from peft import LoraConfig

    config = LoraConfig.from_pretrained(str(Path(settings.folder or "").expanduser()))
    body = f"{hf.base_model_prefix}."
    with _open_weights(settings) as file:
        names = [name.removeprefix(PREFIX) for name in file.keys()]
    layers = {name.partition(".lora_")[0] for name in names if ".lora_" in name}
    modules = dict(hf.named_modules())
    routers = set() if settings.with_routers else find_routers(hf)
    for layer in sorted(layers):
        if modules.get(layer) in routers:
            raise ValueError(
                f"freeze_router=true: the adapters in {settings.folder} adapt a router, {layer}"
            )
        if not (layer.startswith(body) and isinstance(modules.get(layer), nn.Linear)):
            raise ValueError(
                f"adapter={settings.folder} adapts {layer}, which is no linear layer of the body "
                f"of this model; it was made for {config.base_model_name_or_path}"
            )
    config.target_modules = {layer.removeprefix(body) for layer in layers}
    config.exclude_modules = config.layers_to_transform = config.layers_pattern = None
    config.modules_to_save = None
    config.lora_dropout = 0.0  # rl2 trains without dropout
    config.init_lora_weights = True  # the values come from the folder
    return config


def _open_weights(settings: LoraSettings) -> Any:
    return safe_open(Path(settings.folder or "", WEIGHTS).expanduser(), "pt")


def read_weights(hf: PreTrainedModel, settings: LoraSettings | None) -> None:
    """Gives the adapters of `hf`, which `inject` has put in, the values of settings.folder.

    A critic's head too if it is there. ValueError if they are not those of this model.
    """
    if settings is None or settings.folder is None:
        return
    with _open_weights(settings) as file:
        values = {name.removeprefix(PREFIX): file.get_tensor(name) for name in file.keys()}
    for name, parameter in hf.named_parameters():
        value = values.pop(name.replace(f".{ADAPTER}.", "."), None)
        if value is None and not is_adapter(name):
            continue
        if value is None or value.shape != parameter.shape:
            shape = "missing" if value is None else list(value.shape)
            raise ValueError(
                f"adapter={settings.folder}: {name} is {shape} there and {list(parameter.shape)} "
                "in this model, so the adapters were made for another one"
            )
        parameter.data.copy_(value)
    if values:
        raise ValueError(f"adapter={settings.folder}: this model has no {min(values)}")


def _check_targets(targets: list[str], linear_names: list[str], kinds: list[str]) -> None:
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in linear_names):
            raise ValueError(
                f"lora_targets: no layer that can have an adapter is called {target}; there are "
                f"{', '.join(kinds)}"
            )


def _adapted_layers(hf) -> dict[str, Any]:
    """The layers that have an adapter, by name."""
    return {name: module for name, module in hf.named_modules() if hasattr(module, "lora_A")}


@contextmanager
def exchanged(states: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> Iterator[None]:
    """A context in which `states`, of the adapters, hold `values`."""
    trained = [state.clone() for state in states]
    _copy_all(states, values)
    try:
        yield
    finally:
        _copy_all(states, trained)


@torch.no_grad()
def _copy_all(states: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for state, value in zip(states, values, strict=True):
        state.copy_(value)


@contextmanager
def disabled(hf: PreTrainedModel) -> Iterator[None]:
    """A context without adapters: `hf` is the model that they are beside."""
    # Not by peft's enable_adapters(False): that freezes the adapters too, and FSDP2 fixes in the
    # first forward pass which parameters are trained. A scale of 0 adds 0, which changes no value.
    for layer in _adapted_layers(hf).values():
        layer.set_scale(ADAPTER, 0.0)
    try:
        yield
    finally:
        for layer in _adapted_layers(hf).values():
            layer.set_scale(ADAPTER, 1.0)


def merged(
    hf: PreTrainedModel, read: Callable[[nn.Parameter], DTensor]
) -> Iterator[tuple[str, DTensor]]:
    """Every parameter by its Hugging Face name, sharded as it is, its adapter added in fp32.

    What is stored in 4 bits is dequantised. `read` gives a parameter on the device, see
    WeightMemory. One at a time is read, with its adapter.
    """
    layers = _adapted_layers(hf)
    quantized = {layer.weight: layer for layer in nf4.nf4_layers(hf).values()}

    def read_weight(parameter: nn.Parameter) -> DTensor:
        layer = quantized.get(parameter)
        return read(parameter) if layer is None else layer.dequantized(read(parameter))

    for name, parameter in track(list(hf.named_parameters()), "weights"):
        if is_adapter(name):
            continue
        hf_name = base_name(name)
        layer = layers.get(name.removesuffix(f"{BASE}weight"))
        if layer is None:
            yield hf_name, read_weight(parameter)
        else:
            yield hf_name, _merge(parameter, layer, read_weight)


def _merge(parameter: nn.Parameter, layer: Any, read: Callable[[nn.Parameter], DTensor]) -> DTensor:
    """W + scale B A of an adapted layer, in fp32.

    W and B are cut by the same rows, and tensor parallelism may cut W and A by the same columns. So
    each process merges its own part.
    """
    shard = read(layer.lora_A[ADAPTER].weight)
    whole_rows = [Replicate() if cut.is_shard(0) else cut for cut in shard.placements]
    a = shard.redistribute(placements=whole_rows).to_local()  # [rank, local columns]
    b = read(layer.lora_B[ADAPTER].weight).to_local()  # [local rows, rank]
    delta = layer.scaling[ADAPTER] * (b @ a)  # [local rows, local columns]
    merged_weight: Any = read(parameter).to(torch.float32, copy=True)
    rows = merged_weight.to_local()
    # Where delta is 0 the weight keeps its bits, which engines compare: -0.0 + 0.0 would be 0.0.
    rows.copy_(torch.where(delta == 0, rows, rows + delta))
    return merged_weight


def save(
    hf: PreTrainedModel, folder: str, base: str, read: Callable[[nn.Parameter], DTensor]
) -> None:
    """Writes what is trained as a folder for `peft.PeftModel.from_pretrained(model, folder)`, where
    `model` is loaded from the name `base`. `read` is that of `merged`. All processes must call.
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
    config.base_model_name_or_path = base
    config.inference_mode = True
    config.save_pretrained(folder)
    save_file(full, f"{folder}/{WEIGHTS}", metadata={"format": "pt"})
