"""The disk space that a run will need, compared with the free space before the first step.

A prediction: the sizes of checkpoints and of the final model follow from the models' parameters.
Transcripts are not counted.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl2.parallel.device import GIB


@dataclass(frozen=True)
class SpaceNeeds:
    """What a run will write, in bytes and in numbers of checkpoints."""

    checkpoint: int  # bytes of each
    model: int  # bytes of model/
    num_checkpoints: int  # that the run will write
    num_kept: int | None  # the newest ones, besides which a new one is written; None: all
    num_there: int = 0  # that the folder has already
    keeps_best: bool = False  # one more checkpoint and best_model/

    @property
    def least(self) -> int:
        """Bytes without which the run cannot end well."""
        return self.num_models * self.model + min(1, self.num_checkpoints) * self.checkpoint

    @property
    def most(self) -> int:
        """Bytes at the fullest moment, in addition to what the folder has."""
        num_new = self.num_checkpoints
        if self.num_kept is not None:
            num_kept = self.num_kept + self.keeps_best
            num_new = min(num_new, max(1, num_kept + 1 - self.num_there))
        return self.num_models * self.model + num_new * self.checkpoint

    @property
    def num_models(self) -> int:
        """model/, and with `keeps_best` best_model/ and its replacement."""
        return 3 if self.keeps_best else 1


def measure(parts: dict[str, Any], exported: Any, **numbers: Any) -> SpaceNeeds:
    """The needs of a run with these parts, as `Checkpoints.save` takes them.

    `exported` is the worker that becomes model/. `numbers` are the other fields of SpaceNeeds.
    """
    checkpoint = 0
    for part in parts.values():
        if not hasattr(part, "trained_parameters"):
            continue  # the position in the data
        parameters = part.trained_parameters or dict(part.model.named_parameters())
        saved = list(parameters.values())
        if part.optimizer is not None:
            saved += part.optimizer.state_dict().values()
        checkpoint += sum(tensor.numel() * tensor.element_size() for tensor in saved)
    num_weights = sum(p.numel() for p in exported.model.parameters())
    return SpaceNeeds(checkpoint, num_weights * exported.dtype.itemsize, **numbers)


def check_space(folder: Path, needs: SpaceNeeds) -> list[str]:
    """A warning if `folder` may become full. ValueError if there is no room for what must be there.

    What must be there is one checkpoint, if any is written, and model/.
    """
    free = shutil.disk_usage(folder).free
    model = f"{show(needs.model)} for model/"
    if needs.keeps_best:
        model += " and as much for best_model/ (twice while it is replaced, trainer.save_best)"
    remedy = f"{show(free)} are free in {folder.absolute()}: free some, or choose another "
    remedy += "trainer.save_dir"
    if free < needs.least:
        parts = model
        if needs.num_checkpoints:
            parts = f"{show(needs.checkpoint)} for a checkpoint and {model}"
        raise ValueError(f"the disk is too full: this run needs {parts}, and {remedy}")
    if free < needs.most:
        fewer = "a larger trainer.save_freq"
        if needs.num_kept is None or needs.num_kept > 1:
            fewer = "a smaller trainer.keep_checkpoints"
        return [
            f"warning: the disk will be full before the end: checkpoints of "
            f"{show(needs.checkpoint)} each and {model} need {show(needs.most)}, and {remedy}, or "
            f"set {fewer}"
        ]
    return []


def describe(needs: SpaceNeeds) -> str:
    """Says how large what the run saves will be."""
    return f"each checkpoint takes {show(needs.checkpoint)}, model/ {show(needs.model)}"


def show(num_bytes: int) -> str:
    """A size as people read it."""
    if num_bytes < GIB / 10:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / GIB:.1f} GiB"
