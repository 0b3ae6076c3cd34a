"""Layers that torch.compile compiles whole, for any number of tokens; attention is an operator."""

import torch
from transformers import PreTrainedModel

from rl2.model.attachment import Attachment, ModelSettings
from rl2.parallel.fsdp import find_layers

# A class of layers is compiled with a gradient and without, for each model of the process, kind of
# attention, and weights that are trained or frozen. torch gives up after 8.
MOST_VARIANTS = 64


class CompiledLayers(Attachment):
    """The layers of a model with compile=true."""

    inexact = "has compiled layers, which round in other places"

    @classmethod
    def attach(cls, settings: ModelSettings, hf: PreTrainedModel) -> "CompiledLayers | None":
        config = settings.config
        if not config.compile:
            return None
        if config.tp_size > 1:  # torch.compile loses the gradient of an AsyncCollectiveTensor
            raise ValueError(
                f"compile=true does not work with tp_size={config.tp_size}: set compile=false or "
                "tp_size=1"
            )
        torch._dynamo.config.recompile_limit = MOST_VARIANTS
        for layer in find_layers(hf):  # within checkpoint and FSDP's hooks
            layer.forward = torch.compile(layer.forward, dynamic=True)
        return cls()
