"""The folder of a run: what is in it, what a launch sets aside, and what it writes."""

import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import save_file

from rl2.config.conditions import count_samplers
from rl2.config.schema import RolloutWorkerConfig, dump, worker_names
from rl2.error_report import writing
from rl2.parallel.mesh import all_gather_objects
from rl2.parallel.rank import is_first_rank
from rl2.run.best import Best, start_best
from rl2.run.changes import RunIdentity, find_ignored_changes
from rl2.run.checkpoints import NO_STEP, Checkpoints, Parts, put_in_place, step_of
from rl2.run.provenance import (
    describe_commit,
    describe_cpu,
    hash_package,
    name_launch,
    versions,
)
from rl2.run.records import MetricsFile, write_object, write_text
from rl2.run.start import BEST_MODEL, Claim, Start, model_step, read_record
from rl2.run.weights_hash import hash_states

SECONDS_TO_SEE_A_FILE = 15.0  # that another node has written
EVERYTHING = -1  # the step after which all of an earlier run is set aside


@dataclass(frozen=True)
class Rank:
    """What a process tells the others about the run that it starts."""

    host: str
    launch: str
    facts: dict[str, str]  # what must be the same on all ranks
    lock: tuple[Path, str] | None  # of rank 0: the file of its lock, and the text of it
    start: Start | None  # of rank 0


class AllStepsDone(SystemExit):
    """All steps of the run were done before this launch."""


