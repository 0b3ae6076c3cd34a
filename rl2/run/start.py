"""Where a run starts: at step 0, or after a checkpoint of its folder or of another run.

A run resumes only if it is the experiment of that checkpoint, by its config and its files.
"""

import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path

from rl2.config.schema import Config, dump
from rl2.config.values import flatten
from rl2.run.best import Best
from rl2.run.checkpoints import Checkpoints, explain_damage
from rl2.run.records import NO_STEP, DamagedFile, MetricsFile, Record, read_object
from rl2.user_files import find_env_file

BEST_MODEL = "best_model"  # in the run folder: the model of the best evaluation
DATA = "data.path"
# Where and how a run resumes: these say nothing about the experiment.
UNLISTED = ("trainer.resume", "trainer.save_dir", "trainer.experiment_name")
# With another value of one of these keys a run is another experiment: it does not resume.
EXPERIMENT = """
data.path data.weights data.test_ratio data.columns data.chat_template data.chat_template_kwargs
data.system_prompt data.max_length data.shuffle data.seed
rollout.env_path rollout.num_processes kl.type kl.update_freq adv.estimator dpo.loss
teacher.model_name teacher.base_url teacher.kl trainer.rollouts_from trainer.eval_only
actor.loss
""".split()
# The same in the section of each trained model.
OF_MODELS = """
model_name lora_rank lora_alpha lora_targets adapter quantize_base freeze_router
router_aux_loss_coef optimizer
""".split()
EXPERIMENT += [f"actor.{name}" for name in OF_MODELS] + [f"critic.{name}" for name in OF_MODELS]
LENGTH = ("trainer.n_epochs", "trainer.max_steps")  # how far a run goes

Changes = dict[str, str]  # since an earlier run: key -> its old and new value, in words


@dataclass
class RunIdentity:
    """A run's trainer, its config and the contents of the files that the config names."""

    trainer: str  # the name of the config's class
    config: dict[str, object]  # dotted key -> value
    contents: dict[str, str]  # key -> hash of the file that it names; of data.path, of the rows


@dataclass(frozen=True)
class Start:
    """Where a run starts."""

    checkpoint: Path | None = None
    is_own: bool = False  # the checkpoint is one of this folder, not of a branch or another run
    step: int = 0  # the steps that are done
    rows: int = 0  # the training rows that are done, over all epochs
    num_steps: int = 0  # that the run of the checkpoint was laid out for
    keeps_data: bool = True  # the rows are those of the checkpoint
    changes: Changes = field(default_factory=dict)  # since the checkpoint
    date: str = ""  # YYYY-MM-DD on which the run first started: chat templates may show it
    lacks_test: bool = False  # the checkpoint is own, and `step` was not evaluated
    is_complete: bool = False  # model/ is of the last step of the run, which is `step`
    model_step: float = NO_STEP  # of model/
    best: Best | None = None  # the best evaluation until the checkpoint
    best_model_step: int = NO_STEP  # of best_model/
    updates: dict[str, int] = field(default_factory=dict)
    """per worker: the updates that the steps so far were laid out for"""


def find_start(config: Config, identity: RunIdentity) -> Start:
    """Finds where the run starts, and prints what has changed since its checkpoint.

    ValueError if the folder is of another experiment, or trainer.resume names no checkpoint;
    RuntimeError if a file is damaged.
    """
    path = Path(config.trainer.save_dir)
    today = date.today().isoformat()
    newest = Checkpoints(path / "checkpoints").newest()
    if config.trainer.resume == "off":
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
            raise ValueError(
                "trainer.resume=off: torchrun has restarted the run, which would begin again; "
                "start the command without this key to resume"
            )
        return Start(date=today)
    checkpoint = _choose_checkpoint(config, newest)
    has_run = (path / "metrics.jsonl").exists() or (path / "model").exists()
    if checkpoint is None and not has_run:
        return Start(date=read_record(path).get("date") or today)
    folder = checkpoint or path
    record = read_record(folder)
    keeps_data, changes = _compare(config, identity, folder, record)
    if checkpoint is None:
        if not config.trainer.eval_only:
            print(f"{path} has no checkpoint to resume from: the run starts over at step 0")
        return Start(date=today)
    step = record["step"]
    is_own = checkpoint.resolve().parent == (path / "checkpoints").resolve()
    lines = MetricsFile(path).read() if is_own else []  # damage is found before a model loads
    metrics_of_step = [name for line in lines if line["step"] == step for name in line]
    run_record = read_record(path) if is_own else {}
    model_step = run_record.get("model_step", NO_STEP) if (path / "model").exists() else NO_STEP
    best = record.get("best") if is_own else None
    best_model = run_record.get("best", {}) if (path / BEST_MODEL).exists() else {}
    return Start(
        checkpoint=checkpoint,
        is_own=is_own,
        step=step,
        rows=record.get("rows", 0) if keeps_data else 0,
        num_steps=record.get("num_steps", 0),
        keeps_data=keeps_data,
        changes=changes,
        date=record.get("date") or today,
        lacks_test=is_own and not any(name.startswith("test/") for name in metrics_of_step),
        is_complete=run_record.get("is_complete", False) and model_step == step,
        model_step=model_step,
        best=Best(best["metric"], best["step"], best["value"]) if best else None,
        best_model_step=best_model.get("step", NO_STEP),
        updates=record.get("updates", {}),
    )


