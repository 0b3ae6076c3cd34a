"""Reads the arguments of a command before Hydra does.

Hydra stops at the first mistake, and does not know what was meant. Here every unknown key, option
and unreadable value becomes a Problem that says what to write, and the rest goes on to Hydra.
"""

import os
import shlex
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rl2.config.dropped import explain_dropped
from rl2.config.key import schema_keys
from rl2.config.presets import KEY, explain_preset, has_presets
from rl2.config.problem import Problem, general_problem
from rl2.config.schema import TRAINER_CONFIGS
from rl2.config.unknown import explain_unknown
from rl2.config.values import declared_key, flatten, show_value

OPTIONS_HELP = (
    "keys are written key=value without dashes; there are --help [SECTION | all], --cfg job, "
    "--multirun, --config-dir DIR and --config-name NAME; options of torchrun come before -m"
)
LOOSE_REMEDY = "write key=value, and a value with spaces in quotes, as 'key=\"a value\"'"
READ_HERE = ("overrides", "config_dir", "config_name")  # Hydra answers the other options itself
# A part of OmegaConf's words -> what the key takes.
EXPECTED = {
    "converted to Float": "expected a number",
    "converted to Integer": "expected a whole number",
    "valid bool": "expected true or false",
    "Union[bool, int]": "expected true, false or a whole number",
    "ListConfig": "expected a list, as '{key}=[a,b]'",
    "to Dict": "expected a map, as {key}.NAME=VALUE",
    "is not Optional": "it takes no null",
}


class Sweep(str):
    """Several values of a key, for --multirun."""


@dataclass
class Arguments:
    """What a command or a call of rl2.train sets."""

    keys: dict[str, Any] = field(default_factory=dict)  # dotted
    words: list[str] = field(default_factory=list)  # that Hydra reads: its own keys, and sweeps
    folder: str = ""  # where Hydra finds the files that `defaults` name; "" for nowhere else
    options: list[str] = field(default_factory=list)  # that Hydra answers itself, as --cfg job
    set_keys: set[str] = field(default_factory=set)  # all keys but those of Hydra
    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)


def read_arguments(root: type, argv: list[str]) -> Arguments:
    """Reads the arguments of a trainer with the config class `root`."""
    options, unknown = get_args_parser().parse_known_intermixed_args(argv)
    arguments = Arguments(folder=options.config_dir or "")
    for word in unknown:
        if word.startswith("-"):  # not the value of such an option
            name = word.partition("=")[0]
            arguments.problems.append(Problem(name, MISSING, explain_option(word)))
    if options.config_name:
        path = Path(arguments.folder, options.config_name)
        is_whole = path.suffix in (".yaml", ".yml")  # exp.v2 is no whole name
        take_file(root, path if is_whole else path.with_name(f"{path.name}.yaml"), arguments)
    for word in options.overrides:
        take_word(root, word, arguments, is_multirun=options.multirun)
    for name, value in vars(options).items():
        if value and name not in READ_HERE:
            arguments.options.append(f"--{name.replace('_', '-')}")
            arguments.options += [value] if isinstance(value, str) else []
    return arguments


def explain_option(word: str) -> str:
    """What to write in place of an option that does not exist."""
    name, _, value = word.partition("=")
    if text := explain_dropped(name):
        return text
    key = name.lstrip("-")
    if "." in key:
        return f"{name} has dashes: write {key}={value or 'VALUE'}"
    return f"{name}: unknown option; {OPTIONS_HELP}"


