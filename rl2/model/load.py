"""How a model is loaded: admitted, built without memory, read by one process, sharded over all."""

import sys
from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils.logging import (
    disable_progress_bar,
    set_tqdm_hook,
)

from rl2 import progress
from rl2.attention.ring import Ring, keep_attention
from rl2.config.conditions import Exactness
from rl2.model.admission import admit
from rl2.model.attachment import Attachment, ModelSettings
from rl2.model.classes import AutoClass, idle_parts, language_model_class
from rl2.model.features import attach_all
from rl2.model.token_model import TokenModel
from rl2.model.weight_files import lost_weights, read_weights, without_quantization
from rl2.parallel import fsdp, tensor
from rl2.parallel.device import device_kind
from rl2.parallel.mesh import Mesh, broadcast_object, is_single_process
from rl2.parallel.whole import WholeWeights


class HuggingFaceFiles:
    """Where models come from: files in the format of Hugging Face, if rl2 can train the model."""

    def admit(self, name: str, config: PreTrainedConfig, critic: bool) -> None:
        """ValueError for a model that rl2 computes wrongly, see admission.py. All must call."""
        admit(name, config, critic)

    def read(
        self, model_class: AutoClass, name: str, config: PreTrainedConfig, dtype: torch.dtype
    ) -> tuple[PreTrainedModel, set[str]]:
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
) -> tuple[TokenModel, fsdp.ShardedWeights | WholeWeights]:
    """Loads a Hugging Face causal LM, or a critic (its body with a scalar head), over `mesh`.

    Returns it with what makes its weights ready for passes.

    A model that is trained whole keeps its parameters in fp32 and casts them to `settings.dtype`
    for compute. A frozen one, and the base of adapters, keep them in that dtype. What else differs
    is in the attachments (features.py). `exactness` asks for the bits of the embedded engine's, see
    `TokenModel`. `source` is where models and weights come from, other than files in a memory plan.

    All processes must call. ValueError for a model that rl2 computes wrongly or cannot cut, and for
    weights that are incomplete.
    """
    name, trainable = settings.config.model_name, settings.trainable
    model_class, config = read_config(settings)
    _announce(name, config, trainable)
    if mesh.tp is not None:
        tensor.check_tp_size(name, config, mesh.tp.size())
    source.admit(name, config, settings.critic)

    # Every process builds the model without memory. The first process reads the weights, before the
    # model is cut: a problem ends all of them here.
    hf, attachments = empty_model(settings, model_class, config)
    read = partial(source.read, model_class, name, config, settings.parameter_dtype)
    full = _read_whole(read, attachments)

    # Tensor parallelism cuts the model, then FSDP. Each process gets its part of every weight.
    tp_group = None
    if mesh.tp is not None:
        tensor.parallelize(hf, mesh.tp)
        tp_group = mesh.tp.get_group()
    if device_kind(mesh.device) != "cpu":  # a GPU, or the device of a memory plan
        exactness = Exactness.OFF
    elif exactness.is_on and not trainable:  # a frozen model has other weights than the engine
        exactness = Exactness.ASSUMED
    model = TokenModel(
        hf,
        Ring(mesh.sp),
        tp=tp_group,
        exactness=exactness,
        attachments=attachments,
    )
    idle = idle_parts(hf)
    compute_dtype = settings.dtype if trainable else None
    recomputed = settings.config.gradient_checkpointing if trainable else False
    keep_gathered = settings.config.keep_gathered if trainable else False
    assert not isinstance(recomputed, str), "gpu_memory.py puts a number in the place of auto"
    if isinstance(keep_gathered, str):  # auto
        keep_gathered = is_single_process()
    fsdp.shard(
        model,
        mesh,
        compute_dtype,
        recomputed,
        contexts=keep_attention,
        idle=idle,
        keep_gathered=keep_gathered,
    )
    fsdp.scatter(model, full, mesh, [part.change for part in attachments])
    if isinstance(model, FSDPModule):
        return model, fsdp.ShardedWeights(model, keep_gathered)
    return model, WholeWeights(model, compute_dtype, idle)


def read_config(settings: ModelSettings) -> tuple[AutoClass, PreTrainedConfig]:
    """Returns the class of transformers that makes the model, and the config of the model."""
    config = AutoConfig.from_pretrained(settings.config.model_name)
    if settings.critic:
        config.num_labels = 1
        return AutoModelForSequenceClassification, config
    return language_model_class(config), config


def empty_model(
    settings: ModelSettings, model_class: AutoClass, config: PreTrainedConfig
) -> tuple[PreTrainedModel, list[Attachment]]:
    """The model without memory, as it will be trained, with rl2's attention; what is attached."""
    with init_empty_weights(include_buffers=False):
        plain = without_quantization(config)
        hf = model_class.from_config(
            plain, attn_implementation="rl2", dtype=settings.parameter_dtype
        )
    attachments = attach_all(settings, hf)
    hf.tie_weights()  # meta parameters lose their ties
    return hf, attachments


def _read_whole(
    read: Callable[[], tuple[PreTrainedModel, set[str]]], attachments: Iterable[Attachment]
) -> dict[str, Tensor] | None:
    """The whole weights on rank 0, which `read` reads; None on the others.

    So one process holds a full copy, not each. ValueError on all processes if the weights cannot be
    used.
    """
    full = None
    problem = None
    if dist.get_rank() == 0:
        try:
            hf, new = read()
            for part in attachments:
                part.after_read(hf)
            full = hf.state_dict()
            for key in new:
                full[key].zero_()  # a new critic starts from V = 0, not from noise
        except ValueError as error:
            problem = str(error)
    problem = broadcast_object(problem)
    if problem is not None:
        raise ValueError(problem)
    return full


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
    for key, value in vars(config.get_text_config()).items():
        if "drop" in key and isinstance(value, int | float) and value > 0:
            settings.append(f"{key}={value}")
    if settings and trainable:
        print(
            f"{name}: dropout is off in training ({', '.join(settings)}), so that a token's "
            "log-probability is the same in every pass",
        )
