"""From the command line to a checked config: overrides, recipes, near names and `--help`.

`parse(PPOConfig, argv)` is the entry that all trainers share.
"""

import difflib
import json
import os
import re
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple, NoReturn, get_origin

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rl2.config.key import Key, schema_keys
from rl2.config.key_rules import (
    check_choices,
    drop_elsewhere,
    find_unused,
    follow_keys,
    get_value,
)
from rl2.config.rules import validate
from rl2.config.synonyms import find_synonym
from rl2.error_report import report_error
from rl2.parallel.mesh import is_first_rank

OPTIONS = {"--cfg": "job", "--config-dir": "DIR", "--config-name": "NAME"}  # each takes a value
OPTIONS_HELP = (
    "keys are written key=value without dashes; there are --help [SECTION | all], --cfg job, "
    "--plan, --config-dir DIR and --config-name NAME"
)
TORCHRUN_OPTION = r"--?(nproc|nnodes|node|standalone|master|rdzv|max.restarts|role|log.dir)"
NEXT_ARGUMENT = r"-\D|[\w.]+="  # how an option or a key=value begins
SECONDS_FOR_FIRST_RANK = 1.0  # to print the problems, which all find at about the same time
HELP_COLUMN = 40  # where the explanations of the short help begin
# Dicts, whose keys the schema does not list.
OPEN_KEYS = (
    "rollout.engine_args",
    "rollout.reward_weights",
    "data.columns",
    "data.chat_template_kwargs",
    "data.test_path",
)
KIND_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list: "a list, as '{name}=[a,b]'",
    dict: "a map, as {name}.NAME=VALUE",
    NoneType: "null",
}
# What Hydra's grammar does not take in a text without quotes, and what it takes in lists and maps.
NEEDS_QUOTES = r"[^\w/\\+.$%*@?|: -]"
NEEDS_QUOTES_IN_LIST = r"[^\w/\\+.$%*@?|: \[\]{},-]"


FindProblems = Callable[[Any], dict[str, str]]  # config -> the problem of each wrong key


class Assignment(NamedTuple):
    key: str
    value: Any
    source: str = ""  # where it was written, in words that follow a message


def parse(
    root: type,
    argv: list[str],
    find_problems: FindProblems | None = None,
    elsewhere: tuple[str, ...] = (),
) -> Any:
    """The config that the arguments ask for, an instance of `root`.

    `root` is the config class of a trainer or a subclass of one, whose checks it has then.

    `--help` and `--cfg job` print and exit. If there are problems, rank 0 prints all of them and
    every rank exits with status 2. `find_problems(config)` tries what the config names, such as the
    data. It is called only if there are problems, to show all of them together.

    `elsewhere` are the beginnings of keys whose problems do not count, for a job that will run on
    another machine. Then nothing is warned of.
    """
    if "--plan" in argv:
        start_plan(root, argv)
    if {"-h", "--help"} & set(argv):
        show_help(root, argv)
    problems: list[str] = []
    options, words = read_options(join_spaced_words(argv, problems), problems)
    recipe = read_recipe(options, problems)
    overrides = read_overrides(words, problems)
    config = OmegaConf.structured(root)
    set_keys = assign(root, config, recipe + overrides, problems)
    follow_keys(config, set_keys)
    result, missing = to_object(config)
    shows_config = "--cfg" in options
    if not shows_config:
        tried_keys = set_keys | {problem.partition("=")[0] for problem in problems}
        unset = [key for key in missing if key not in tried_keys]
        problems += [f"{key} is missing: {schema_keys(root)[key].help}" for key in unset]
    if shows_config and not problems + check_choices(result):
        print_and_exit(OmegaConf.to_yaml(config, resolve=True))
    config_problems, warnings = validate(result, set_keys)
    problems += config_problems
    problems, warnings = drop_elsewhere(problems, warnings, elsewhere)
    if problems and find_problems:
        problems = add_new_problems(problems, find_problems(result))
    report(problems, find_duplicates(overrides) + warnings)
    return result


def start_plan(root: type, argv: list[str]) -> NoReturn:
    """Goes on as `python -m rl2 plan` of this trainer on rank 0; the other ranks end."""
    if not is_first_rank():
        sys.exit(0)
    argv.remove("--plan")
    trainer = root.__name__.removesuffix("Config").lower()
    command = [sys.executable, "-m", "rl2", "plan", trainer, *argv]
    os.execv(sys.executable, command)


def add_new_problems(problems: list[str], by_key: dict[str, str]) -> list[str]:
    """The problems (KEY=VALUE ...), and those of further keys, which `by_key` gives."""
    known_keys = {problem.partition("=")[0] for problem in problems}
    return problems + [by_key[key] for key in by_key if key not in known_keys]


