"""Reads the arguments of a command: options, key=value in Hydra's grammar, and recipe files."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rl2.config.dropped import explain_dropped
from rl2.config.problem import Problem, general_problem
from rl2.config.values import flatten

OPTIONS = {"--cfg": "job", "--config-dir": "DIR", "--config-name": "NAME"}  # each takes a value
OPTIONS_HELP = (
    "keys are written key=value without dashes; there are --help [SECTION | all], --cfg job, "
    "--config-dir DIR and --config-name NAME; options of torchrun come before -m"
)
NEXT_ARGUMENT = r"-\D|[\w.]+="  # how an option or a key=value begins
# A key and its = that are several arguments; \0 is between two arguments.
SPACED_KEY = rf"(?<![^\0])(\w[\w.]*)(?:\0=\0?|=\0)(?!{NEXT_ARGUMENT})"
# What Hydra's grammar does not take in a text without quotes, and what it takes in lists and maps.
NEEDS_QUOTES = r"[^\w/\\+.$%*@?|: -]"
NEEDS_QUOTES_IN_LIST = r"[^\w/\\+.$%*@?|: \[\]{},-]"


class Assignment(NamedTuple):
    key: str
    value: Any
    source: str = ""  # the recipe file; "" for an argument


@dataclass
class Arguments:
    """What the arguments of a command say, before it is known which keys exist."""

    options: dict[str, str] = field(default_factory=dict)  # by name, with the dashes
    # Those of the recipe, and then those of the arguments, so that the last one counts.
    assignments: list[Assignment] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def read_arguments(argv: list[str]) -> Arguments:
    """Reads options, the recipe file that they name, and key=value words."""
    arguments = Arguments()
    words = read_options(join_spaced_words(argv, arguments.problems), arguments)
    recipe = read_recipe(arguments.options)
    if isinstance(recipe, Problem):
        arguments.problems.append(recipe)
    else:
        arguments.assignments += recipe
    for word in words:
        if is_loose(word):
            continue
        override = read_override(word)
        if isinstance(override, Problem):
            arguments.problems.append(override)
        else:
            arguments.assignments.append(override)
    arguments.problems += explain_loose_words(words)
    return arguments


def join_spaced_words(argv: list[str], problems: list[Problem]) -> list[str]:
    """The arguments: `key = value`, `key =value` and `key= value` become one, and a problem."""
    text = "\0".join(argv)
    for key in re.findall(SPACED_KEY, text):
        message = f"{key}= has spaces at its =: write it without them"
        problems.append(Problem(key, MISSING, message))
    return re.sub(SPACED_KEY, r"\1=", text).split("\0") if argv else []


def read_options(argv: list[str], arguments: Arguments) -> list[str]:
    """Reads `--name value` and `--name=value`. Returns the other words."""
    others = []
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if not name.startswith("-"):
            others.append(word)
            continue
        if not equals and words and not re.match(NEXT_ARGUMENT, words[0]):
            value = words.pop(0)
        if name not in OPTIONS:
            arguments.problems.append(Problem(name, value, explain_option(name, value)))
        elif not value or (name == "--cfg" and value != "job"):
            message = f"{name} needs a value: {name} {OPTIONS[name]}"
            arguments.problems.append(Problem(name, value, message))
        else:
            arguments.options[name] = value
    return others


def explain_option(name: str, value: str) -> str:
    """What to write in place of an option that does not exist."""
    if text := explain_dropped(name):
        return text
    key = name.lstrip("-")
    if "." in key:
        return f"{name} has dashes: write {key}={value or 'VALUE'}"
    return f"{name}: unknown option; {OPTIONS_HELP}"


# Recipes.


def read_recipe(options: dict[str, str]) -> list[Assignment] | Problem:
    """The assignments of the recipe file that the options name, if they name one."""
    name = options.get("--config-name", "")
    if not name and "--config-dir" in options:
        remedy = "the name of the file in that folder, with or without .yaml"
        message = f"--config-dir needs --config-name: {remedy}"
        return Problem("--config-dir", options["--config-dir"], message)
    if not name:
        return []
    file = name if name.endswith((".yaml", ".yml")) else name + ".yaml"
    path = Path(options.get("--config-dir", "."), file)
    if not path.is_file():
        message = f"--config-name {name}: there is no file {path}"
        return Problem("--config-name", name, message)
    try:
        recipe = OmegaConf.to_container(OmegaConf.load(path))
    except (YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        return Problem("--config-name", name, f"{path} is not readable YAML: {error}")
    if not isinstance(recipe, dict):
        remedy = "write sections with keys below them, as --cfg job does"
        return Problem("--config-name", name, f"{path} holds no keys: {remedy}")
    return [Assignment(key, value, str(path)) for key, value in flatten(recipe)]


# Words that set keys.


def read_override(word: str) -> Assignment | Problem:
    """A `key=value` argument in Hydra's grammar."""
    key, equals, text = word.partition("=")
    if key[:1] in ("+", "~"):
        remedy = "every key exists, so + and ~ are not needed"
        return general_problem(f"{word!r} sets no key: {remedy}")
    if not key or not equals:
        return general_problem(f"{word!r} sets no key: write key=value")
    if text.startswith("~/"):  # Hydra takes no ~
        return Assignment(key, text)
    try:
        override = OverridesParser.create().parse_override(f"value={text}")
    except HydraException:
        return Problem(key, text, explain_quotes(key, text))
    if override.is_sweep_override():
        remedy = f"for a list write {key}=[{text}], for a text {quote_for_shell(key, text)}"
        message = f"{word} names several values, and a run has one: {remedy}"
        return Problem(key, text, message)
    return Assignment(key, override.value())


