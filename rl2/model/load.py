"""How a model is loaded: admitted, built without memory, read by one process, sharded over all."""

import sys
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
)
from transformers.utils.logging import (
    disable_progress_bar,
    set_tqdm_hook,
)

from rl2 import progress
from rl2.attention.kernels import NO_SOFTCAP_ON_GPUS
from rl2.attention.ring import Ring, keep_attention
from rl2.config.conditions import Exactness
from rl2.model import lora
from rl2.model.admission import admit
from rl2.model.attachment import Attachment, ModelSettings
from rl2.model.attachments import attach_all
from rl2.model.classes import idle_parts, language_model_class
from rl2.model.lora import LoraSettings
from rl2.model.nf4 import nf4_layers, quantize
from rl2.model.token_model import TokenModel
from rl2.model.weight_files import lost_weights, read_weights, without_quantization
from rl2.parallel import fsdp, tensor
from rl2.parallel.device import device_kind
from rl2.parallel.mesh import Mesh, broadcast_object
from rl2.parallel.rank import is_first_rank


class HuggingFaceFiles:
    """Where models come from: files in the format of Hugging Face, if rl2 can train the model."""

    def admit(self, name: str, config: PreTrainedConfig, critic: bool) -> None:
        """ValueError for a model that rl2 computes wrongly, see admission.py. All must call."""
        admit(name, config, critic)

    def read(
        self, model_class: Any, name: str, config: PreTrainedConfig, dtype: torch.dtype
    ) -> tuple[Any, set[str]]:
        """Returns the model in host memory, and the names of a critic's new weights.

        ValueError if the weights are not those of the model.
        """
        hf, new = read_weights(model_class, name, config, dtype)
        if lost := lost_weights(name, hf):
            print(f"{name}: transformers ignores {lost}; an export lacks them")
        return hf, new


FILES = HuggingFaceFiles()


def load_model(
    settings: ModelSettings,
    mesh: Mesh,
    exactness: Exactness = Exactness.OFF,
    source: HuggingFaceFiles = FILES,
    lora_settings: LoraSettings | None = None,
) -> TokenModel:
    """Loads a Hugging Face causal LM, or a critic (its body with a scalar head), over `mesh`.

    A trainable model keeps its parameters in fp32 and casts them to `settings.dtype` for compute; a
    frozen one keeps them in that dtype. `exactness` asks for the bits of the embedded engine's, see
    `TokenModel`.

    All processes must call. ValueError for a model that rl2 computes wrongly or cannot cut, and for
    weights that are incomplete.
    """
    name, trainable = settings.config.model_name, settings.trainable
    config, model_class = _read_class(name, settings.critic)
    _announce(name, config, trainable)
    if mesh.tp is not None:
        tensor.check_tp_size(name, config, mesh.tp.size())
    if device_kind(mesh.device) == "cuda":
        _check_softcap(name, config)
    source.admit(name, config, settings.critic)

    # Every process builds the model without memory, as it will be trained.
    parameter_dtype = torch.float32 if trainable and lora_settings is None else settings.dtype
    with init_empty_weights(include_buffers=False):
        plain_config = without_quantization(config)
        hf = model_class.from_config(plain_config, attn_implementation="rl2", dtype=parameter_dtype)
        lora.inject(hf, lora_settings)
        lora.quantize_base(hf, lora_settings)
    attachments = attach_all(settings, hf)
    quantized = _find_quantized(name, hf)
    hf.tie_weights()  # meta parameters lose their ties

    # The first process reads the weights, before the model is cut: a problem ends all of them here.
    read = partial(source.read, model_class, name, config, parameter_dtype)
    full = _read_whole(read, attachments, lora_settings)

    # Tensor parallelism cuts the model, then FSDP. Each process gets its part of every weight.
    tp_group = None
    if mesh.tp is not None:
        tensor.parallelize(hf, mesh.tp)
        tp_group = mesh.tp.get_group()
    reachable = _reachable_exactness(exactness, mesh.device, trainable)
    model = TokenModel(
        hf,
        Ring(mesh.sp),
        tp=tp_group,
        head_dtype=getattr(torch, settings.config.head_dtype),
        exactness=reachable,
        attachments=attachments,
    )
    fsdp.shard(
        model,
        mesh,
        settings.dtype if trainable else None,
        trainable and settings.config.gradient_checkpointing,
        recompute_context=keep_attention,
        idle=[part for _, part in idle_parts(hf)],
    )
    changes = [part.change for part in attachments]
    if quantized:
        changes.append(partial(_quantize_some, quantized))
    fsdp.scatter(model, full, mesh, changes)
    for part in attachments:
        part.after_shard(model)
    return model


