"""What differs between an earlier run's config and today's: is it the same experiment?"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from rl2.config.key import schema_keys
from rl2.config.schema import dump
from rl2.config.values import flatten
from rl2.user_files import find_env_file

DATA = "data.path"
# Where and how a run resumes: these say nothing about the experiment.
UNLISTED = ("trainer.resume", "trainer.save_dir", "trainer.experiment_name")
# Patterns of keys that name, place or watch a run, or keep more of it. They change no number.
HARMLESS = (
    "trainer.project",
    "trainer.experiment_name",
    "trainer.loggers",
    "trainer.disable_wandb",
    "trainer.resume",
    "trainer.keep_checkpoints",
    "trainer.report_freq",  # of an earlier release
    "trainer.test_freq",
    "trainer.watchdog",
    "trainer.save_tokens",
    "trainer.max_skipped_updates",
    "rollout.check_weights",
    "*.save_dir",
    "*.save_freq",
    "*.save_optimizer",
)
LENGTH = ("trainer.n_epochs", "trainer.max_steps")  # how far a run goes


@dataclass(frozen=True)
class Change:
    """What differs between an earlier run and this one."""

    key: str
    text: str  # old and new value, with the key

    def __str__(self) -> str:
        return self.text

    @property
    def is_harmless(self) -> bool:
        """Whether it changes no number."""
        return any(fnmatch(self.key, pattern) for pattern in HARMLESS)


@dataclass
class RunIdentity:
    """A run's trainer, its config and the contents of the files that the config names."""

    trainer: str  # the name of the config's class
    config: dict[str, Any]  # dotted key -> value
    contents: dict[str, str]  # key -> hash of the file or folder that it names


def identify(config: Any, data_hash: str) -> RunIdentity:
    """Returns the identity of a run. `data_hash` is of the training rows, "" if it is unknown."""
    values = dict(flatten(yaml.safe_load(dump(config))))
    contents = {DATA: data_hash} if data_hash else {}
    for key, files in _user_files(config, values):
        contents[key] = _hash_files(files)
    return RunIdentity(type(config).__name__, values, contents)


def _hash_files(files: list[Path]) -> str:
    """Returns the SHA-256 of a file, or of those of several files."""
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _user_files(config: Any, values: dict[str, Any]) -> Iterator[tuple[str, list[Path]]]:
    """Yields (key, files) of what the user has written: environments, loss, estimator, template,
    system prompt and solved examples.
    """
    for name, key in schema_keys(type(config)).items():
        if key.functions and values[name] not in key.functions:
            yield name, [Path(values[name].rpartition(":")[0]).expanduser()]
    template = values["data.chat_template"]
    if template not in (None, "plain"):
        yield "data.chat_template", [Path(template).expanduser()]
    if config.data.system_prompt_file is not None:
        yield "data.system_prompt", [config.data.system_prompt_file]
    examples = values.get("data.few_shot")  # a dataset of the hub is no file
    if examples and Path(examples).expanduser().is_file():
        yield "data.few_shot", [Path(examples).expanduser()]
    paths = config.rollout.env_paths if hasattr(config, "rollout") else {}
    if paths:
        yield "rollout.env_path", [find_env_file(paths[key]) for key in sorted(paths)]


def find_changes(
    kind: type, before: RunIdentity, now: RunIdentity
) -> tuple[list[Change], list[Change]]:
    """Returns (changes that make another experiment, other changes).

    `kind` is the class of today's config. Keys that only one of the two has are not compared: they
    are of another version of rl2.
    """
    if before.trainer != now.trainer:
        return [Change("", f"the trainer: {before.trainer} -> {now.trainer}")], []
    identity_keys = {name for name, key in schema_keys(kind).items() if key.identity}
    experiment: list[Change] = []
    others: list[Change] = []
    for name, value in now.config.items():
        old = before.config.get(name, value)
        has_same_content = _has_same_content(name, before, now)
        if old != value and name not in UNLISTED:
            is_same = has_same_content or _is_same_path(old, value)
            changes = experiment if name in identity_keys and not is_same else others
            changes.append(Change(name, f"{name}: {old} -> {value}"))
        elif has_same_content is False:
            changes = experiment if name == DATA else others  # code may be edited
            changes.append(Change(name, f"{name}: {value} has another content"))
    return experiment, others


def find_ignored_changes(changes: Iterable[Change]) -> list[Change]:
    """Returns the changes that would have no effect on a finished run, but are meant to."""
    return [change for change in changes if not change.is_harmless and change.key not in LENGTH]


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
