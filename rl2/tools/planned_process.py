"""This process as the first one of a job on GPUs without memory, and models without values.

FSDP takes the device of a mesh from its name, so a function of torch is replaced meanwhile: torch
has no other way to reach it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from torch.distributed.fsdp._fully_shard import _fully_shard as fsdp
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedConfig

from rl2.model.load import HuggingFaceFiles
from rl2.parallel.device import PLANNED_DEVICE
from rl2.parallel.planned_device import PlannedDevice, replaced


class ModelsWithoutValues(HuggingFaceFiles):
    """Makes models with weights that have shapes and no values. It admits every model."""

    def __init__(self, device: PlannedDevice):
        self.device = device

    def admit(self, name: str, config: PreTrainedConfig, critic: bool) -> None:
        """Admits every model."""

    def read(
        self, model_class: Any, name: str, config: PreTrainedConfig, dtype: torch.dtype
    ) -> tuple[Any, set[str]]:
        """Makes the model from its config, in fake host memory."""
        with init_empty_weights(include_buffers=False):
            hf = model_class.from_config(config, dtype=dtype)
        with self.device.fake:
            return hf.to_empty(device="cpu"), set()


@contextmanager
def planned_process(num_gpus: int) -> Iterator[PlannedDevice]:
    """Makes this process rank 0 of `num_gpus` on a device without memory, in a context."""
    dist.init_process_group("fake", rank=0, world_size=num_gpus, store=FakeStore())
    try:
        with (
            replaced(fsdp, "_get_device_from_mesh", lambda mesh: PLANNED_DEVICE),
            PlannedDevice() as device,
        ):
            yield device
    finally:
        dist.destroy_process_group()
