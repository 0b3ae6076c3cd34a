"""The folder of a run: it belongs to one run, nothing in it is lost, and all ranks agree on it."""

import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import save_file

from rl2.config.parse import dump, flatten
from rl2.config.schema import PPOConfig, RolloutWorkerConfig, worker_names
from rl2.data.rows import hash_data
from rl2.error_report import writing
from rl2.parallel.mesh import all_gather_objects, is_first_rank
from rl2.run.changes import (
    DATA,
    RunIdentity,
    find_changes,
    find_ignored_changes,
    identify,
)
from rl2.run.checkpoints import (
    NO_STEP,
    Checkpoints,
    Parts,
    explain_damage,
    put_in_place,
    step_of,
    sweep,
)
from rl2.run.lock import RunLock, process_start
from rl2.run.records import DamagedFile, MetricsFile, read_object, write_object, write_text
from rl2.run.weights_hash import hash_states

PACKAGE = Path(__file__).parent.parent
SECONDS_TO_SEE_A_FILE = 15.0  # that another node has written
EVERYTHING = -1  # the step after which all of an earlier run is set aside
# What to do about a damaged file of the run folder.
DAMAGED = {
    "run.json": "restore it, or delete it: then the run forgets when and how it was started",
    "config.yaml": "restore it, or delete it: then this start is not compared with the earlier run",
}


class Start(NamedTuple):
    """Where a run starts."""

    checkpoint: Path | None = None
    step: int = 0  # the steps that are done
    rows: int = 0  # the training rows that are done, over all epochs
    num_steps: int = 0  # that the run of the checkpoint was laid out for
    keeps_data: bool = True  # the rows are those of the checkpoint
    changes: tuple[str, ...] = ()  # since then, in words
    date: str = ""  # YYYY-MM-DD on which the run first started: chat templates may show it
    owes_test: bool = False  # a stop left the evaluation of `step` out
    is_exhausted: bool = False  # no row is left to train on
    updates: dict[str, int] = {}  # of each worker, that the steps so far were laid out for


