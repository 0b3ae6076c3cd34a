"""The folder of a run: what is in it, what a launch sets aside, and what it writes."""

import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import save_file
from torch.distributed.checkpoint.stateful import Stateful

from rl2.config.conditions import count_samplers
from rl2.config.schema import Config, RolloutWorkerConfig, dump, worker_names
from rl2.data.rows import hash_sources
from rl2.error_report import writing
from rl2.parallel.mesh import all_gather_objects, broadcast_object
from rl2.parallel.rank import is_first_rank
from rl2.run.best import Best, start_best
from rl2.run.checkpoints import Checkpoints, put_in_place, sweep
from rl2.run.lock import RunLock
from rl2.run.provenance import describe_commit, describe_cpu, hash_package, versions
from rl2.run.records import NO_STEP, MetricsFile, Record, step_of, write_object, write_text
from rl2.run.start import BEST_MODEL, LENGTH, Start, find_start, identify, listed, read_record
from rl2.run.weights_hash import hash_states

SECONDS_TO_SEE_A_FILE = 15.0  # that another node has written
# What a run writes, and a new one in its folder does not go on with. Checkpoints come first: after
# a kill in between no run resumes from them.
OF_A_RUN = (
    "checkpoints",
    "model",
    BEST_MODEL,
    "metrics.jsonl",
    "rollouts",
    "*_id",  # a new run has a new name in the services that show it
)


class AllStepsDone(SystemExit):
    """All steps of the run were done before this launch."""