class RunFolder:
    """The folder of one run, on which all ranks agree. `start` says where the run starts."""

    def __init__(self, config: Any, claim: Claim):
        """Compares the ranks: they need the same folder, config, data and code.

        All processes must call. ValueError names the ranks that differ from rank 0.
        """
        trainer = config.trainer
        self.config = config
        self.path = Path(trainer.save_dir)
        self.checkpoints = Checkpoints(self.path / "checkpoints", trainer.keep_checkpoints)
        self.identity = claim.identity
        self.lock = claim.lock  # held as long as this object lives
        self.is_first = is_first_rank()
        rank = Rank(
            host=socket.gethostname(),
            launch=name_launch(),
            facts=_list_facts(claim.identity),
            lock=(claim.lock.path, claim.lock.path.read_text()) if claim.lock else None,
            start=claim.start,
        )
        ranks: list[Rank] = all_gather_objects(rank)
        self.hosts = list(dict.fromkeys(other.host for other in ranks))
        # All nodes count, since another one may have the first rank after a restart.
        self.launches = list(dict.fromkeys(other.launch for other in ranks))
        gathered = all_gather_objects(_find_differences(rank, ranks[0], self.path))
        problems = [problem for of_rank in gathered for problem in of_rank]
        if problems:
            raise ValueError("\n".join(problems))
        assert ranks[0].start is not None
        self.start = ranks[0].start
        self.best = start_best(config, self.start.best)
        if self.best and self.best.step not in (0, self.start.step, self.start.best_model_step):
            # The run returns to an old checkpoint, and a later best one has replaced best_model/.
            self.best = Best(self.best.metric, last_step=self.best.last_step)

    # The length of the run.

    def count_steps(self, num_rows: int, batch_size: int) -> int:
        """Returns the number of the last step. Rows that are done are not counted again."""
        trainer = self.config.trainer
        left = trainer.n_epochs * num_rows - self.start.rows
        num_steps = self.start.step + max(left // batch_size, 0)
        if self.start.checkpoint is None:
            num_steps = max(1, num_steps)
        num_steps = min(num_steps, trainer.max_steps or num_steps)
        if self.start.is_exhausted or self.has_lost_patience:
            num_steps = self.start.step
        elif self.is_first and self.start.num_steps not in (0, num_steps):
            schedule = "the learning rate's schedule ends there"
            print(f"changed: {self.start.num_steps} -> {num_steps} steps; {schedule}")
        return num_steps

    def end_if_done(self, num_steps: int) -> None:
        """Ends the program by `AllStepsDone` if all steps are done, and says how to continue.

        ValueError if the config has changed, since the changes would have no effect.
        """
        start = self.start
        if start.checkpoint is None or start.step < num_steps:
            return
        if not start.is_exported or start.owes_test:
            return
        self._refuse_changes()
        if self.is_first:
            remedy = "raise trainer.n_epochs or trainer.max_steps"
            if start.is_exhausted:
                remedy = "give other rows, or rollout.drop_solved=null, since all are solved"
            elif self.has_lost_patience:
                remedy = "raise trainer.patience, which ended the run, or set it to null"
            print(
                f"{self.path}: all steps are done (the newest checkpoint is of step "
                f"{start.step}), and model/ is there. To continue, {remedy}; "
                "trainer.resume=off starts over and sets this run aside.",
            )
        dist.destroy_process_group()
        raise AllStepsDone(0)

    def _refuse_changes(self) -> None:
        """ValueError if a finished run was started again with other settings, as in a sweep."""
        ignored = find_ignored_changes(self.start.changes)
        if ignored:
            listed = "".join(f"\n  - {change}" for change in ignored)
            raise ValueError(
                f"{self.path}: all {self.start.step} steps are done, so these changes would have "
                f"no effect:{listed}\n"
                "trainer.experiment_name=NAME trains with them in a folder of its own; "
                "trainer.resume=off starts over here and sets this run aside; a larger "
                "trainer.n_epochs or trainer.max_steps continues this run with them"
            )

    def count_updates(self, name: str, step: int) -> int:
        """Returns how many updates of a worker the steps until `step` are laid out for.

        Each step counts with the settings of the launch that does it. The learning rate's schedule
        has the number of all steps.
        """
        section = getattr(self.config, name)
        if not isinstance(section, RolloutWorkerConfig):
            return step
        done, first = 0, section.freeze_steps
        if name in self.start.updates:
            done, first = self.start.updates[name], max(first, self.start.step)
        return done + section.updates_per_step * max(0, step - first)

    # Resuming.

    def resume(self, parts: Parts, num_steps: int) -> None:
        """Restores the parts, and makes the folder ready for the next step.

        All processes must call. What belongs to later steps, or to another run, is set aside.
        """
        checkpoint = self.start.checkpoint
        if checkpoint:
            kept = dict(parts)
            if not self.start.keeps_data:
                del kept["data"]
            record = read_record(checkpoint)
            hashes = record.get("hashes", {})
            self.checkpoints.load(checkpoint, kept, record["world_size"], hashes)
        if self.is_first:
            self._set_aside(self.start.step if self.start.is_own else EVERYTHING)
            self._write_run_files(num_steps)
            if checkpoint:
                done = f"{self.start.step} of {num_steps} steps are done"
                print(f"resumed from {checkpoint}: {done}")
        dist.barrier()

    def _write_run_files(self, num_steps: int) -> None:
        start = {
            "time": time.strftime("%Y-%m-%d %H:%M:%S%z"),
            "step": self.start.step,
            "num_steps": num_steps,
            "command": sys.argv,
            "hosts": self.hosts,
            "world_size": dist.get_world_size() + count_samplers(self.config),
            "seed": self.config.trainer.seed,
            "versions": versions(),
            "commit": describe_commit(),
            "code": hash_package()[:16],
            "threads": torch.get_num_threads(),
            "cpu": describe_cpu(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "folder": os.getcwd(),
            "launches": self.launches,
        }
        record = read_record(self.path) if self.start.is_own else {}
        if not (self.path / BEST_MODEL).exists():  # it was set aside
            record.pop("best", None)
        record |= self._experiment_record()
        record.setdefault("starts", []).append(start)
        write_text(self.path / "config.yaml", dump(self.config))
        write_object(self.path / "run.json", record)

    def _experiment_record(self) -> dict[str, Any]:
        """Returns what a later launch compares itself with, beside config.yaml."""
        identity = {"trainer": self.identity.trainer, "contents": self.identity.contents}
        return {"identity": identity, "date": self.start.date}

    def _set_aside(self, step: int) -> None:
        """Moves what an earlier run made after `step` to branches/N. Nothing is deleted.

        Each entry is renamed for itself, so the folder may be a mount point. Checkpoints go first:
        after a kill in between, a run resumes from one that is still there.
        """
        later = self._entries_after(step)
        metrics = MetricsFile(self.path)
        lines = [] if step == EVERYTHING else metrics.read()
        later_lines = [line for line in lines if line["step"] > step]
        if later or later_lines:
            branch = self._new_branch()
            for source in later:
                target = branch / source.relative_to(self.path)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(source, target)
            if later_lines:
                MetricsFile(branch).replace(later_lines)
            entries = "the earlier run" if step == EVERYTHING else f"what came after step {step}"
            print(f"{entries} is now in {branch}")
        if metrics.path.exists():
            metrics.replace([line for line in lines if line["step"] <= step])

    def _entries_after(self, step: int) -> list[Path]:
        """Returns checkpoints, the newest first, the model and transcripts of later steps."""
        steps = self.checkpoints.steps()
        entries = [self.checkpoints.path(later) for later in reversed(steps) if later > step]
        if model_step(self.path) > step:
            entries.append(self.path / "model")
        is_later = step == EVERYTHING or self.start.best_model_step > step
        if is_later and (self.path / BEST_MODEL).exists():
            entries.append(self.path / BEST_MODEL)
        if step == EVERYTHING:  # a new run has a new name in the services that show it
            entries += [*self.path.glob("*_id"), *self.path.glob("tensorboard")]
            metrics = self.path / "metrics.jsonl"
            if metrics.exists() and metrics.stat().st_size > 0:
                entries.append(metrics)
        transcripts = self.path.glob("rollouts/*/step_*")
        return entries + [path for path in transcripts if step_of(path) > step]

    def _new_branch(self) -> Path:
        """Makes a folder branches/N, with copies of the files that say what the run was."""
        numbers = [int(path.name) for path in self.path.glob("branches/*") if path.name.isdigit()]
        branch = self.path / "branches" / str(max(numbers, default=0) + 1)
        branch.mkdir(parents=True)
        for name in ("config.yaml", "run.json"):
            if (self.path / name).exists():
                shutil.copy2(self.path / name, branch / name)
        return branch

    def begin(self) -> None:
        """Keeps the folder however the run ends, since its first step begins."""
        if self.lock:
            self.lock.has_begun = True

    # The best evaluation.

    @property
    def has_lost_patience(self) -> bool:
        """Whether trainer.patience ends the run, now or in an earlier launch."""
        patience = self.config.trainer.patience
        return bool(patience and self.best and self.best.num_worse >= patience)

    @property
    def best_step(self) -> int:
        return self.best.step if self.best else NO_STEP

    @contextmanager
    def exporting_best(self) -> Iterator[str]:
        """Yields the folder to write the model of the best step to. It becomes best_model/."""
        assert self.best is not None
        partial = self.path / f"{BEST_MODEL}.partial"
        yield str(partial)
        if self.is_first:
            put_in_place(partial, self.path / BEST_MODEL)
            best = {name: getattr(self.best, name) for name in ("step", "metric", "value")}
            write_object(self.path / "run.json", read_record(self.path) | {"best": best})

    # Writing.

    def save(self, step: int, parts: Parts, num_steps: int, owes_test: bool = False) -> None:
        """Writes a checkpoint of a run that is laid out for `num_steps`. All processes must call.

        `owes_test`: the evaluation of this step was left out; the launch that resumes does it.
        """
        counter: Any = parts["data"]  # the position in the training rows
        record = {
            "step": step,
            "rows": counter.rows_done,
            "num_steps": num_steps,
            "owes_test": owes_test,
            "metrics": MetricsFile(self.path).last() if self.is_first else {},
            "best": asdict(self.best) if self.best else None,
            "is_exhausted": counter.is_exhausted,
            "updates": {name: self.count_updates(name, step) for name in worker_names(self.config)},
            "world_size": dist.get_world_size(),
            "hashes": hash_states(parts, {name: part.state_dict() for name, part in parts.items()}),
            **self._experiment_record(),
        }
        texts = {"config.yaml": dump(self.config), "run.json": json.dumps(record)}
        self.checkpoints.save(step, parts, texts)
        if owes_test and self.is_first:
            print(f"the evaluation of step {step} is left out; the same command does it first")

    def prune(self, proven_step: float) -> None:
        """Deletes old checkpoints, as `Checkpoints.prune` does, on the first process."""
        if self.is_first:
            self.checkpoints.prune(proven_step, self.best_step)

    @contextmanager
    def exporting(self, step: int, is_complete: bool) -> Iterator[str]:
        """Yields the folder to write the final model to. It becomes model/ after that.

        `is_complete`: `step` is the last step of the run, and no signal has cut it short.
        """
        partial = self.path / "model.partial"
        yield str(partial)
        if self.is_first:
            put_in_place(partial, self.path / "model")
            ending = {"model_step": step, "is_complete": is_complete}
            write_object(self.path / "run.json", read_record(self.path) | ending)
            print(f"model saved to {self.path / 'model'}")

    def write_records(
        self,
        split: str,
        step: int,
        records: Iterable[dict[str, Any]],
        tokens: dict[str, np.ndarray] | None = None,
    ) -> None:
        """Writes the transcripts of a step to rollouts/`split`/step_N.jsonl, on rank 0.

        The tokens, if they are given, become step_N.safetensors beside it.
        """
        if not self.is_first:
            return
        path = self.path / "rollouts" / split / f"step_{step}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with writing(path), open(path, "w", encoding="utf-8") as file:
            for record in records:
                file.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
            if tokens:
                partial = path.with_suffix(".partial")
                save_file(tokens, partial)
                partial.rename(path.with_suffix(".safetensors"))


def _list_facts(identity: RunIdentity) -> dict[str, str]:
    """Returns what must be the same on all ranks, in words."""
    facts = {f"{key}={value}": "" for key, value in identity.config.items()}
    facts |= {f"the content of {key}": text for key, text in identity.contents.items()}
    facts["the code of rl2"] = hash_package()
    return facts | versions()


def _find_differences(rank: Rank, first: Rank, path: Path) -> list[str]:
    """Returns the differences between this process and rank 0, in words."""
    place = f"rank {dist.get_rank()} on {rank.host}"
    assert first.lock is not None
    if not _sees(*first.lock):
        return [
            f"{place} does not see {path.absolute()} of rank 0 on {first.host}: all nodes need "
            "trainer.save_dir in a folder that they share"
        ]
    differing = [key for key, value in rank.facts.items() if first.facts.get(key) != value]
    return [f"{place} differs from rank 0 on {first.host} in {key}" for key in differing]


def _sees(path: Path, text: str) -> bool:
    """Returns whether this process sees in time the file with this text, which rank 0 wrote."""
    deadline = time.monotonic() + SECONDS_TO_SEE_A_FILE
    while time.monotonic() < deadline:
        if path.exists() and path.read_text() == text:
            return True
        time.sleep(0.1)
    return False
