"""What differs between an earlier run's config and today's: is it the same experiment?"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rl2.config.schema import dump
from rl2.config.values import flatten

DATA = "data.path"
# Where and how a run resumes: these say nothing about the experiment.
UNLISTED = ("trainer.resume", "trainer.save_dir", "trainer.experiment_name")
# With another value of one of these keys a run is another experiment: it does not resume.
EXPERIMENT = """
data.path data.weights data.test_ratio data.columns data.chat_template data.chat_template_kwargs
data.system_prompt data.max_length data.shuffle data.seed data.few_shot data.turns data.truncate
rollout.env_path rollout.num_processes kl.type kl.update_freq adv.estimator dpo.loss
teacher.model_name teacher.base_url teacher.hint teacher.kl trainer.rollouts_from trainer.eval_only
actor.loss
""".split()
# The same in the section of each trained model.
OF_MODELS = """
model_name lora_rank lora_alpha lora_targets adapter quantize_base freeze_router
router_aux_loss_coef optimizer
""".split()
EXPERIMENT += [f"{model}.{name}" for model in ("actor", "critic") for name in OF_MODELS]
LENGTH = ("trainer.n_epochs", "trainer.max_steps")  # how far a run goes

Changes = dict[str, str]  # since an earlier run: key -> its old and new value, in words


@dataclass
class RunIdentity:
    """A run's trainer, its config and the contents of the files that the config names."""

    trainer: str  # the name of the config's class
    config: dict[str, Any]  # dotted key -> value
    contents: dict[str, str]  # key -> hash of the file that it names; of data.path, of the rows


def identify(config: Any, data_hash: str) -> RunIdentity:
    """Returns the identity of a run. `data_hash` is of the training rows, "" if it is unknown."""
    values = dict(flatten(yaml.safe_load(dump(config))))
    contents = {DATA: data_hash} if data_hash else {}
    for name, value in values.items():
        files = _find_files(value)
        if files and not name.startswith(("data.path", "data.test_path")):
            contents[name] = hashlib.sha256(b"".join(map(Path.read_bytes, files))).hexdigest()
    return RunIdentity(type(config).__name__, values, contents)


def _find_files(value: Any) -> list[Path]:
    """The files that a value names, as FILE or FILE:FUNCTION, also several by name."""
    if isinstance(value, dict):
        return [file for name in sorted(value) for file in _find_files(value[name])]
    if not isinstance(value, str):
        return []
    # Of os.path, since a text such as a system prompt may be no path at all, where pathlib raises.
    paths = [os.path.expanduser(text) for text in (value, value.rpartition(":")[0])]
    return [Path(path) for path in paths if os.path.isfile(path)][:1]


def find_changes(before: RunIdentity, now: RunIdentity) -> tuple[Changes, Changes]:
    """Returns (changes that make another experiment, other changes).

    Keys that only one of the two has are not compared: they are of another version of rl2.
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
            changes[name] = f"{name}: {old} -> {value}"
        elif has_same_content is False:
            changes = experiment if name == DATA else others  # code may be edited
            changes[name] = f"{name}: {value} has another content"
    return experiment, others


def _has_same_content(name: str, before: RunIdentity, now: RunIdentity) -> bool | None:
    """Returns whether the key names files of the same content. None if one of them is not known."""
    if name not in before.contents or name not in now.contents:
        return None
    return before.contents[name] == now.contents[name]


def _is_same_path(old: Any, new: Any) -> bool:
    """Returns whether both are names of one file or folder."""
    if not isinstance(old, str) or not isinstance(new, str):
        return False
    return Path(old).exists() and Path(new).exists() and Path(old).samefile(new)
