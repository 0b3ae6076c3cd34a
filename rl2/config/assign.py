"""Sets the keys of a config, and explains unknown keys and values of a wrong type."""

import difflib
import os
from dataclasses import replace
from types import NoneType
from typing import Any, get_origin

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl2.config.arguments import Assignment
from rl2.config.dropped import explain_dropped
from rl2.config.key import Key, schema_keys
from rl2.config.presets import ALGORITHM_KEYS, explain_algorithm, has_presets
from rl2.config.problem import Problem, wrong_value
from rl2.config.schema import TRAINER_CONFIGS
from rl2.config.values import OPEN_KEYS, show_value

KIND_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list: "a list, as '{name}=[a,b]'",
    dict: "a map, as {name}.NAME=VALUE",
    NoneType: "null",
}
MICRO_BATCH = ("actor.max_length_per_device", "critic.max_length_per_device", "data.batch_size")
NEW_TOKENS = ("rollout.train_sampling_params.max_new_tokens",)
# Usual names of other trainers whose keys here have no near name -> these keys, in any trainer.
# docs/coming_from.md has more.
OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "batch_size": ("data.prompts_per_rollout", "data.batch_size"),
    "beta": ("kl.coef", "dpo.beta"),
    "clip_ratio": ("actor.clip",),
    "epsilon": ("actor.clip",),
    "eval_steps": ("trainer.test_freq",),
    "gradient_accumulation_steps": ("actor.update_per_rollout", "data.batch_size"),
    "kl_coef": ("kl.coef",),
    "kl_loss_coef": ("kl.coef",),
    "learning_rate": ("actor.lr", "critic.lr"),
    "loss_agg_mode": ("actor.average",),
    "max_completion_length": NEW_TOKENS,
    "max_prompt_length": ("data.max_length",),
    "max_response_length": NEW_TOKENS,
    "model.path": ("actor.model_name", "critic.model_name"),
    "model_name_or_path": ("actor.model_name", "critic.model_name"),
    "n": ("data.responses_per_prompt",),
    "num_generations": ("data.responses_per_prompt",),
    "num_iterations": ("actor.epochs_per_rollout", "critic.epochs_per_rollout"),
    "num_train_epochs": ("trainer.n_epochs",),
    "output_dir": ("trainer.save_dir",),
    "per_device_train_batch_size": MICRO_BATCH,
    "ppo_epochs": ("actor.epochs_per_rollout", "critic.epochs_per_rollout"),
    "ppo_mini_batch_size": ("actor.update_per_rollout", "critic.update_per_rollout"),
    "reward_funcs": ("rollout.env_path",),
    "run_name": ("trainer.experiment_name",),
    "save_steps": ("trainer.save_freq",),
    "train_batch_size": ("data.prompts_per_rollout", "data.batch_size"),
    "train_files": ("data.path",),
    "val_files": ("data.test_path",),
}


def assign(
    config: DictConfig,
    known: dict[str, Key],
    assignments: list[Assignment],
    problems: list[Problem],
) -> set[str]:
    """Sets keys of the config, which are `known`. Returns those that were set.

    A misspelled key sets the one key that it must mean, so that no other problem follows from it.
    """
    set_keys = set()
    for name, value, source in without_dropped_sections(config, assignments, problems):
        target, problem = find_target(name, value, known)
        if target:
            set_keys.add(target)
            types = known[target].types if target in known else ()
            value_problem = set_value(config, target, value, types)
            if problem is None:
                problem = value_problem
        if problem is not None:
            problems.append(replace(problem, source=source))
    return set_keys


def without_dropped_sections(
    config: DictConfig, assignments: list[Assignment], problems: list[Problem]
) -> list[Assignment]:
    """The assignments but those of sections that the trainer no longer has, each of which is one
    problem.

    In a recipe such a section may be that of an old config.yaml, without an environment. Then it
    had no effect, and it is no problem.
    """
    kind: Any = OmegaConf.get_type(config)
    [trainer] = [name for name, root in TRAINER_CONFIGS.items() if issubclass(kind, root)]
    unused = {x.source for x in assignments if x.key == "rollout.env_path" and x.value is None}
    kept = []
    for assignment in assignments:
        section = f"{trainer} {assignment.key.partition('.')[0]}.*"
        text = explain_dropped(section)
        if not text:
            kept.append(assignment)
        elif not assignment.source or assignment.source not in unused:
            problem = Problem(section, MISSING, text, assignment.source)
            if problem not in problems:
                problems.append(problem)
    return kept


