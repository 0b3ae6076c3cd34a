"""Where a run starts: at step 0, or after a checkpoint of its folder or of another run."""

import math
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

from rl2.config.schema import PPOConfig
from rl2.config.values import flatten
from rl2.data.rows import hash_sources
from rl2.parallel.rank import is_first_rank
from rl2.run.changes import DATA, Change, RunIdentity, find_changes, identify
from rl2.run.checkpoints import NO_STEP, Checkpoints, explain_damage, sweep
from rl2.run.lock import RunLock
from rl2.run.provenance import name_launch
from rl2.run.records import DamagedFile, MetricsFile, read_object

BEST_MODEL = "best_model"  # in the run folder: the model of the best evaluation

# What to do about a damaged file of the run folder.
DAMAGED = {
    "run.json": "restore it, or delete it: then the run forgets when and how it was started",
    "config.yaml": "restore it, or delete it: then this start is not compared with the earlier run",
}


@dataclass(frozen=True)
class Start:
    """Where a run starts."""

    checkpoint: Path | None = None
    is_own: bool = False  # the checkpoint is one of this folder, not of a branch or another run
    step: int = 0  # the steps that are done
    rows: int = 0  # the training rows that are done, over all epochs
    num_steps: int = 0  # that the run of the checkpoint was laid out for
    keeps_data: bool = True  # the rows are those of the checkpoint
    changes: tuple[Change, ...] = ()  # since the checkpoint
    date: str = ""  # YYYY-MM-DD on which the run first started: chat templates may show it
    owes_test: bool = False  # a stop left the evaluation of `step` out
    is_exhausted: bool = False  # no row is left to train on
    is_exported: bool = False  # model/ has the weights of `step`
    best: dict[str, Any] = field(default_factory=dict)  # the fields of the best evaluation
    best_model_step: int = NO_STEP  # of best_model/
    updates: dict[str, int] = field(default_factory=dict)
    """per worker: the updates that the steps so far were laid out for"""


@dataclass(frozen=True)
class Claim:
    """What a process knows of its run before the ranks have met."""

    identity: RunIdentity
    lock: RunLock | None  # of rank 0; the others have no lock and no start
    start: Start | None


def claim_folder(config: Any) -> Claim:
    """Takes the run folder on rank 0 and finds where the run starts.

    It needs no process group, so a folder that is in use is found before any data is read.
    ValueError if the folder cannot be written, or belongs to another run or experiment.
    """
    identity = identify(config, hash_sources(config.data.train_paths))
    if not is_first_rank():
        return Claim(identity, None, None)
    path = Path(config.trainer.save_dir)
    lock = _lock_folder(path)
    sweep(path / "checkpoints", "step_")
    sweep(path, "model")
    sweep(path, BEST_MODEL)
    start = _find_start(config, identity)
    return Claim(identity, lock, replace(start, date=start.date or date.today().isoformat()))


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


def _find_start(config: Any, identity: RunIdentity) -> Start:
    path = Path(config.trainer.save_dir)
    newest = Checkpoints(path / "checkpoints").newest()
    is_restarted = newest is not None and _was_restarted_by_torchrun(path)
    if config.trainer.resume == "off" and not is_restarted:
        return Start()
    checkpoint = newest if is_restarted else _choose_checkpoint(config, identity, newest)
    if checkpoint is None and not _has_a_run(path):
        return Start(date=read_record(path).get("date", ""))
    folder = checkpoint or path
    record = read_record(folder)
    keeps_data, changes = _compare(config, identity, folder, record)
    if checkpoint is None:
        if not config.trainer.eval_only:
            print(f"{path} has no checkpoint to resume from: the run starts over at step 0")
        return Start()
    is_own = checkpoint.resolve().parent == (path / "checkpoints").resolve()
    if is_own:  # damage is found before a model loads
        read_record(path)
        MetricsFile(path).fill(record["step"], record.get("metrics", {}))
    step = record["step"]
    drops_solved = isinstance(config, PPOConfig) and config.rollout.drop_solved is not None
    return Start(
        checkpoint=checkpoint,
        is_own=is_own,
        step=step,
        rows=record.get("rows", 0) if keeps_data else 0,
        num_steps=record.get("num_steps", 0),
        keeps_data=keeps_data,
        changes=tuple(changes),
        date=record.get("date", ""),
        owes_test=record.get("owes_test", False) and is_own and _lacks_test(config, step),
        is_exhausted=record.get("is_exhausted", False) and keeps_data and drops_solved,
        is_exported=model_step(path) == step,
        best=record.get("best") or {} if is_own else {},
        best_model_step=best_model_step(path),
        updates=record.get("updates", {}),
    )