def check_adapters(name: str, critic: bool, settings: LoraSettings | None) -> None:
    """ValueError if the model `name` cannot have these adapters. Only its config is read."""
    config, model_class = _read_class(name, critic)
    with init_empty_weights():
        hf = model_class.from_config(without_quantization(config))
        lora.inject(hf, settings)
        lora.quantize_base(hf, settings)


def _read_class(name: str, critic: bool) -> tuple[PreTrainedConfig, Any]:
    """(the config of the model `name`, the class that loads it; a critic has one label)."""
    labels = {"num_labels": 1} if critic else {}
    config = AutoConfig.from_pretrained(name, **labels)
    return config, AutoModelForSequenceClassification if critic else language_model_class(config)


def _find_quantized(name: str, hf: Any) -> set[str]:
    """The names of the weights that are stored in 4 bits. The first process prints their number."""
    quantized = {f"{layer}.weight" for layer in nf4_layers(hf)}
    if quantized and is_first_rank():
        print(
            f"{name}: {len(quantized)} linear layers of the base are stored in nf4; engines and "
            "exports get the dequantised weights, with the adapters merged in"
        )
    return quantized


def _reachable_exactness(exactness: Exactness, device: torch.device, trainable: bool) -> Exactness:
    """`exactness` as far as a model on this device can have it."""
    if device_kind(device) != "cpu":  # a GPU, or the device of a memory plan
        return Exactness.OFF
    if exactness.is_on and not trainable:  # a frozen model has other weights than the engine
        return Exactness.ASSUMED
    return exactness


def _read_whole(
    read: Callable[[], Any],
    attachments: Iterable[Attachment],
    lora_settings: LoraSettings | None,
) -> dict[str, Tensor] | None:
    """The whole weights on rank 0, which `read` reads; None on the others.

    A node then holds one full copy, not one for each process. ValueError on all processes if the
    weights cannot be used.
    """
    full = None
    problem = None
    if dist.get_rank() == 0:
        try:
            full_hf, new = read()
        except ValueError as error:
            problem = str(error)
        else:
            lora.inject(full_hf, lora_settings)
            lora.read_weights(full_hf, lora_settings)
            for part in attachments:
                part.after_read(full_hf)
            full = full_hf.state_dict()
            for key in new:
                full[key].zero_()  # a new critic starts from V = 0, not from noise
    problem = broadcast_object(problem)
    if problem is not None:
        raise ValueError(problem)
    return full


def _quantize_some(names: Collection[str], name: str, weight: Tensor) -> Tensor:
    """The bytes of a weight that is among `names`, or the weight itself."""
    return quantize(weight) if name in names else weight


def _check_softcap(name: str, config: PreTrainedConfig) -> None:
    """ValueError for a model that the kernels of a GPU cannot compute."""
    if getattr(config.get_text_config(), "attn_logit_softcapping", None):
        raise ValueError(f"{name} ({config.model_type}): {NO_SOFTCAP_ON_GPUS}")


def _announce(name: str, config: PreTrainedConfig, trainable: bool) -> None:
    """Says that the model is being loaded, and which dropout stays off, see TokenModel."""
    if dist.get_rank() > 0 or not sys.stderr.isatty():
        disable_progress_bar()  # that of transformers
    late = {"delay": progress.BAR_DELAY, "leave": False}
    set_tqdm_hook(lambda bar, args, options: bar(*args, **options | late))
    if dist.get_rank() > 0:
        return
    print(f"loading {name} ...")
    settings = []
    for key, value in vars(config).items():
        if "drop" in key and isinstance(value, int | float) and value > 0:
            settings.append(f"{key}={value}")
    if settings and trainable:
        print(
            f"{name}: dropout is off in training ({', '.join(settings)}), so that a token's "
            "log-probability is the same in every pass",
        )