def report(problems: list[str], warnings: list[str]) -> None:
    """Prints them on rank 0. Exits with status 2 if there are problems."""
    if problems:
        plural = "s" if len(problems) > 1 else ""
        lines = [f"{len(problems)} problem{plural} in the configuration:"]
        lines += [f"  - {problem}" for problem in problems]
        if is_first_rank():
            report_error("\n".join(lines))
        else:  # torchrun ends the first rank as soon as another one ends
            time.sleep(SECONDS_FOR_FIRST_RANK)
        sys.exit(2)
    for warning in warnings:
        if is_first_rank():
            print(f"warning: {warning}", file=sys.stderr, flush=True)


def print_and_exit(text: str) -> NoReturn:
    """Prints the answer to an option such as --help, on rank 0, and ends the program."""
    try:
        if is_first_rank():
            print(text.rstrip("\n"), flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)


def dump(config: Any) -> str:
    """The config as YAML that --config-name reads back."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


# Reading. What is wrong is added to `problems`.


def join_spaced_words(argv: list[str], problems: list[str]) -> list[str]:
    """The arguments: `key = value`, `key =value` and `key= value` become one, and a problem."""
    words: list[str] = []
    for word in argv:
        previous = words[-1] if words else ""
        is_key = re.fullmatch(r"\w[\w.]*", previous)
        continues_key = is_key and word.startswith("=")
        is_value = re.fullmatch(r"\w[\w.]*=", previous) and not re.match(NEXT_ARGUMENT, word)
        if continues_key or is_value:
            words[-1] = previous + word
        else:
            words.append(word)
        if is_value or (continues_key and word != "="):
            problems.append(f"{words[-1]} has spaces at its =: write it without them")
    return words


def read_options(argv: list[str], problems: list[str]) -> tuple[dict[str, str], list[str]]:
    """(options by name, overrides). An option is `--name value` or `--name=value`."""
    options = {}
    overrides = []
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if not name.startswith("-"):
            overrides.append(word)
            continue
        if not equals and words and not re.match(NEXT_ARGUMENT, words[0]):
            value = words.pop(0)
        if re.match(TORCHRUN_OPTION, word):
            place = "options of torchrun stand before -m"
            problems.append(f"{word} is no option of the trainer: {place}")
        elif name not in OPTIONS:
            problems.append(f"{word} is no option: {OPTIONS_HELP}")
        elif not value:
            problems.append(f"{name} needs a value: {name} {OPTIONS[name]}")
        else:
            options[name] = value
    if options.get("--cfg", "job") != "job":
        problems.append(f"--cfg {options['--cfg']}: the only choice is job")
    return options, overrides


def read_recipe(options: dict[str, str], problems: list[str]) -> list[Assignment]:
    """The assignments of the recipe file that the options name."""
    name = options.get("--config-name", "")
    file = name if name.endswith((".yaml", ".yml")) else name + ".yaml"
    path = Path(options.get("--config-dir", "."), file)
    if not name:
        if "--config-dir" in options:
            remedy = "the name of the file in that folder, with or without .yaml"
            problems.append(f"--config-dir needs --config-name: {remedy}")
        return []
    if not path.is_file():
        problems.append(f"--config-name {name}: there is no file {path}")
        return []
    try:
        recipe = OmegaConf.to_container(OmegaConf.load(path))
    except (YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        problems.append(f"{path} is not readable YAML: {error}")
        return []
    if not isinstance(recipe, dict):
        remedy = "write sections with keys below them, as --cfg job does"
        problems.append(f"{path} holds no keys: {remedy}")
        return []
    return [Assignment(key, value, f" (in {path})") for key, value in flatten(recipe)]


def flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every key in nested dicts."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value and key not in OPEN_KEYS:
            yield from flatten(value, key + ".")
        else:
            yield key, value


def read_overrides(words: list[str], problems: list[str]) -> list[Assignment]:
    """The assignments of the `key=value` arguments, in Hydra's grammar."""
    assignments = []
    parser = OverridesParser.create()
    for word in words:
        key, equals, text = word.partition("=")
        if key[:1] in ("+", "~"):
            problems.append(f"{word!r} sets no key: every key exists, so + and ~ are not needed")
            continue
        if not key or not equals:
            problems.append(f"{word!r} sets no key: write key=value")
            continue
        is_readable_key = re.fullmatch(r"\w+(\.\w+)*", key)
        if text.startswith("~/") or not is_readable_key:  # Hydra takes neither
            assignments.append(Assignment(key, text))
            continue
        try:
            override = parser.parse_override(word)
        except HydraException:
            problems.append(explain_quotes(key, text))
            continue
        if override.is_sweep_override():
            remedy = f"for a list write {key}=[{text}], for a text {quote_for_shell(key, text)}"
            problems.append(f"{word} names several values, and a run has one: {remedy}")
        else:
            assignments.append(Assignment(key, override.value()))
    return assignments


