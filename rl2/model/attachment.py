"""The seam of a model's features: what attaches to a model, and when it is called."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rl2.attention.blocks import Layout
from rl2.batch import Pack
from rl2.config.schema import WorkerConfig

Read = Callable[[nn.Parameter], DTensor]


@dataclass(frozen=True)
class ModelSettings:
    """What a model is loaded for."""

    config: WorkerConfig
    """the worker's section; a frozen model may have one with the keys of `ModelConfig` alone"""
    dtype: torch.dtype
    """of the computation"""
    critic: bool = False
    """it has a scalar head instead of a language head"""
    trainable: bool = False

    @property
    def freezes_base(self) -> bool:
        """Whether only what is attached is trained, and a critic's head."""
        return self.trainable and self.config.lora_rank > 0

    @property
    def parameter_dtype(self) -> torch.dtype:
        """Of the parameters, but for adapters: those of a model that is trained whole are fp32."""
        all_in_fp32 = self.trainable and not self.freezes_base
        return torch.float32 if all_in_fp32 else self.dtype


class Attachment:
    """A feature that attaches to a model. It overrides what it needs; these methods do nothing.

    The first call of each method comes in the order in which they stand here. All processes make
    them, but for `after_read` and `change`.
    """

    repeats_prompts = False
    """a shared prompt runs once for each of its answers"""
    inexact: str | None = None
    """why the model cannot have the bits of the embedded engine, in words"""

    @classmethod
    def attach(cls, settings: ModelSettings, hf: PreTrainedModel) -> "Attachment | None":
        """Changes the model `hf`, which has no memory yet. None if it does not have the feature.

        ValueError if it cannot have it. It prints nothing, and reads no weights.
        """
        raise NotImplementedError

    def after_read(self, hf: PreTrainedModel) -> None:
        """On rank 0: `hf` is a second model, of the files, which `attach` has not seen.

        What `attach` has added has to be added here too: all weights are taken from this one.
        """

    def change(self, name: str, weight: Tensor) -> Tensor:
        """What is cut in the place of the whole weight `name`. On rank 0."""
        return weight

    def before_forward(self, pack: Pack, layout: Layout, num_tokens: int) -> None:
        """The model runs `pack`, padded to `num_tokens` tokens, next."""

    def in_update(
        self, run_forward: Callable[[], None], scale: float
    ) -> AbstractContextManager[dict[str, float]]:
        """The context of an update's backward passes, which gives what it reports.

        `run_forward` runs all micro-batches without a gradient. A gradient that is added is
        multiplied by `scale`, as that of the loss is.
        """
        return nullcontext({})

    def at_start(self, hf: PreTrainedModel) -> AbstractContextManager[None]:
        """A context in which the model is the one that training began with."""
        return nullcontext()

    def iter_exported(
        self, hf: PreTrainedModel, read: Read
    ) -> Iterator[tuple[str, DTensor]] | None:
        """The parameters that are exported, by name, if they are not those of `hf`."""
        return None

    def save(self, hf: PreTrainedModel, folder: str, read: Read) -> None:
        """The model has been written to `folder`. `read` gives a parameter on the device."""
