"""Checkpoints of a run on disk: whole or absent."""

import math
import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful

from rl2.error_report import describe_failed_write
from rl2.parallel.mesh import is_single_process
from rl2.progress import expecting
from rl2.run.records import NO_STEP, step_of
from rl2.run.weights_hash import hash_states

SYNC_SECONDS = 600.0  # a disk may rightly take so long to store a file
# What reading or writing a checkpoint may raise. CheckpointException is not an Exception.
Failure = (Exception, CheckpointException)


@dataclass(frozen=True)
class Checkpoints:
    """`folder`/step_N holds everything that the run needs to continue after step N.

    A checkpoint is written under another name. It is renamed when every process has finished and
    the disk has it, and it is renamed again before it is deleted: a folder called step_N is whole,
    whenever the run was killed. Several nodes need a folder that all of them see.
    """

    folder: Path
    keep: int | None = None  # how many of the newest ones stay; None: all

    def steps(self) -> list[int]:
        """The steps that can be resumed, oldest first."""
        steps = [step_of(path) for path in self.folder.glob("step_*") if path.suffix == ""]
        return sorted(step for step in steps if step != NO_STEP)

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step}"

    def newest(self, before: float = math.inf) -> Path | None:
        """The folder of the newest checkpoint of a step below `before`; None if there is none."""
        steps = [step for step in self.steps() if step < before]
        return self.path(steps[-1]) if steps else None

    def save(self, step: int, objects: dict[str, Stateful], texts: dict[str, str]) -> None:
        """Writes the state of all objects after `step` steps, and `texts` as files by their names.

        All processes must call. What is not a sharded tensor must be the same on each of them.
        RuntimeError if one of them could not write; the checkpoints before it stay.
        """
        partial = self.folder / f"step_{step}.partial"
        try:
            dcp.save(objects, checkpoint_id=partial, no_dist=is_single_process())
            torch.save(_random_states(), partial / f"random_{dist.get_rank()}.pt")
            dist.barrier()  # all have written
            if dist.get_rank() == 0:
                for name, text in texts.items():
                    (partial / name).write_text(text)
                sync_to_disk(partial)
                put_in_place(partial, self.path(step))
                sync_to_disk(self.folder)
        except Failure as error:
            if dist.get_rank() == 0:  # which may still write there when another one fails
                shutil.rmtree(partial, ignore_errors=True)
            newest = self.newest()
            remains = f"{newest} is the newest whole one" if newest else "there is no other yet"
            failed = describe_failed_write(self.path(step))
            reason = describe_failure(error)
            raise RuntimeError(f"the checkpoint {failed}: {reason}; {remains}") from error
        dist.barrier()

    def prune(self, proven_step: float = math.inf, best_step: int = NO_STEP) -> None:
        """Deletes all but the `keep` newest ones, the newest one of a step below `proven_step`, and
        that of `best_step`.

        The weights below `proven_step` are known to be good: a later update had a finite gradient.
        """
        steps = self.steps()
        proven = [step for step in steps if step < proven_step][-1:]
        for step in steps[: -self.keep] if self.keep else []:
            if step not in proven and step != best_step:
                delete(self.path(step))

    def load(
        self,
        path: Path,
        objects: dict[str, Stateful],
        saved_by: int,
        hashes: dict[str, str],
    ) -> None:
        """Restores all objects from a step_N folder, and the random states.

        `saved_by` processes wrote it. If there are more or fewer now, each process keeps its own
        random states. `hashes` are those that `hash_states` gave of what was saved. RuntimeError if
        the checkpoint is damaged, or of another model.
        """
        states = {name: item.state_dict() for name, item in objects.items()}
        try:
            saved = FileSystemReader(path).read_metadata().state_dict_metadata
            dcp.load(states, checkpoint_id=path, no_dist=is_single_process())
        except Failure as error:
            raise RuntimeError(explain_damage(path, describe_failure(error))) from error
        # It may hold further objects, and saved rollouts ask for less of the data's position. But
        # of a model all weights are read.
        unread = saved.keys() - flatten_state_dict(states)[0].keys()
        for key in sorted(unread):
            if key.startswith(tuple(f"{name}.model." for name in objects)):
                raise RuntimeError(explain_damage(path, f"this run has no {key}"))
        skipped = {key.partition(".")[0] for key in unread}
        for name, loaded in hash_states(objects, states).items():
            expected = hashes.get(name, loaded)
            if loaded != expected and name not in skipped:
                reason = f"its {name} has the hash {loaded} and was saved with {expected}"
                raise RuntimeError(explain_damage(path, reason))
        try:
            for name, item in objects.items():
                item.load_state_dict(states[name])
            if saved_by == dist.get_world_size():
                random_file = path / f"random_{dist.get_rank()}.pt"
                _set_random_states(torch.load(random_file, weights_only=False))
        except Failure as error:
            raise RuntimeError(explain_damage(path, describe_failure(error))) from error