def explain_quotes(key: str, text: str) -> str:
    """Which character makes the value unreadable, and how to quote it."""
    is_list = text[:1] in ("[", "{")
    found = re.search(NEEDS_QUOTES_IN_LIST if is_list else NEEDS_QUOTES, text, re.ASCII)
    problem = f"{key}={text} cannot be read"
    if found and is_list:
        item = f'as in "a{found[0]}b", and the whole argument in single ones'
        return f"{problem}: put the item with {found[0]!r} in double quotes, {item}"
    if is_list:
        return f"{problem}: a bracket is missing; put the whole argument in single quotes"
    if not found:
        return f"{problem}: write {quote_for_shell(key, text)}"
    if found[0] in "\u201c\u201d\u2018\u2019":
        return f"{problem}: {found[0]} is a typographic quote; type straight ones, ' or \""
    place = f"after {text[: found.start()]!r}" if found.start() else "at its start"
    return f"{problem}: {found[0]!r} {place} needs quotes; write {quote_for_shell(key, text)}"


def quote_for_shell(key: str, text: str) -> str:
    """The argument that sets the key to this text, as one types it in a shell."""
    escaped = text.replace('"', '\\"')
    return shlex.quote(f'{key}="{escaped}"')


def find_duplicates(overrides: list[Assignment]) -> list[str]:
    """A warning for each key that the arguments set to several values."""
    values_of: dict[str, list[str]] = {}
    for key, value, _ in overrides:
        values_of.setdefault(key, []).append(str(value))
    warnings = []
    for key, values in values_of.items():
        if len(set(values)) > 1:
            warnings.append(f"{key} is set to {' and to '.join(values)}; the last value counts")
    return warnings


# Setting keys.


def assign(root: type, config: Any, assignments: list[Assignment], problems: list[str]) -> set[str]:
    """Sets the keys of a config of the class `root`. Returns the keys that were set.

    A misspelled key sets the one key that it must mean, so that no other problem follows from it.
    """
    set_keys: set[str] = set()
    known = schema_keys(root)
    for name, value, source in assignments:
        if name in known and known[name].is_section:
            if value is not None:  # a recipe may have a section without keys
                remedy = f"set its keys, as {name}.NAME=VALUE; --help {name} lists them"
                problems.append(f"{name}={value}: {name} is a section; {remedy}{source}")
            continue
        candidates = [name]
        if name not in known and not name.startswith(tuple(key + "." for key in OPEN_KEYS)):
            hint, candidates = explain_unknown(name, known)
            problems.append(f"unknown key {name}={value}{hint}{source}")
        if len(candidates) == 1:
            target = candidates[0]
            set_keys.add(target)
            problem = set_value(
                config, target, value, known[target].types if target in known else ()
            )
            if problem and target == name:
                problems.append(problem + source)
    check_references(root, config, set_keys, problems)
    return set_keys


def check_references(root: type, config: Any, set_keys: set[str], problems: list[str]) -> None:
    """Finds each ${OTHER.KEY} that cannot be resolved. Its key is set to the default."""
    for name in sorted(set_keys):
        try:
            OmegaConf.select(config, name)
        except OmegaConfBaseException as error:
            problems.append(f"{name}: {str(error).splitlines()[0]}")
            default = get_value(root(), name) if name in schema_keys(root) else None
            OmegaConf.update(config, name, default)


def to_object(config: Any) -> tuple[Any, list[str]]:
    """(the config as its dataclass, the keys that are missing).

    Missing keys are empty texts, which pass the checks. Those without an effect may be missing.
    """
    filled = config.copy()
    missing = sorted(OmegaConf.missing_keys(config))
    for key in missing:
        OmegaConf.update(filled, key, "")
    result = OmegaConf.to_object(filled)
    return result, [key for key in missing if not find_unused(result, key)[0]]


def set_value(config: Any, name: str, value: Any, types: tuple[Any, ...]) -> str:
    """Sets the key to a value of one of the `types`, () for any. Returns the problem, or ""."""
    if types and set(types) <= {str, dict, NoneType}:
        if value == "":
            return (
                f"{name}= is empty: write a value, or leave the key out; is a shell variable unset?"
            )
        if isinstance(value, bool):
            return f"{name}={_shown(value)}: this key is a text, so quote it, as '{name}=\"on\"'"
    try:
        OmegaConf.update(config, name, _convert(value, types), force_add=not types)
    except OmegaConfBaseException:
        words = [KIND_WORDS[get_origin(kind) or kind] for kind in types or (dict,)]
        expected = " or ".join(words).format(name=name)
        return f"{name}={_shown(value)}: expected {expected}"
    return ""