class RunFolder:
    """The folder of one run, on which all ranks agree. `start` says where the run starts."""

    def __init__(self, config: Config):
        """Takes the folder, finds where the run starts, and compares the ranks.

        All processes must call. ValueError if the folder cannot be written, is damaged, or belongs
        to another run or experiment; it names ranks that have another folder, config, data or code
        than rank 0.
        """
        trainer = config.trainer
        self.config = config
        self.path = Path(trainer.save_dir)
        self.checkpoints = Checkpoints(self.path / "checkpoints", trainer.keep_checkpoints)
        self.identity = identify(config, hash_sources(config.data.train_paths))
        self.is_first = is_first_rank()
        self.lock = RunLock(self.path)
        self.start = self._take()
        self._compare_ranks()
        self.best = start_best(config, self.start.best)
        if self.best and self.best.step not in (0, self.start.step, self.start.best_model_step):
            # The run returns to an old checkpoint, and a later best one has replaced best_model/.
            self.best = Best(self.best.metric)

    def _take(self) -> Start:
        """Rank 0 locks the folder and looks for the start. All raise an error if it fails."""
        start, problem = Start(), ""
        try:
            if self.is_first:
                self.lock.acquire()
                sweep(self.path, "model")
                sweep(self.path, BEST_MODEL)
                sweep(self.checkpoints.folder, "step_")
                start = find_start(self.config, self.identity)
        except (RuntimeError, ValueError) as error:
            problem = str(error)
        except OSError as error:
            reason = "it is a file" if self.path.is_file() else str(error)
            problem = f"trainer.save_dir={self.path} cannot be written: {reason}"
            problem += "; choose another folder"
        start, problem = broadcast_object((start, problem))
        if problem:
            raise ValueError(problem)
        return start

    def _compare_ranks(self) -> None:
        """ValueError names the ranks that differ from the first one."""
        text = broadcast_object(self.lock.text)
        facts = {f"{key}={value}": "" for key, value in self.identity.config.items()}
        facts |= {f"the content of {key}": x for key, x in self.identity.contents.items()}
        facts |= {"the code of rl2": hash_package()} | versions()
        sees_folder = self.is_first or _sees(self.lock.path, text)
        unseen = "" if sees_folder else str(self.path.absolute())
        ranks = all_gather_objects((socket.gethostname(), facts, unseen))
        first_host, first_facts, _ = ranks[0]
        problems = []
        for number, (host, other_facts, unseen) in enumerate(ranks):
            if unseen:
                problems.append(
                    f"rank {number} on {host} does not see {unseen} of rank 0 on {first_host}: all "
                    "nodes need trainer.save_dir in a folder that they share"
                )
                continue
            for key, value in other_facts.items():
                if first_facts.get(key) != value:
                    place = f"rank {number} on {host} differs from rank 0 on {first_host}"
                    problems.append(f"{place} in {key}")
        if problems:
            raise ValueError("\n".join(problems))

    # The length of the run.

    def count_steps(self, num_rows: int, batch_size: int) -> int:
        """Returns the number of the last step. Rows that are done are not counted again."""
        trainer = self.config.trainer
        left = trainer.n_epochs * num_rows - self.start.rows
        num_steps = self.start.step + max(left // batch_size, 0)
        if self.start.checkpoint is None:
            num_steps = max(1, num_steps)
        num_steps = min(num_steps, trainer.max_steps or num_steps)
        if self.is_first and self.start.num_steps not in (0, num_steps):
            schedule = "the learning rate's schedule ends there"
            print(f"changed: {self.start.num_steps} -> {num_steps} steps; {schedule}")
        return num_steps

    def end_if_done(self, num_steps: int) -> None:
        """Ends the program by `AllStepsDone` if all steps are done, and says how to continue.

        ValueError if the config has changed, as in a sweep: the changes would have no effect.
        """
        start = self.start
        if start.step < num_steps or not start.is_complete:
            return
        ignored = [change for key, change in start.changes.items() if key not in LENGTH]
        if ignored:
            raise ValueError(
                f"{self.path}: all {start.step} steps are done, so these changes would have "
                f"no effect:{listed(ignored)}\n"
                "trainer.experiment_name=NAME trains with them in a folder of its own; "
                "trainer.resume=off starts over here and sets this run aside; a larger "
                "trainer.n_epochs or trainer.max_steps continues this run with them"
            )
        if self.is_first:
            print(
                f"{self.path}: all steps are done (the newest checkpoint is of step "
                f"{start.step}), and model/ is there. To continue, raise trainer.n_epochs or "
                "trainer.max_steps; trainer.resume=off starts over and sets this run aside.",
            )
        dist.destroy_process_group()
        raise AllStepsDone(0)

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

    def resume(self, objects: dict[str, Stateful], num_steps: int) -> None:
        """Restores the objects, and makes the folder ready for the next step.

        All processes must call. What belongs to later steps, or to another run, is set aside.
        """
        checkpoint = self.start.checkpoint
        if checkpoint:
            kept = dict(objects)
            if not self.start.keeps_data:
                del kept["data"]
            record = read_record(checkpoint)
            hashes = record.get("hashes", {})
            self.checkpoints.load(checkpoint, kept, record["world_size"], hashes)
        if self.is_first:
            if self.start.is_own:
                self._set_aside_later_steps()
            else:
                entries = []
                for name in OF_A_RUN:
                    entries += sorted(self.path.glob(name))
                self._set_aside(entries, [], "the earlier run")
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
            "world_size": dist.get_world_size() + count_samplers(self.config),
            "seed": self.config.trainer.seed,
            "versions": versions(),
            "commit": describe_commit(),
            "code": hash_package()[:16],
            "threads": torch.get_num_threads(),
            "cpu": describe_cpu(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "folder": os.getcwd(),
        }
        record = read_record(self.path) if self.start.is_own else {}
        if not (self.path / BEST_MODEL).exists():  # it was set aside
            record.pop("best", None)
        record |= self._experiment_record()
        record.setdefault("starts", []).append(start)
        write_text(self.path / "config.yaml", dump(self.config))
        write_object(self.path / "run.json", record)

    def _experiment_record(self) -> Record:
        """Returns what a later launch compares itself with, beside config.yaml."""
        identity = {"trainer": self.identity.trainer, "contents": self.identity.contents}
        return {"identity": identity, "date": self.start.date}

    def _set_aside_later_steps(self) -> None:
        """Sets aside the checkpoints, the newest first, model, transcripts and lines."""
        step = self.start.step
        steps = self.checkpoints.steps()
        entries = [self.checkpoints.path(later) for later in reversed(steps) if later > step]
        if self.start.model_step > step:
            entries.append(self.path / "model")
        if self.start.best_model_step > step:
            entries.append(self.path / BEST_MODEL)
        transcripts = self.path.glob("rollouts/*/step_*")
        entries += [path for path in transcripts if step_of(path) > step]
        metrics = MetricsFile(self.path)
        lines = metrics.read()
        later_lines = [line for line in lines if line["step"] > step]
        self._set_aside(entries, later_lines, f"what came after step {step}")
        metrics.replace([line for line in lines if line["step"] <= step])

    def _set_aside(self, entries: list[Path], lines: list[Record], what: str) -> None:
        """Moves the entries to a new folder branches/N, which gets these lines of metrics.jsonl.

        Nothing is deleted. Each entry is renamed for itself: the folder may be a mount point.
        """
        if not entries and not lines:
            return
        numbers = [int(path.name) for path in self.path.glob("branches/*") if path.name.isdigit()]
        branch = self.path / "branches" / str(max(numbers, default=0) + 1)
        branch.mkdir(parents=True)
        for name in ("config.yaml", "run.json"):  # what the run was
            if (self.path / name).exists():
                shutil.copy2(self.path / name, branch / name)
        for source in entries:
            target = branch / source.relative_to(self.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(source, target)
        if lines:
            MetricsFile(branch).replace(lines)
        print(f"{what} is now in {branch}")

    @property
    def best_step(self) -> int:
        return self.best.step if self.best else NO_STEP

    # Writing.

    def save(self, step: int, objects: dict[str, Stateful], num_steps: int) -> None:
        """Writes a checkpoint of a run that is laid out for `num_steps`. All processes call."""
        counter: Any = objects["data"]  # the position in the training rows
        record = {
            "step": step,
            "rows": counter.rows_done,
            "num_steps": num_steps,
            "best": asdict(self.best) if self.best else None,
            "updates": {name: self.count_updates(name, step) for name in worker_names(self.config)},
            "world_size": dist.get_world_size(),
            "hashes": hash_states(
                objects, {name: item.state_dict() for name, item in objects.items()}
            ),
        }
        record |= self._experiment_record()
        texts = {"config.yaml": dump(self.config), "run.json": json.dumps(record)}
        self.checkpoints.save(step, objects, texts)

    def prune(self, proven_step: float) -> None:
        """Deletes old checkpoints, as `Checkpoints.prune` does, on the first process."""
        if self.is_first:
            self.checkpoints.prune(proven_step, self.best_step)

    def export(self, name: str, write: Callable[[str], None], **record: object) -> None:
        """Lets `write(FOLDER)` write a model, which becomes the folder `name`. All processes call.

        `record` is what run.json says of it.
        """
        partial = self.path / f"{name}.partial"
        write(str(partial))
        if self.is_first:
            put_in_place(partial, self.path / name)
            write_object(self.path / "run.json", read_record(self.path) | record)

    def write_records(
        self,
        split: str,
        step: int,
        records: Iterable[Record],
        tokens: dict[str, np.ndarray] | None = None,
    ) -> None:
        """Writes the transcripts of a step to rollouts/`split`/step_N.jsonl.

        Of the processes that train, and of those that only sample, the first one does it.

        The tokens, if they are given, become step_N.safetensors beside it.
        """
        if dist.get_rank() != 0:
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


def _sees(path: Path, text: str) -> bool:
    """Returns whether this process sees in time the file with this text, which rank 0 wrote."""
    deadline = time.monotonic() + SECONDS_TO_SEE_A_FILE
    while time.monotonic() < deadline:
        if path.exists() and path.read_text() == text:
            return True
        time.sleep(0.1)
    return False
