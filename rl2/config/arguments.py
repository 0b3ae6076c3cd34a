"""Reads the arguments of a command before Hydra does.

Hydra stops at the first mistake, and does not know what was meant. Here every unknown key, option
and unreadable value becomes a Problem that says what to write, and the rest goes on to Hydra.
"""

import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import MISSING, OmegaConf
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


@dataclass
class Arguments:
    """What a command or a call of rl2.train sets."""

    words: list[str] = field(default_factory=list)  # KEY=VALUE in Hydra's grammar
    keys: dict[str, Any] = field(default_factory=dict)  # dotted, of a file or of Python code
    folder: str = ""  # where Hydra finds the files that `defaults` name; "" for nowhere else
    options: list[str] = field(default_factory=list)  # that Hydra answers itself, as --cfg job
    set_keys: set[str] = field(default_factory=set)  # all of the two
    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)

    def refuse(self, problem: Problem) -> None:
        """Adds a problem, unless an earlier key has the same one: a dropped section is one."""
        if problem.text not in [other.text for other in self.problems]:
            self.problems.append(problem)


def read_arguments(root: type, argv: list[str]) -> Arguments:
    """Reads the arguments of a trainer with the config class `root`."""
    options, unknown = get_args_parser().parse_known_intermixed_args(argv)
    arguments = Arguments(folder=options.config_dir or "")
    for word in unknown:
        if not word.startswith("-"):  # the value of such an option
            continue
        arguments.problems.append(Problem(word.partition("=")[0], MISSING, explain_option(word)))
    if options.config_name:
        path = Path(arguments.folder, options.config_name)
        path = path if path.suffix in (".yaml", ".yml") else path.with_name(f"{path.name}.yaml")
        file = read_file(path)
        if isinstance(file, Problem):
            arguments.problems.append(file)
        else:
            take_keys(root, file, arguments, source=str(path))
    take_words(root, options.overrides, arguments, is_sweep=options.multirun)
    for name in ("cfg", "package", "info"):
        if value := getattr(options, name):
            arguments.options += [f"--{name}", value]
    for name in ("resolve", "multirun", "hydra_help"):
        if getattr(options, name):
            arguments.options.append(f"--{name.replace('_', '-')}")
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


def read_file(path: Path) -> dict[str, Any] | Problem:
    """The keys of a config file, dotted."""
    key = "--config-name"
    if not path.is_file():
        return Problem(key, str(path), f"{key} {path.stem}: there is no file {path}")
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path))
    except (YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        return Problem(key, str(path), f"{path} is not readable YAML: {error}")
    if not isinstance(tree, dict):
        remedy = "write sections with keys below them, as --cfg job does"
        return Problem(key, str(path), f"{path} holds no keys: {remedy}")
    return dict(flatten(tree))


def take_keys(
    root: type, values: dict[str, Any], arguments: Arguments, source: str = ""
) -> Arguments:
    """Adds the keys of a file or of Python code to the arguments, and the problems of their names.

    `source` is the file.
    """
    dropped = [name for name in values if is_dropped(root, name)] if source else []
    if dropped:
        text = f"{source} is of an earlier release: {', '.join(dropped)} are ignored"
        arguments.warnings.append(general_problem(text))
    for name, value in values.items():
        if name in dropped:
            continue
        if value is None and explain_dropped(name):  # nothing that an old config.yaml asks for
            continue
        if name == "defaults" or name.startswith("hydra."):  # what a file says to Hydra
            arguments.keys[name] = value
            continue
        if value is None and name in schema_keys(root) and schema_keys(root)[name].is_section:
            continue  # a file may have a section without keys
        target, problem = find_target(root, name, value, arguments.folder)
        if problem:
            arguments.refuse(Problem(name, value, problem, source))
        if target:
            is_path = isinstance(value, str) and value.startswith("~/")
            arguments.keys[target] = os.path.expanduser(value) if is_path else value
            arguments.set_keys.add(target)
    return arguments


def take_words(root: type, words: list[str], arguments: Arguments, is_sweep: bool) -> None:
    """Adds the words KEY=VALUE to the arguments, and what is wrong with each of them."""
    loose = [word for word in words if not word.lstrip("+").partition("=")[0] or "=" not in word]
    if loose:
        arguments.problems.append(general_problem(explain_loose(loose)))
    for word in words:
        key, _, text = word.partition("=")
        key = key.lstrip("+")
        if word in loose:
            continue
        if key.startswith(("hydra.", "hydra/")):
            arguments.words.append(word)
            continue
        if text.startswith("~/"):  # Hydra takes no ~, and a shell leaves this one
            text = quote(os.path.expanduser(text))
        value, problem = read_value(key, text, is_sweep)
        target = "" if problem else key
        if not problem:
            target, problem = find_target(root, key, value, arguments.folder)
        if problem:
            arguments.refuse(Problem(key, value, problem))
        if target:
            is_entry = declared_key(target) != target or isinstance(value, dict)
            sign = "++" if is_entry else ""  # Hydra asks for it, since an entry of a map is new
            arguments.words.append(f"{sign}{target}={text}")
            arguments.set_keys.add(target)


def read_value(key: str, text: str, is_sweep: bool) -> tuple[Any, str]:
    """(the value of KEY=TEXT in Hydra's grammar; what is wrong with it, or "")."""
    remedy = f"if it is a text, quote it, as {shlex.quote(f'{key}={quote(text)}')}"
    if text.startswith(("[", "{")):
        remedy = "close it, with texts in double quotes, and the whole argument in single ones"
    try:
        override = OverridesParser.create().parse_override(f"value={text}")
    except HydraException:
        return text, f"{key}={text} cannot be read: {remedy}"
    if override.is_sweep_override():
        advice = f"--multirun runs a job for each; for a list write {key}=[{text}]; "
        problem = f"{key}={text} names several values, and a run has one: {advice}{remedy}"
        return text, "" if is_sweep else problem
    return override.value(), ""


def quote(text: str) -> str:
    """A text in Hydra's quotes."""
    escaped = text.replace('"', '\\"')
    return f'"{escaped}"'


def explain_loose(words: list[str]) -> str:
    """What to write in place of words that set no key: most are parts of a text with spaces."""
    listed = f"{', '.join(map(repr, words))} set{'' if words[1:] else 's'} no key"
    return f"{listed}: write key=value, and a value with spaces in quotes, as 'key=\"a value\"'"


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
        problem = explain_preset(value, folder)
        return ("", problem) if problem else (name, "")
    if dropped := explain_dropped(section_of(root, name)):
        return "", dropped
    if declared_key(name) not in known:
        return explain_unknown(name, value, known)
    if name in known and known[name].is_section:
        remedy = f"set its keys, as {name}.NAME=VALUE; --help {name} lists them"
        return "", f"{given}: {name} is a section; {remedy}"
    return name, ""