def _convert(value: Any, types: tuple[Any, ...]) -> Any:
    """1e3 as 1000 for a whole number. A text that begins with ~/ is a path in the home folder."""
    if int in types and isinstance(value, float) and value.is_integer():
        return int(value)
    if float in types and type(value) is int:  # a key that may also be a text would take "1"
        return float(value)
    is_path = isinstance(value, str) and value.startswith("~/")
    return os.path.expanduser(value) if is_path else value


def _shown(value: Any) -> str:
    """A value as one writes it on the command line."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def explain_unknown(name: str, known: dict[str, Key]) -> tuple[str, list[str]]:
    """What follows "unknown key", and the keys that may be meant."""
    names = [other for other, key in known.items() if not key.is_section]
    text, synonyms = find_synonym(name, names)
    if text:
        return f": {text}", synonyms
    candidates = near_keys(name, names)
    near = " or ".join(candidates)
    return (f": did you mean {near}?" if near else "; --help all lists all"), candidates


def near_keys(key: str, known: list[str]) -> list[str]:
    """Up to three known keys that a misspelled key may mean: near names, or the same last part."""
    near = difflib.get_close_matches(key, known, 3, 0.8)
    last_part = key.rpartition(".")[2]
    near += [name for name in known if name.rpartition(".")[2] == last_part]
    if not near:
        last_parts = [name.rpartition(".")[2] for name in known]
        close = difflib.get_close_matches(last_part, last_parts, len(known), 0.7)
        near = [name for name in known if name.rpartition(".")[2] in close]
    return list(dict.fromkeys(near))[:3]


# Help.


def show_help(root: type, argv: list[str]) -> NoReturn:
    """Prints the help of the sections or keys that the arguments name, `all`, or the short one."""
    topics = [word for word in argv if not word.startswith("-") and "=" not in word]
    if not topics:
        print_and_exit(explain_common(root))
    known = schema_keys(root)
    for topic in topics:
        if topic not in known and topic != "all":
            near = difflib.get_close_matches(topic, known, 3) or [n for n in known if "." not in n]
            report([f"--help {topic}: there is no such section or key; try {', '.join(near)}"], [])
    print_and_exit("\n\n".join(explain(root, topic) for topic in topics))


def explain(root: type, topic: str = "all") -> str:
    """The full help of every key of `topic`: a section, a key or `all`."""
    lines = []
    for name, key in schema_keys(root).items():
        if topic != "all" and not f"{name}.".startswith(f"{topic}."):
            continue
        if not key.is_section:
            lines.append(f"  {name}={_default(root, name)}")
            help_and_choices = f"{key.help} {_offered(key)}".strip()
            lines += [" " * 6 + line for line in textwrap.wrap(help_and_choices, _width() - 6)]
        elif "." not in name:
            lines += ["", f"{name}: {key.help}"]
    return "\n".join(lines).strip("\n")


def explain_common(root: type) -> str:
    """The short help: the most used keys, one line each, and how to see more."""
    known = schema_keys(root)
    sections = [name for name in known if "." not in name]
    hidden = tuple(name for name, key in known.items() if key.is_section and not key.common)
    trainer = f"rl2.trainer.{root.__name__.removesuffix('Config').lower()}"
    lines = [
        f"torchrun --nproc_per_node=N -m {trainer} key=value ...",
        f"python -m {trainer} key=value ...    (one process)",
    ]
    for name, key in known.items():
        if name in sections:
            lines.append(f"{name}: {key.help}")
        elif key.common and not key.is_section and not name.startswith(hidden):
            start = f"  {name}={_default(root, name)}".ljust(HELP_COLUMN) + "  "
            short_help = f"{key.help.split(';')[0]} {_offered(key)}".strip()
            space = _width() - len(start)
            lines.append(start + textwrap.shorten(short_help, space, placeholder=" ..."))
    lines += [
        f"All keys: --help all, or --help SECTION of {', '.join(sections)}",
        "--cfg job prints the resolved config; --plan predicts the memory of each phase",
        "--config-dir DIR --config-name NAME starts from a YAML file",
        "A value with spaces, commas, = or parentheses needs quotes in quotes: 'key=\"a value\"'",
    ]
    return "\n".join(lines)


def _offered(key: Key) -> str:
    """The choices of a key, or ""."""
    if key.functions:
        return f"[{' | '.join(key.functions)} | file.py:function]"
    return f"[{' | '.join(key.choices)}]" if key.choices else ""


def _default(root: type, name: str) -> str:
    """The default of a key as the user would write it."""
    value = get_value(root(), name)
    if value == MISSING:
        return "(required)"
    return "(none)" if value is None else _shown(value)


def _width() -> int:
    """Columns of the help: those of the terminal, from 80 to 100."""
    return max(80, min(100, shutil.get_terminal_size(fallback=(100, 24)).columns))