def _choose_checkpoint(config: Any, identity: RunIdentity, newest: Path | None) -> Path | None:
    """Returns the checkpoint that trainer.resume means; `newest` is the newest of this folder."""
    path, resume = Path(config.trainer.save_dir), config.trainer.resume
    if resume in ("auto", "force"):
        return newest
    named = resume.removeprefix("force:")
    if newest and _is_repeated(path, identity):
        print(
            f"this command has begun in {path} already, so it resumes from {newest} and "
            f"not from {named}; trainer.resume=force:{named} begins there again"
        )
        return newest
    return _find_checkpoint(Path(named))


def _find_checkpoint(named: Path) -> Path:
    """Returns the checkpoint of trainer.resume=`named`: a step_N folder, or one that holds some."""
    if named.suffix == "" and (named / "run.json").exists() and named.name.startswith("step_"):
        return named
    newest = Checkpoints(named).newest() or Checkpoints(named / "checkpoints").newest()
    if newest is None:
        raise ValueError(
            f"trainer.resume={named}: no complete checkpoint (step_N) there; "
            "give a step_N folder, auto or off"
        )
    return newest


def _was_restarted_by_torchrun(path: Path) -> bool:
    """Returns whether this launch of torchrun has begun in the folder already."""
    launch = name_launch()
    starts = read_record(path).get("starts", []) if launch else []
    return bool(starts) and launch in starts[-1].get("launches", [])


def _is_repeated(path: Path, identity: RunIdentity) -> bool:
    """Returns whether the last launch in this folder had the same command and files as this one.

    Keys that only one of the two has are of another version of rl2, as in `find_changes`.
    """
    earlier = read_record(path).get("identity", {})
    config = dict(flatten(_read_object(path, "config.yaml")))
    if not config or earlier.get("contents") != identity.contents:
        return False
    return all(config.get(key, value) == value for key, value in identity.config.items())


def _has_a_run(path: Path) -> bool:
    metrics = path / "metrics.jsonl"
    has_metrics = metrics.exists() and metrics.stat().st_size > 0
    return has_metrics or (path / "model").exists()


def _lacks_test(config: Any, step: int) -> bool:
    """Returns whether the step has no evaluation in metrics.jsonl, and can have one."""
    if not config.data.has_test_rows:
        return False
    for line in MetricsFile(Path(config.trainer.save_dir)).read():
        if line["step"] == step:
            return not any(name.startswith("test/") for name in line)
    return False


def _compare(
    config: Any, identity: RunIdentity, folder: Path, record: dict[str, Any]
) -> tuple[bool, list[Change]]:
    """Prints what has changed since the run in `folder`, of which `record` is the run.json.

    Returns (whether it had the same rows, the changes).

    ValueError if it was another experiment, unless that is forced.
    """
    saved_config = _read_object(folder, "config.yaml")
    if "identity" not in record or not saved_config:
        return True, []
    before = RunIdentity(config=dict(flatten(saved_config)), **record["identity"])
    experiment, others = find_changes(type(config), before, identity)
    resume = config.trainer.resume
    if experiment and resume.partition(":")[0] != "force":
        listed = "".join(f"\n  - {change}" for change in experiment)
        forced = "force" if resume == "auto" else f"force:{resume}"
        raise ValueError(
            f"{folder} is of another experiment:{listed}\n"
            "trainer.experiment_name=NAME gives this run a folder of its own; "
            "trainer.resume=off starts over here and sets the old run aside; "
            f"trainer.resume={forced} resumes regardless"
        )
    if experiment + others:
        print(f"changed since {folder}:", *experiment, *others, sep="\n  ")
    has_same_rows = not any(change.key == DATA for change in experiment)
    return has_same_rows, experiment + others


# Small files of a run.


def model_step(path: Path) -> float:
    """Returns the step of model/: NO_STEP without one, and infinity if no step is known."""
    if not (path / "model").exists():
        return NO_STEP
    try:
        return read_record(path).get("model_step", math.inf)
    except RuntimeError:  # run.json is damaged, which does not matter to a new run
        return math.inf


def best_model_step(path: Path) -> int:
    """Returns the step of best_model/; NO_STEP if it is missing or run.json does not name it."""
    if not (path / BEST_MODEL).exists():
        return NO_STEP
    try:
        return read_record(path).get("best", {}).get("step", NO_STEP)
    except RuntimeError:  # run.json is damaged, as above
        return NO_STEP


def read_record(folder: Path) -> dict[str, Any]:
    """Reads run.json of a run folder, {} if it has none; or of a checkpoint, which must have one.

    RuntimeError names the file if it is damaged, and says what to do.
    """
    return _read_object(folder, "run.json")


def _read_object(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    is_checkpoint = folder.name.startswith("step_")
    try:
        content = read_object(path)
    except DamagedFile as error:
        if is_checkpoint:
            raise RuntimeError(explain_damage(folder, f"{name}: {error.reason}")) from error
        raise RuntimeError(f"{error}; {DAMAGED[name]}") from error
    if not content and is_checkpoint:
        raise RuntimeError(explain_damage(folder, f"it has no {name}"))
    return content