def _choose_checkpoint(config: Config, newest: Path | None) -> Path | None:
    """Returns the checkpoint that trainer.resume means; `newest` is the newest of this folder."""
    resume = config.trainer.resume
    if resume in ("auto", "force"):
        return newest
    named = resume.removeprefix("force:")
    config_file = Path(config.trainer.save_dir, "config.yaml")
    if newest and config_file.exists() and config_file.read_text("utf-8") == dump(config):
        print(
            f"the last start in {config_file.parent} had this config already, so it resumes from "
            f"{newest} and not from {named}; trainer.resume=force:{named} begins there again"
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


def _compare(
    config: Config, identity: RunIdentity, folder: Path, record: Record
) -> tuple[bool, Changes]:
    """Prints what has changed since the run in `folder`, of which `record` is the run.json.

    Returns (whether it had the same rows, the changes).

    ValueError if it was another experiment, unless that is forced.
    """
    saved_config = _read_object(folder, "config.yaml")
    if "identity" not in record or not saved_config:
        return True, {}
    saved = record["identity"]
    before = RunIdentity(saved["trainer"], dict(flatten(saved_config)), saved["contents"])
    experiment, others = find_changes(before, identity)
    resume = config.trainer.resume
    if experiment and resume.partition(":")[0] != "force":
        forced = "force" if resume == "auto" else f"force:{resume}"
        raise ValueError(
            f"{folder} is of another experiment:{listed(experiment.values())}\n"
            "trainer.experiment_name=NAME gives this run a folder of its own; "
            "trainer.resume=off starts over here and sets the old run aside; "
            f"trainer.resume={forced} resumes regardless"
        )
    changes = experiment | others
    if changes:
        print(f"changed since {folder}:{listed(changes.values())}")
    return DATA not in experiment, changes


def listed(changes: Iterable[str]) -> str:
    """The changes as lines that follow a text."""
    return "".join(f"\n  - {change}" for change in changes)


def read_record(folder: Path) -> Record:
    """Reads run.json of a run folder, {} if it has none; or of a checkpoint, which must have one.

    RuntimeError names the file if it is damaged, and says what to do.
    """
    return _read_object(folder, "run.json")


def _read_object(folder: Path, name: str) -> Record:
    path = folder / name
    is_checkpoint = folder.name.startswith("step_")
    try:
        content = read_object(path)
    except DamagedFile as error:
        if is_checkpoint:
            raise RuntimeError(explain_damage(folder, f"{name}: {error.reason}")) from error
        remedy = "restore it, or delete it, and with it what it says of the earlier run"
        raise RuntimeError(f"{error}; {remedy}") from error
    if not content and is_checkpoint:
        raise RuntimeError(explain_damage(folder, f"it has no {name}"))
    return content


def identify(config: Config, data_hash: str) -> RunIdentity:
    """Returns the identity of a run. `data_hash` is of the training rows, "" if it is unknown."""
    values = dict(flatten(asdict(config)))
    contents = {DATA: data_hash} if data_hash else {}
    for name, value in values.items():
        files = _find_files(name, value)
        if files and not name.startswith(("data.path", "data.test_path")):
            contents[name] = hashlib.sha256(b"".join(map(Path.read_bytes, files))).hexdigest()
    return RunIdentity(type(config).__name__, values, contents)


def _find_files(key: str, value: object) -> list[Path]:
    """The files that the value of a key names, also several by name.

    They are named as FILE or FILE:FUNCTION, ready-made environments by their bare name.
    """
    if isinstance(value, dict):
        files = []
        for name in sorted(value):
            files += _find_files(key, value[name])
        return files
    if not isinstance(value, str):
        return []
    if key == "rollout.env_path":
        with suppress(ValueError):
            return [find_env_file(value)]
    # Of os.path, since a text such as a system prompt may be no path at all, where pathlib raises.
    for text in (value, value.rpartition(":")[0]):
        path = os.path.expanduser(text)
        if os.path.isfile(path):
            return [Path(path)]
    return []


def find_changes(before: RunIdentity, now: RunIdentity) -> tuple[Changes, Changes]:
    """Returns (changes that make another experiment, other changes).

    Keys that only one of the two has are not compared: they are of another version of rl2. But if
    an earlier one is gone that was set, and made the experiment, this is another one.
    """
    if before.trainer != now.trainer:
        return {"": f"the trainer: {before.trainer} -> {now.trainer}"}, {}
    experiment: Changes = {}
    others: Changes = {}
    for name, value in now.config.items():
        old = before.config.get(name, value)
        has_same_content = _has_same_content(name, before, now)
        if old != value and name not in UNLISTED:
            is_same = has_same_content or _is_same_path(old, value)
            changes = experiment if name in EXPERIMENT and not is_same else others
            # An empty text is shown as ''.
            changes[name] = f"{name}: {old or repr(old)} -> {value or repr(value)}"
        elif has_same_content is False:
            changes = experiment if name == DATA else others  # code may be edited
            changes[name] = f"{name}: {value} has another content"
    for name in EXPERIMENT:
        if name not in now.config and before.config.get(name):
            experiment[name] = f"{name}: {before.config[name]} -> no longer in rl2"
    return experiment, others


def _has_same_content(name: str, before: RunIdentity, now: RunIdentity) -> bool | None:
    """Returns whether the key names files of the same content. None if one of them is not known."""
    if name not in before.contents or name not in now.contents:
        return None
    return before.contents[name] == now.contents[name]


def _is_same_path(old: object, new: object) -> bool:
    """Returns whether both are names of one file or folder."""
    if not isinstance(old, str) or not isinstance(new, str):
        return False
    return Path(old).exists() and Path(new).exists() and Path(old).samefile(new)