def take_file(root: type, path: Path, arguments: Arguments) -> None:
    """Adds the keys of a config file to the arguments."""
    tree: Any = None
    reason = "holds no keys: write sections with keys below them"
    try:
        tree = OmegaConf.to_container(OmegaConf.create(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        reason = "does not exist"
    except (YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        reason = f"is no readable YAML: {error}"
    if not isinstance(tree, dict):
        text = f"--config-name: {path} {reason}"
        arguments.problems.append(Problem("--config-name", str(path), text))
        return
    values = dict(flatten(tree))
    dropped = [name for name in values if is_dropped(root, name)]
    if dropped:
        text = f"{path} is of an earlier release: {', '.join(dropped)} are ignored"
        arguments.warnings.append(general_problem(text))
    kept = {name: value for name, value in values.items() if name not in dropped}
    take_keys(root, kept, arguments, source=str(path))


def take_word(root: type, word: str, arguments: Arguments, is_multirun: bool) -> None:
    """Adds the word KEY=VALUE, in Hydra's grammar, to the arguments, or what is wrong with it."""
    key, _, text = word.lstrip("+").partition("=")
    if not key or "=" not in word:
        arguments.problems.append(general_problem(f"{word!r} sets no key: {LOOSE_REMEDY}"))
        return
    if key.startswith(("hydra.", "hydra/")):
        arguments.words.append(word)
        return
    # Hydra takes no ~, and a shell leaves this one.
    value, problem = (text, "") if text.startswith("~/") else read_value(key, text, is_multirun)
    if problem:
        arguments.problems.append(Problem(key, value, problem))
    else:
        take_keys(root, {key: value}, arguments)


def take_keys(
    root: type, values: dict[str, Any], arguments: Arguments, source: str = ""
) -> Arguments:
    """Adds dotted keys to the arguments, and what is wrong with them.

    A misspelled key is the one that it must mean, so that no other problem follows from it.
    `source` is the file that has them.
    """
    known = schema_keys(root)
    for name, value in values.items():
        if name == "defaults" or name.startswith("hydra."):  # what a file says to Hydra
            arguments.keys[name] = value
            continue
        if value is None and name in known and known[name].is_section:  # empty in a file
            continue
        if isinstance(value, str) and value.startswith("~/"):
            value = os.path.expanduser(value)
        target, problem = find_target(root, name, value, arguments.folder)
        if target and target != KEY and not isinstance(value, Sweep):
            if reason := explain_type(root, target, value):
                problem = problem or f"{target}={show_value(value)}: {reason}"
                target = ""
        # A dropped section is one problem.
        if problem and problem not in [other.text for other in arguments.problems]:
            arguments.problems.append(Problem(name, value, problem, source))
        if not target:
            continue
        arguments.set_keys.add(target)
        if isinstance(value, Sweep):
            sign = "++" if declared_key(target) != target else ""  # an entry of a map is new
            arguments.words.append(f"{sign}{target}={value}")
        else:
            arguments.keys[target] = value
    return arguments


@cache
def scratch_tree(root: type) -> DictConfig:
    """A config on which values are tried."""
    tree: DictConfig = OmegaConf.structured(root)
    return tree


def explain_type(root: type, name: str, value: Any) -> str:
    """Why OmegaConf does not take the value for a key of the schema; "" if it does."""
    try:
        OmegaConf.update(scratch_tree(root), name, value, force_add=True)
    except OmegaConfBaseException as error:
        line = str(error).splitlines()[0]
        reasons = [words.format(key=name) for part, words in EXPECTED.items() if part in line]
        return (reasons or [line])[0]
    return ""


def read_value(key: str, text: str, is_multirun: bool) -> tuple[Any, str]:
    """(the value of KEY=TEXT in Hydra's grammar; what is wrong with it, or "")."""
    remedy = f"if it is a text, quote it, as {shlex.quote(f'{key}={quote(text)}')}"
    if text.startswith(("[", "{")):
        remedy = "close it, with texts in double quotes, and the whole argument in single ones"
    try:
        override = OverridesParser.create().parse_override(f"value={text}")
    except HydraException:
        return text, f"{key}={text} cannot be read: {remedy}"
    if not override.is_sweep_override():
        return override.value(), ""
    advice = f"--multirun runs a job for each; for a list write {key}=[{text}]; "
    problem = f"{key}={text} names several values, and a run has one: {advice}{remedy}"
    return Sweep(text), "" if is_multirun else problem


def quote(text: str) -> str:
    """A text in Hydra's quotes."""
    escaped = text.replace('"', '\\"')
    return f'"{escaped}"'


def section_of(root: type, name: str) -> str:
    """The section of a key in a trainer's config, as the table of dropped ones has it."""
    [trainer] = [trainer for trainer, kind in TRAINER_CONFIGS.items() if issubclass(root, kind)]
    return f"{trainer} {name.partition('.')[0]}.*"


def is_dropped(root: type, name: str) -> bool:
    """Whether an earlier release had the key."""
    return bool(explain_dropped(name) or explain_dropped(section_of(root, name)))


def find_target(root: type, name: str, value: Any, folder: str) -> tuple[str, str]:
    """(the key that `name` means, or "" if that is not clear; what is wrong with it, or "").

    A misspelled key sets the one that it must mean, so that no other problem follows from it.
    `folder` is that of --config-dir.
    """
    known = schema_keys(root)
    given = f"{name}={show_value(value)}"
    if dropped := explain_dropped(name) or explain_dropped(given):
        return "", dropped
    if name == KEY and has_presets(known):
        # Hydra tries each name of a sweep, which a file in the folder may have too.
        problem = "" if isinstance(value, Sweep) else explain_preset(value, folder)
        return ("", problem) if problem else (name, "")
    if dropped := explain_dropped(section_of(root, name)):
        return "", dropped
    if declared_key(name) not in known:
        return explain_unknown(name, value, known)
    if name in known and known[name].is_section:
        remedy = f"set its keys, as {name}.NAME=VALUE; --help {name} lists them"
        return "", f"{given}: {name} is a section; {remedy}"
    return name, ""
