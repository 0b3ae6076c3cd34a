"""Reads the arguments of a command before Hydra does.

Hydra does not know what a misspelled key or option means, nor what an earlier release had. Here
each of them becomes a Problem that says what to write. Hydra reads the values.
"""

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rl2.config.dropped import explain_dropped
from rl2.config.help import answer_help
from rl2.config.key import schema_keys
from rl2.config.presets import KEY, has_presets
from rl2.config.problem import Problem
from rl2.config.schema import TRAINER_CONFIGS
from rl2.config.unknown import explain_unknown
from rl2.config.values import declared_key, flatten, show_value
from rl2.parallel.rank import is_first_rank

OPTIONS_HELP = (
    "keys are written key=value without dashes; there are --help [SECTION | all], --cfg job, "
    "--multirun, --config-dir DIR and --config-name NAME; options of torchrun come before -m"
)
LOOSE_REMEDY = "write key=value, and a value with spaces in quotes, as 'key=\"a value\"'"
READ_HERE = ("overrides", "config_dir", "config_name")  # Hydra answers the other options itself


@dataclass
class Arguments:
    """What a command or a call of rl2.train sets."""

    keys: dict[str, object] = field(default_factory=dict)  # dotted: of a file, or of Python
    words: list[str] = field(default_factory=list)  # KEY=VALUE in Hydra's grammar
    folder: str = ""  # where Hydra finds the files that `defaults` name; "" for nowhere else
    options: list[str] = field(default_factory=list)  # that Hydra answers itself, as --cfg job
    set_keys: set[str] = field(default_factory=set)  # of rl2, in keys and words
    problems: list[Problem] = field(default_factory=list)


def read_arguments(root: type, argv: list[str]) -> Arguments:
    """Reads the arguments of a trainer with the config class `root`. `--help` prints and exits."""
    answer_help(root, argv)
    options, unknown = get_args_parser().parse_known_intermixed_args(argv)
    arguments = Arguments(folder=options.config_dir or "")
    for word in unknown:
        if word.startswith("-"):  # not the value of such an option
            name = word.partition("=")[0]
            arguments.problems.append(Problem(name, explain_option(word)))
    if options.config_name:
        path = Path(arguments.folder, options.config_name)
        is_whole = path.suffix in (".yaml", ".yml")  # exp.v2 is no whole name
        take_file(root, path if is_whole else path.with_name(f"{path.name}.yaml"), arguments)
    for word in options.overrides:
        take_word(root, word, arguments)
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
    """Adds the keys of a config file to the arguments, but for those of an earlier release."""
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
        arguments.problems.append(Problem("--config-name", text))
        return
    values = dict(flatten(tree))
    dropped = [name for name in values if explain_dropped_key(root, name)]
    if dropped and is_first_rank():
        text = f"warning: {path} is of an earlier release: {', '.join(dropped)} are ignored"
        print(text, file=sys.stderr)
    kept = {name: value for name, value in values.items() if name not in dropped}
    take_keys(root, kept, arguments, source=str(path))


def take_word(root: type, word: str, arguments: Arguments) -> None:
    """Adds the word KEY=VALUE to the arguments, or what is wrong with it."""
    key, _, text = word.lstrip("+").partition("=")
    if not key or "=" not in word:
        arguments.problems.append(Problem("", f"{word!r} sets no key: {LOOSE_REMEDY}"))
    elif key.startswith(("hydra.", "hydra/")):
        arguments.words.append(word)
    elif all([note_key(root, *entry, arguments) for entry in named_keys(root, key, text)]):
        is_new = declared_key(key) != key or text.startswith("{")  # an entry of a map
        if text.startswith("~/"):  # Hydra takes no ~, and a shell leaves this one
            text = f'"{os.path.expanduser(text)}"'
        arguments.words.append(f"{'++' if is_new else ''}{key}={text}")


def named_keys(root: type, key: str, text: str) -> Iterable[tuple[str, object]]:
    """The keys that KEY=TEXT sets, with their values: of a section those of its mapping."""
    known = schema_keys(root)
    if text.startswith("{") and key in known and known[key].is_section:
        try:
            entries: Any = OverridesParser.create().parse_override(f"{key}={text}").value()
            return flatten(entries, prefix=f"{key}.")
        except HydraException:  # `compose` says what cannot be read
            pass
    return [(key, text)]


def take_keys(
    root: type, values: dict[str, object], arguments: Arguments, source: str = ""
) -> Arguments:
    """Adds dotted keys to the arguments, and what is wrong with them.

    `source` is the file that has them.
    """
    known = schema_keys(root)
    for name, value in values.items():
        if value is None and name in known and known[name].is_section:  # empty in a file
            continue
        if isinstance(value, str) and value.startswith("~/"):
            value = os.path.expanduser(value)
        is_hydras = name == "defaults" or name.startswith("hydra.")
        if is_hydras or note_key(root, name, value, arguments, source):
            arguments.keys[name] = value
    return arguments


def note_key(root: type, name: str, value: object, arguments: Arguments, source: str = "") -> bool:
    """Whether there is a key; notes that it is set. Else notes what to write instead."""
    known = schema_keys(root)
    problem = explain_dropped_key(root, name) or explain_dropped(f"{name}={show_value(value)}")
    if not problem and declared_key(name) not in known:
        if name == KEY and has_presets(known):
            return True
        problem = explain_unknown(name, value, known)
    if not problem:
        arguments.set_keys.add(name)
        return True
    text = f"{problem} (in {source})" if source else problem
    if text not in map(str, arguments.problems):  # of a whole section
        arguments.problems.append(Problem(name, text))
    return False


def explain_dropped_key(root: type, name: str) -> str:
    """Says that a trainer no longer has the key, or its section; "" if it never had."""
    if declared_key(name) != name:  # the user has chosen the name of an entry of a map
        return ""
    for trainer, kind in TRAINER_CONFIGS.items():
        if issubclass(root, kind):
            return explain_dropped(name) or explain_dropped(f"{trainer} {name.partition('.')[0]}.*")
    return ""