def export_optimizer(optimizer: Stateful, folder: str) -> None:
    """Writes the optimizer's state to `folder`/optimizer. All processes must call."""
    objects: dict[str, Stateful] = {"optimizer": optimizer}
    dcp.save(objects, checkpoint_id=f"{folder}/optimizer", no_dist=is_single_process())


def import_optimizer(optimizer: Stateful, folder: str) -> None:
    """Reads what `export_optimizer` wrote to `folder`; `folder` may also be that sub-folder itself.
    All processes must call. ValueError if it is the state of another optimizer or model.
    """
    if Path(folder, "optimizer").is_dir():
        folder = f"{folder}/optimizer"
    objects: dict[str, Stateful] = {"optimizer": optimizer}
    try:
        dcp.load(objects, checkpoint_id=folder, no_dist=is_single_process())
    except Failure as error:
        raise ValueError(
            f"optimizer_dir={folder} has not the state of this optimizer and model: "
            f"{describe_failure(error)}; leave the key out, or choose the optimizer that wrote it"
        ) from error


def explain_damage(path: Path, reason: str) -> str:
    """Says what is wrong with the checkpoint, and which one comes before it."""
    earlier = Checkpoints(path.parent).newest(before=step_of(path))
    remedy = "trainer.resume=off starts over"
    if earlier:
        remedy = f"trainer.resume={earlier} resumes from the one before"
    return (
        f"the checkpoint {path} is damaged: {reason} (or is it of another model, or version of "
        f"rl2?); {remedy}"
    )


def describe_failure(error: BaseException) -> str:
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    lines = str(error).splitlines() or ["no reason given"]
    return f"{type(error).__name__}: {lines[0]}"


# Folders that are whole or absent.


def put_in_place(written: Path, target: Path) -> None:
    """Renames a finished folder to `target`, in the place of an older one, which is deleted.

    A kill between the two renames leaves no `target`: a resumed run exports what is missing.
    """
    older = target.with_name(f"{target.name}.deleting")
    if target.exists():
        target.rename(older)
    written.rename(target)
    shutil.rmtree(older, ignore_errors=True)


def delete(folder: Path) -> None:
    """Deletes a folder. It loses its name first, so half of it is never taken for the whole."""
    nameless = folder.with_name(f"{folder.name}.deleting")
    folder.rename(nameless)
    shutil.rmtree(nameless)


def sweep(folder: Path, name: str) -> None:
    """Deletes what a kill left of the entries of `folder` whose names begin with `name`."""
    for ending in (".partial", ".deleting"):
        for path in folder.glob(f"{name}*{ending}"):
            shutil.rmtree(path)


def sync_to_disk(folder: Path) -> None:
    """Waits until the disk has every file of the folder, and the folder's own list of them."""
    with expecting(SYNC_SECONDS):
        files = [path for path in folder.iterdir() if path.is_file()]
        for path in files + [folder]:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def _random_states() -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": cuda,
    }


def _set_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
