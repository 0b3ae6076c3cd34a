"""The folder of a run on disk: made ready, and checkpoints that are whole or absent."""

import json
import os
import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from rl2.parallel.mesh import is_single_process


class Resumable(Protocol):
    """A part of the run whose state is in the checkpoint, such as a worker."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


Parts = dict[str, Resumable]  # by name


class Checkpoints:
    """`folder`/step_N holds everything that the run needs to go on after step N.

    A checkpoint is written under another name. It is renamed when every process has finished and
    the disk has it: a folder called step_N is whole, whenever the run was killed. The newest `keep`
    stay (None = all). Several nodes need a folder that all of them see.
    """

    def __init__(self, folder: str | os.PathLike, keep: int | None = None):
        self.folder = Path(folder)
        self.keep = keep

    def steps(self) -> list[int]:
        """The steps that can be resumed, oldest first."""
        names = [path.name.removeprefix("step_") for path in self.folder.glob("step_*")]
        return sorted(int(name) for name in names if name.isdigit())

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step}"

    def save(self, step: int, parts: Parts, config: str) -> None:
        """Writes the state of all parts after `step` steps, with the config as YAML.

        All processes must call. What is no sharded tensor must be the same on each of them.
        RuntimeError if it could not be written; the checkpoints before it stay.
        """
        partial = self.folder / f"step_{step}.partial"
        is_first = dist.get_rank() == 0
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        self._write_parts(step, parts, partial)
        torch.save(_random_states(), partial / f"random_{dist.get_rank()}.pt")
        dist.barrier()
        if is_first:
            run = {"step": step, "world_size": dist.get_world_size()}
            (partial / "config.yaml").write_text(config)
            (partial / "run.json").write_text(json.dumps(run))
            _sync_to_disk(partial)
            shutil.rmtree(self.path(step), ignore_errors=True)
            partial.rename(self.path(step))
            _sync_to_disk(self.folder)
            for old_step in self.steps()[: -self.keep] if self.keep else []:
                shutil.rmtree(self.path(old_step))
        dist.barrier()

    def _write_parts(self, step: int, parts: Parts, folder: Path) -> None:
        states = {name: part.state_dict() for name, part in parts.items()}
        try:
            dcp.save(states, checkpoint_id=folder, no_dist=is_single_process())
        except CheckpointException as error:
            reason, _ = next(iter(error.failures.values()))
            newest = "there is no other yet"
            if self.steps():
                newest = f"step_{self.steps()[-1]} is the newest whole one"
            raise RuntimeError(
                f"the checkpoint of step {step} could not be written: {reason}; {newest}"
            ) from error

    def load(self, path: str | os.PathLike, parts: Parts) -> int:
        """Restores all parts and the random states from a step_N folder. Returns its step.

        The number of processes may differ from the one that saved. Then each process keeps its own
        random states.
        """
        path = Path(path)
        run = json.loads((path / "run.json").read_text())
        states = {name: part.state_dict() for name, part in parts.items()}
        dcp.load(states, checkpoint_id=path, no_dist=is_single_process())
        for name, part in parts.items():
            part.load_state_dict(states[name])
        if run["world_size"] == dist.get_world_size():
            random_file = path / f"random_{dist.get_rank()}.pt"
            _set_random_states(torch.load(random_file, weights_only=False))
        return run["step"]


def find_checkpoint(resume: str, folder: str | os.PathLike) -> Path | None:
    """The step_N folder that `trainer.resume` names; None to start anew.

    `resume` is auto (the newest in `folder`, if any), off, a step_N folder, or a folder that holds
    some. ValueError if a folder is named that holds no complete checkpoint.
    """
    if resume == "off":
        return None
    if resume == "auto":
        return _newest_checkpoint(Path(folder))
    named = Path(resume)
    if named.suffix != ".partial" and (named / "run.json").exists():
        return named
    newest = _newest_checkpoint(named) or _newest_checkpoint(named / "checkpoints")
    if newest is None:
        raise ValueError(
            f"trainer.resume={resume}: no complete checkpoint (step_N) there; "
            "give a step_N folder, auto or off"
        )
    return newest


def _newest_checkpoint(folder: Path) -> Path | None:
    checkpoints = Checkpoints(folder)
    steps = checkpoints.steps()
    return checkpoints.path(steps[-1]) if steps else None


def prepare_folder(folder: str | os.PathLike, step: int) -> None:
    """Makes the run folder ready to go on after `step` steps.

    Metrics and transcripts of later steps are removed, since they will be made again. A folder with
    an earlier run that is not resumed is kept under another name.
    """
    folder = Path(folder)
    metrics = folder / "metrics.jsonl"
    if step == 0 and metrics.exists() and metrics.stat().st_size:
        set_aside = _free_name(folder)
        folder.rename(set_aside)
        print(
            f"{folder} held an earlier run without a checkpoint to resume: "
            f"it is now {set_aside.name}",
            flush=True,
        )
    folder.mkdir(parents=True, exist_ok=True)
    if metrics.exists():
        _cut_metrics(metrics, step)
    for path in folder.glob("rollouts/*/step_*.jsonl"):
        if int(path.stem.removeprefix("step_")) > step:
            path.unlink()


def _free_name(folder: Path) -> Path:
    number = 1
    while folder.with_name(f"{folder.name}.{number}").exists():
        number += 1
    return folder.with_name(f"{folder.name}.{number}")


def _cut_metrics(path: Path, step: int) -> None:
    """Removes the lines of steps after `step`, and a line that a kill cut short."""
    kept = []
    for line in path.read_text().splitlines():
        try:
            is_kept = json.loads(line)["step"] <= step
        except json.JSONDecodeError:
            is_kept = False
        if is_kept:
            kept.append(line + "\n")
    partial = path.with_suffix(".partial")
    partial.write_text("".join(kept))
    partial.replace(path)


def write_records(
    folder: str | os.PathLike, split: str, step: int, records: Iterable[dict[str, Any]]
) -> None:
    """Writes the transcripts of a step to rollouts/`split`/step_N.jsonl, on the first process."""
    if dist.get_rank() > 0:
        return
    path = Path(folder, "rollouts", split, f"step_{step}.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record, ensure_ascii=False, default=str) for record in records]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


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


def _sync_to_disk(folder: Path) -> None:
    """Waits until the disk has every file of the folder, and the folder's own list of them."""
    for path in [*folder.iterdir(), folder]:
        if path.is_file() or path == folder:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