def find_target(name: str, value: Any, known: dict[str, Key]) -> tuple[str, Problem | None]:
    """(the key that `name` means, or "" if that is not clear; the problem with the name)."""
    given = f"{name}={show_value(value)}"
    if dropped := explain_dropped(name) or explain_dropped(given):
        return "", Problem(name, value, dropped)
    declared = declared_key(name)
    if name != declared and declared in known:
        return name, None
    if name not in known:
        return explain_unknown(name, value, known)
    if not known[name].is_section:
        return name, None
    if value is None:  # a recipe may have a section without keys
        return "", None
    remedy = f"set its keys, as {name}.NAME=VALUE; --help {name} lists them"
    return "", wrong_value(name, value, f"{name} is a section; {remedy}")


def explain_unknown(name: str, value: Any, known: dict[str, Key]) -> tuple[str, Problem]:
    """(the key that an unknown one must mean, or ""; the problem, with what to write instead)."""
    keys = [other for other in known if not known[other].is_section]
    target = ""
    if name in ALGORITHM_KEYS and has_presets(known):
        text = explain_algorithm(str(value)) or "set algo, such as algo=grpo"
    else:
        near = near_keys(name, keys)
        declared = declared_key(name)
        others = [other for other, kind in TRAINER_CONFIGS.items() if declared in schema_keys(kind)]
        if others:  # it is no misspelled key, but may be in another section here
            last_part = declared.rpartition(".")[2]
            near = [key for key in near if key.endswith(f".{last_part}")]
        text = f"did you mean {' or '.join(near)}?" if near else "--help all lists all"
        if others:
            text = f"it is a key of {', '.join(others)}; {text}"
        elif not near:
            text += ", docs/coming_from.md those of other trainers"
        target = near[0] if len(near) == 1 else ""
    return target, Problem(name, value, f"unknown key {name}={value}: {text}")


def declared_key(name: str) -> str:
    """The name as a schema would declare it: that of the map, if it is an entry of an open one."""
    for key in OPEN_KEYS:
        if name.startswith(f"{key}."):
            return key
    return name


def near_keys(key: str, keys: list[str]) -> list[str]:
    """Up to three keys that a misspelled one may mean.

    Those of another trainer's name, or that it begins, else near names, else names with a near last
    part.
    """
    key = key.lower()
    near = other_names(key, keys) or [name for name in keys if name.startswith(f"{key}_")]
    near = near or difflib.get_close_matches(key, keys, 3, 0.8)
    if not near:
        last_part = difflib.SequenceMatcher(b=key.rpartition(".")[2])
        for name in keys:
            last_part.set_seq1(name.rpartition(".")[2])
            if last_part.ratio() >= 0.7:
                near.append(name)
    return near[:3]


def other_names(key: str, keys: list[str]) -> list[str]:
    """The `keys` that a key of another trainer means: of the same section, if it has some."""
    parts = key.split(".")
    for start in range(len(parts)):
        meant = OTHER_NAMES.get(".".join(parts[start:]), ())
        near = [name for name in meant if name in keys]
        if near:
            return [name for name in near if name.split(".")[0] in parts[:start]] or near
    return []


def set_value(config: DictConfig, name: str, value: Any, types: tuple[Any, ...]) -> Problem | None:
    """Sets the key to a value of one of the `types`, () for any. Returns the problem."""
    if types and set(types) <= {str, dict, NoneType}:
        problem = check_text(name, value)
        if problem is not None:
            return problem
    try:
        OmegaConf.update(config, name, convert(value, types), force_add=not types)
    except OmegaConfBaseException:
        words = [KIND_WORDS[get_origin(kind) or kind] for kind in types or (dict,)]
        expected = " or ".join(words).format(name=name)
        return Problem(name, value, f"{name}={show_value(value)}: expected {expected}")
    return None


def check_text(name: str, value: Any) -> Problem | None:
    """The problem of a value for a key that takes a text, which OmegaConf would convert."""
    if value == "":
        remedy = "write a value, or leave the key out; is a shell variable unset?"
        return Problem(name, value, f"{name}= is empty: {remedy}")
    given = f"{name}={show_value(value)}"
    if isinstance(value, bool):
        remedy = f"this key is a text, so quote it, as '{name}=\"{show_value(value)}\"'"
        return Problem(name, value, f"{given}: {remedy}")
    if isinstance(value, list):
        remedy = "it takes one text"
        if name.endswith("path"):
            remedy = "give one path; of several files give the folder that they are in"
        return Problem(name, value, f"{given}: {remedy}")
    return None


def convert(value: Any, types: tuple[Any, ...]) -> Any:
    """1e3 as 1000 for a whole number. A text that begins with ~/ is a path in the home folder."""
    if int in types and isinstance(value, float) and value.is_integer():
        return int(value)
    if dict in types and type(value) in (int, float):  # a text, as OmegaConf would make of it
        return str(value)
    if float in types and type(value) is int:  # a key that may also be a text would take "1"
        return float(value)
    is_path = isinstance(value, str) and value.startswith("~/")
    return os.path.expanduser(value) if is_path else value