class RunFolder:
    """The folder of one run, from its lock to its exports.

    `RunFolder(config)` comes first of all: rank 0 takes the lock and compares the run with what is
    in the folder. `agree` follows when the process group is there, `count_steps` when the rows are
    there, and `resume` when the models are there.
    """

    def __init__(self, config: Any):
        """ValueError if the folder cannot be written, or belongs to another run or experiment."""
        trainer = config.trainer
        self.config = config
        self.path = Path(trainer.save_dir)
        self.checkpoints = Checkpoints(self.path / "checkpoints", trainer.keep_checkpoints)
        self.identity = identify(config, hash_data(config.data.path))
        self.start = Start()
        self.hosts = [socket.gethostname()]
        self.launches = [_launch()]  # of all nodes: the first rank may be on another one later
        self.is_first = is_first_rank()
        if self.is_first:
            self.lock = _lock_folder(self.path)
            sweep(self.checkpoints.folder, "step_")
            sweep(self.path, "model")
            self.start = self._find_start()
            if not self.start.date:
                self.start = self.start._replace(date=date.today().isoformat())

    # What to go on from.

    def _find_start(self) -> Start:
        resume = self.config.trainer.resume
        is_forced = resume.partition(":")[0] == "force"
        named = "" if resume in ("auto", "off", "force") else resume.removeprefix("force:")
        newest = self.checkpoints.newest()
        if newest and self._was_restarted_by_torchrun():
            named = ""
        elif newest and named and self._is_repeated():
            print(
                f"this command has begun in {self.path} already, so it resumes from {newest} and "
                f"not from {named}; trainer.resume=force:{named} begins there again"
            )
            named = ""
        elif resume == "off":
            return Start()
        checkpoint = _find_checkpoint(Path(named)) if named else newest
        if checkpoint is None and not self._has_a_run():
            return Start(date=_read_record(self.path).get("date", ""))
        folder = checkpoint or self.path
        record = _read_record(folder)
        keeps_data, changes = self._compare(folder, record, is_forced)
        if checkpoint is None:
            if not self.config.trainer.eval_only:
                print(
                    f"{self.path} has no checkpoint to resume from: the run starts over at step 0"
                )
            return Start()
        if self._is_own(checkpoint):  # damage is found before a model loads
            _read_record(self.path)
            MetricsFile(self.path).read()
        return Start(
            checkpoint,
            record["step"],
            record.get("rows", 0) if keeps_data else 0,
            record.get("num_steps", 0),
            keeps_data,
            tuple(changes),
            record.get("date", ""),
            record.get("owes_test", False) and self._lacks_test(checkpoint, record["step"]),
            record.get("is_exhausted", False) and keeps_data and self._drops_solved(),
            record.get("updates", {}),
        )

    def _drops_solved(self) -> bool:
        return isinstance(self.config, PPOConfig) and self.config.rollout.drop_solved is not None

    def _is_repeated(self) -> bool:
        """Whether the last launch in this folder had the same command and files as this one."""
        identity = _read_record(self.path).get("identity", {})
        config = dict(flatten(_read_object(self.path, "config.yaml")))
        same_files = identity.get("contents") == self.identity.contents
        return same_files and config == self.identity.config

    def _is_own(self, checkpoint: Path | None) -> bool:
        """Whether the checkpoint is one of this folder, and not of a branch or another run."""
        if checkpoint is None:
            return False
        return checkpoint.resolve().parent == self.checkpoints.folder.resolve()

    def _lacks_test(self, checkpoint: Path, step: int) -> bool:
        """Whether the step of this run has no evaluation in metrics.jsonl, and can have one."""
        data = self.config.data
        if not self._is_own(checkpoint) or not (data.test_path or data.test_ratio):
            return False
        for line in MetricsFile(self.path).read():
            if line["step"] == step:
                return not any(name.startswith("test/") for name in line)
        return False

    def _was_restarted_by_torchrun(self) -> bool:
        """Whether this launch of torchrun has begun in the folder already: it resumes there."""
        if not _launch():
            return False
        starts = _read_record(self.path).get("starts", [])
        return bool(starts) and _launch() in starts[-1].get("launches", [])

    def _has_a_run(self) -> bool:
        metrics = self.path / "metrics.jsonl"
        has_metrics = metrics.exists() and metrics.stat().st_size > 0
        return has_metrics or (self.path / "model").exists()

    def _compare(
        self, folder: Path, record: dict[str, Any], is_forced: bool
    ) -> tuple[bool, list[str]]:
        """Prints what has changed since the run in `folder`.

        Returns (whether it had the same rows, the changes).

        ValueError if it was another experiment, unless that is forced.
        """
        saved_config = _read_object(folder, "config.yaml")
        if "identity" not in record or not saved_config:
            return True, []
        config = flatten(saved_config)
        before = RunIdentity(config=dict(config), **record["identity"])
        experiment, others = find_changes(type(self.config), before, self.identity)
        if experiment and not is_forced:
            listed = "".join(f"\n  - {change}" for change in experiment)
            resume = self.config.trainer.resume
            forced = "force" if resume == "auto" else f"force:{resume}"
            raise ValueError(
                f"{folder} is of another experiment:{listed}\n"
                "trainer.experiment_name=NAME gives this run a folder of its own; "
                "trainer.resume=off starts anew here and sets the old run aside; "
                f"trainer.resume={forced} goes on regardless"
            )
        if experiment + others:
            print(f"changed since {folder}:", *experiment, *others, sep="\n  ")
        has_same_rows = not any(change.startswith(f"{DATA}:") for change in experiment)
        return has_same_rows, experiment + others

    # The agreement of all ranks.

    def agree(self) -> None:
        """Ends the run on all ranks unless they have the same folder, config, data and code.

        All processes must call. ValueError names the ranks that differ from rank 0.
        """
        mine = {
            **{f"{key}={value}": "" for key, value in self.identity.config.items()},
            **{f"the content of {key}": text for key, text in self.identity.contents.items()},
            "the code of rl2": _hash_package(),
            **versions(),
        }
        lock = (self.lock.path, self.lock.path.read_text()) if self.is_first else None
        ranks = all_gather_objects((socket.gethostname(), lock, self.start, mine))
        hosts = [host for host, *_ in ranks]
        self.launches = list(dict.fromkeys(all_gather_objects(_launch())))
        self.hosts = list(dict.fromkeys(hosts))
        _, lock, self.start, expected = ranks[0]
        place = f"rank {dist.get_rank()} on {hosts[dist.get_rank()]}"
        differing = [key for key, value in mine.items() if expected.get(key) != value]
        problems = [f"{place} differs from rank 0 on {hosts[0]} in {key}" for key in differing]
        if not _sees(*lock):
            problems = [
                f"{place} does not see {self.path.absolute()} of rank 0 on {hosts[0]}: all nodes "
                "need trainer.save_dir in a folder that they share"
            ]
        problems = [text for part in all_gather_objects(problems) for text in part]
        if problems:
            raise ValueError("\n".join(problems))

    # The length of the run.

    def count_steps(self, num_rows: int, batch_size: int) -> int:
        """The number of the last step. Rows that are done already are not counted again.

        If all steps are done, says how to continue and ends the program. ValueError if the config
        has changed, since the changes would have no effect.
        """
        trainer = self.config.trainer
        left = trainer.n_epochs * num_rows - self.start.rows
        num_steps = self.start.step + max(left // batch_size, 0)
        if self.start.checkpoint is None:
            num_steps = max(1, num_steps)
        num_steps = min(num_steps, trainer.max_steps or num_steps)
        if self.start.is_exhausted:
            num_steps = self.start.step
        elif self.is_first and self.start.num_steps not in (0, num_steps):
            schedule = "the learning rate's schedule ends there"
            print(f"changed: {self.start.num_steps} -> {num_steps} steps; {schedule}")
        is_done = self.start.checkpoint is not None and num_steps <= self.start.step
        if is_done and self._is_exported() and not self.start.owes_test:
            self._refuse_changes()
            if self.is_first:
                remedy = "raise trainer.n_epochs or trainer.max_steps"
                if self.start.is_exhausted:
                    remedy = "give other rows, or rollout.drop_solved=null, since all are solved"
                print(
                    f"{self.path}: all steps are done (the newest checkpoint is of step "
                    f"{self.start.step}), and model/ is there. To go on {remedy}; "
                    "trainer.resume=off starts anew and sets this run aside.",
                )
            dist.destroy_process_group()
            sys.exit(0)
        return num_steps

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
        """The updates of a worker that the steps until `step` are laid out for, with the settings
        of the launch that does them. The learning rate's schedule has the number of all steps.
        """
        section = getattr(self.config, name)
        if not isinstance(section, RolloutWorkerConfig):
            return step
        done, first = 0, section.freeze_steps
        if name in self.start.updates:
            done, first = self.start.updates[name], max(first, self.start.step)
        return done + section.updates_per_step * max(0, step - first)

    def _is_exported(self) -> bool:
        return self._model_step() == self.start.step

    # Going on.

    def resume(self, parts: Parts, num_steps: int) -> None:
        """Restores the parts, and makes the folder ready for the next step.

        All processes must call. What belongs to later steps, or to another run, is set aside.
        """
        checkpoint = self.start.checkpoint
        self.num_steps = num_steps
        if checkpoint:
            kept = dict(parts)
            if not self.start.keeps_data:
                del kept["data"]
            record = _read_record(checkpoint)
            hashes = record.get("hashes", {})
            self.checkpoints.load(checkpoint, kept, record["world_size"], hashes)
        if self.is_first:
            is_own = self._is_own(checkpoint)
            self._set_aside(self.start.step if is_own else EVERYTHING)
            self._write_run_files(is_own)
            if checkpoint:
                done = f"{self.start.step} of {num_steps} steps are done"
                print(f"resumed from {checkpoint}: {done}")
        dist.barrier()

    def _write_run_files(self, goes_on: bool) -> None:
        start = {
            "time": time.strftime("%Y-%m-%d %H:%M:%S%z"),
            "step": self.start.step,
            "command": sys.argv,
            "hosts": self.hosts,
            "world_size": dist.get_world_size(),
            "seed": self.config.trainer.seed,
            "versions": versions(),
            "commit": describe_commit(),
            "code": _hash_package()[:16],
            "threads": torch.get_num_threads(),
            "cpu": _describe_cpu(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "folder": os.getcwd(),
            "launches": self.launches,
        }
        record = _read_record(self.path) if goes_on else {}
        record |= self._experiment_record()
        record.setdefault("starts", []).append(start)
        write_text(self.path / "config.yaml", dump(self.config))
        write_object(self.path / "run.json", record)

    def _experiment_record(self) -> dict[str, Any]:
        """What a later launch compares itself with, beside config.yaml, and its first date."""
        identity = {"trainer": self.identity.trainer, "contents": self.identity.contents}
        return {"identity": identity, "date": self.start.date}

    def _set_aside(self, step: int) -> None:
        """Moves what an earlier run made after `step` to branches/N. Nothing is deleted.

        Each entry is renamed for itself, so the folder may be a mount point. Checkpoints go first:
        after a kill in between, a run goes on from one that is still there.
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
        """The checkpoints, the newest first, the model and the transcripts of later steps."""
        steps = self.checkpoints.steps()
        entries = [self.checkpoints.path(later) for later in reversed(steps) if later > step]
        if self._model_step() > step:
            entries.append(self.path / "model")
        if step == EVERYTHING:  # a new run has a new name in the services that show it
            entries += [*self.path.glob("*_id"), *self.path.glob("tensorboard")]
            metrics = self.path / "metrics.jsonl"
            if metrics.exists() and metrics.stat().st_size > 0:
                entries.append(metrics)
        transcripts = self.path.glob("rollouts/*/step_*")
        return entries + [path for path in transcripts if step_of(path) > step]

    def _model_step(self) -> float:
        """The step of model/: NO_STEP without one, and infinity if no step is known."""
        if not (self.path / "model").exists():
            return NO_STEP
        try:
            return _read_record(self.path).get("model_step", math.inf)
        except RuntimeError:  # run.json is damaged, which does not matter to a new run
            return math.inf

    def _new_branch(self) -> Path:
        """A new folder branches/N, with copies of the files that say what the run was."""
        numbers = [int(path.name) for path in self.path.glob("branches/*") if path.name.isdigit()]
        branch = self.path / "branches" / str(max(numbers, default=0) + 1)
        branch.mkdir(parents=True)
        for name in ("config.yaml", "run.json"):
            if (self.path / name).exists():
                shutil.copy2(self.path / name, branch / name)
        return branch

    # Writing.

    def save(self, step: int, parts: Parts, owes_test: bool = False) -> None:
        """Writes a checkpoint. All processes must call.

        `owes_test`: the evaluation of this step was left out; the launch that resumes does it.
        """
        counter: Any = parts["data"]  # the position in the training rows
        record = {
            "step": step,
            "rows": counter.rows_done,
            "num_steps": self.num_steps,
            "owes_test": owes_test,
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
            self.checkpoints.prune(proven_step)

    @contextmanager
    def exporting(self, step: int) -> Iterator[str]:
        """Gives the folder into which the final model is written. It becomes model/ after that."""
        partial = self.path / "model.partial"
        yield str(partial)
        if self.is_first:
            put_in_place(partial, self.path / "model")
            write_object(self.path / "run.json", _read_record(self.path) | {"model_step": step})
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


def _lock_folder(folder: Path) -> RunLock:
    """Makes the run folder if there is none, and takes its lock.

    ValueError if another run has it, or if it cannot be written, also because its disk is full.
    """
    lock = RunLock(folder)
    try:
        lock.acquire()
    except OSError as error:
        reason = "it is a file" if folder.is_file() else str(error)
        raise ValueError(
            f"trainer.save_dir={folder} cannot be written: {reason}; choose another folder"
        ) from error
    return lock


def _find_checkpoint(named: Path) -> Path:
    """The checkpoint that trainer.resume=`named` means: a step_N folder, or one that holds some."""
    if named.suffix == "" and (named / "run.json").exists() and named.name.startswith("step_"):
        return named
    newest = Checkpoints(named).newest() or Checkpoints(named / "checkpoints").newest()
    if newest is None:
        raise ValueError(
            f"trainer.resume={named}: no complete checkpoint (step_N) there; "
            "give a step_N folder, auto or off"
        )
    return newest


def _read_record(folder: Path) -> dict[str, Any]:
    """run.json of a run folder, {} if it has none; or of a checkpoint, which must have one."""
    return _read_object(folder, "run.json")


def _read_object(folder: Path, name: str) -> dict[str, Any]:
    """A small file of a run folder, {} if it has none; or of a checkpoint, which must have it.

    RuntimeError names the file if it is damaged, and says what to do.
    """
    path = folder / name
    try:
        content = read_object(path)
    except DamagedFile as error:
        if _is_checkpoint(folder):
            raise RuntimeError(explain_damage(folder, f"{name}: {error.reason}")) from error
        raise RuntimeError(f"{error}; {DAMAGED[name]}") from error
    if not content and _is_checkpoint(folder):
        raise RuntimeError(explain_damage(folder, f"it has no {name}"))
    return content


def _is_checkpoint(folder: Path) -> bool:
    return folder.name.startswith("step_")


def _sees(path: Path, text: str) -> bool:
    """Whether this process sees the file with this text, which rank 0 has written, in time."""
    deadline = time.monotonic() + SECONDS_TO_SEE_A_FILE
    while time.monotonic() < deadline:
        if path.exists() and path.read_text() == text:
            return True
        time.sleep(0.1)
    return False


def _launch() -> str:
    """A name of this launch of torchrun on this node, the same after restarts; "" without torchrun.

    TORCHELASTIC_RUN_ID is "none" in every launch without --standalone and --rdzv_id. But torchrun
    makes a folder for the logs of a launch, .../torchelastic_x/none_y, with one folder an attempt.
    """
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
    logs, attempt, _ = os.environ.get("TORCHELASTIC_ERROR_FILE", "").partition("/attempt_")
    if attempt:
        return logs
    if not run_id:
        return ""
    agent = os.getppid()  # torchrun itself, which keeps no logs
    return f"{run_id}, process {agent} since {process_start(agent)}"


# What the run was started with.


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that the numbers depend on."""
    installed = {"python": platform.python_version()}
    for name in ("rl2", "torch", "transformers", "sglang"):
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # SGLang, or rl2 in a plain checkout
            continue
    return installed


def describe_commit() -> str | None:
    """The commit of the checkout that rl2 runs from, with "+ changes" if files differ from it.

    None if rl2 is installed without a checkout, or git is not there.
    """
    checkout = PACKAGE.parent
    if not (checkout / ".git").exists():
        return None
    describe = ["describe", "--always", "--abbrev=40", "--exclude=*", "--dirty= + changes"]
    command = ["git", "-C", str(checkout), *describe]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip()


def _describe_cpu() -> str:
    """The processor's name, and the instructions that torch uses on it."""
    file = Path("/proc/cpuinfo")  # of Linux
    names = re.findall(r"model name\s*: (.*)", file.read_text() if file.exists() else "")
    return f"{next(iter(names), platform.machine())}, {torch.backends.cpu.get_cpu_capability()}"


def _hash_package() -> str:
    """A hash of the code of rl2."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