def explain_quotes(key: str, text: str) -> str:
    """Which character makes the value unreadable, and how to quote it."""
    is_list = text[:1] in ("[", "{")
    match = re.search(NEEDS_QUOTES_IN_LIST if is_list else NEEDS_QUOTES, text, re.ASCII)
    remedy = f"write {quote_for_shell(key, text)}"
    if is_list and not match:
        remedy = "a bracket is missing; put the whole argument in single quotes"
    elif match and is_list:
        item = f'as in "a{match[0]}b", and the whole argument in single ones'
        remedy = f"put the item with {match[0]!r} in double quotes, {item}"
    elif match and match[0] in "\u201c\u201d\u2018\u2019":
        remedy = f"{match[0]} is a typographic quote; type straight ones, ' or \""
    elif match:
        place = f"after {text[: match.start()]!r}" if match.start() else "at its start"
        remedy = f"{match[0]!r} {place} needs quotes; {remedy}"
        if match[0] in ",;=" and match.end() in (1, len(text)):
            remedy += f", or without the {match[0]!r} if it is a slip"
    return f"{key}={text} cannot be read: {remedy}"


def quote_for_shell(key: str, text: str) -> str:
    """The argument that sets the key to this text, as one types it in a shell."""
    escaped = text.replace('"', '\\"')
    return shlex.quote(f'{key}="{escaped}"')


def is_loose(word: str) -> bool:
    """Whether an argument is not meant to set or to remove a key."""
    return "=" not in word and word[:1] not in ("+", "~")


def explain_loose_words(words: list[str]) -> Iterator[Problem]:
    """A problem for each run of arguments that set no key: most are parts of a text with spaces."""
    before = ""  # the argument that sets a key
    for are_loose, group in groupby(words, is_loose):
        arguments = list(group)
        if not are_loose:
            before = arguments[-1]
            continue
        listed = ", ".join(map(repr, arguments))
        text = f"{listed} set{'s' if len(arguments) == 1 else ''} no key"
        text += ": write key=value"
        if before and not re.match(r"\w+[.][\w.]+:", arguments[0]):  # not key:value
            key, _, value = before.partition("=")
            whole = quote_for_shell(key, " ".join([value, *arguments]))
            text += f"; if this is the rest of {key}, quote the whole: {whole}"
        yield general_problem(text)


def find_duplicates(assignments: list[Assignment]) -> Iterator[Problem]:
    """A warning for each argument that sets a key to another value than the first one does."""
    first: dict[str, Any] = {}
    for key, value, source in assignments:
        if not source and first.setdefault(key, value) != value:
            message = f"{key} is set to {first[key]} and to {value}; the last value counts"
            yield Problem(key, value, message)
