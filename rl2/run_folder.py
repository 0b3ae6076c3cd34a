"""Checkpoints that are whole or absent, exact resume, and a stop that saves."""

import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from rl2.parallel.mesh import all_gather_objects, is_single_process


class Checkpoints:
    """`folder`/step_N holds everything the run needs to go on after step N. Several nodes need a shared folder.

    A checkpoint is written under another name and renamed when every process has finished and the disk has it: what is
    called step_N is whole, whenever the run was killed. The newest `keep` stay (None = all).
    """

    def __init__(self, folder: str | os.PathLike, keep: int | None = None):
        self.folder, self.keep = Path(folder), keep

    def steps(self) -> list[int]:
        """The steps that can be resumed, oldest first."""
        return sorted(
            int(path.name[5:]) for path in self.folder.glob("step_*") if path.name[5:].isdigit()
        )

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step}"

    def save(self, step: int, held: dict, config: str) -> None:
        """Writes the state_dict of all that is held (name -> Worker or the like) after `step` steps. All processes must
        call; what is no sharded tensor must be the same on each."""
        partial = self.folder / f"step_{step}.partial"
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        try:
            dcp.save(
                {name: part.state_dict() for name, part in held.items()},
                checkpoint_id=partial,
                no_dist=is_single_process(),
            )
        except CheckpointException as error:
            reason, _ = next(iter(error.failures.values()))
            whole = (
                f"step_{self.steps()[-1]} is the newest whole one"
                if self.steps()
                else "there is no other yet"
            )
            raise RuntimeError(
                f"the checkpoint of step {step} could not be written: {reason}; {whole}"
            ) from error
        torch.save(_random_states(), partial / f"random_{dist.get_rank()}.pt")
        dist.barrier()
        if dist.get_rank() == 0:
            (partial / "config.yaml").write_text(config)
            (partial / "run.json").write_text(
                json.dumps({"step": step, "world_size": dist.get_world_size()})
            )
            _sync(partial)
            shutil.rmtree(self.path(step), ignore_errors=True)
            partial.rename(self.path(step))
            _sync(self.folder)
            for old in self.steps()[: -self.keep] if self.keep else []:
                shutil.rmtree(self.path(old))
        dist.barrier()

    def load(self, path: str | os.PathLike, held: dict) -> int:
        """Restores what is held and the random states from a step_N folder; returns its step. The number of processes may
        differ from the one that saved: then each process keeps its own random states."""
        path = Path(path)
        run = json.loads((path / "run.json").read_text())
        state = {name: part.state_dict() for name, part in held.items()}
        dcp.load(state, checkpoint_id=path, no_dist=is_single_process())
        for name, part in held.items():
            part.load_state_dict(state[name])
        if run["world_size"] == dist.get_world_size():
            _set_random_states(
                torch.load(path / f"random_{dist.get_rank()}.pt", weights_only=False)
            )
        return run["step"]


def find_checkpoint(resume: str, folder: str | os.PathLike) -> Path | None:
    """The step_N folder that `trainer.resume` means (auto, off, or a step_N folder or one that holds some)."""
    if resume == "off":
        return None
    given = None if resume == "auto" else Path(resume)
    if given is not None and given.suffix != ".partial" and (given / "run.json").exists():
        return given
    places = [Path(folder)] if given is None else [given, given / "checkpoints"]
    for place in map(Checkpoints, places):
        if place.steps():
            return place.path(place.steps()[-1])
    if given is not None:
        raise ValueError(
            f"trainer.resume={resume}: no complete checkpoint (step_N) there; give a step_N folder, auto or off"
        )
    return None


def _random_states():
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": cuda,
    }


def _set_random_states(states):
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def _sync(folder):
    """Waits until the disk has every file of the folder, and the folder's own list of them."""
    for path in [*folder.iterdir(), folder]:
        if path.is_file() or path == folder:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def assert_same_everywhere(value) -> None:
    """Every process must hold the same value: a layout or a data set that differs between nodes would deadlock later."""
    values = all_gather_objects(value)
    if any(other != values[0] for other in values):
        raise ValueError(
            f"processes disagree: {values}; do all nodes see the same files and arguments?"
        )
