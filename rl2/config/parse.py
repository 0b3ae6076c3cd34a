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
from itertools import groupby
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
    collecting,
    find_unused,
    follow_keys,
    get_value,
)
from rl2.config.rules import validate
from rl2.config.synonyms import ALGORITHM_KEYS, explain_algorithm, find_synonym
from rl2.error_report import report_error
from rl2.parallel.mesh import is_first_rank

OPTIONS = {"--cfg": "job", "--config-dir": "DIR", "--config-name": "NAME"}  # each takes a value
OPTIONS_HELP = (
    "keys are written key=value without dashes; there are --help [SECTION | all], --cfg job, "
    "--plan, --config-dir DIR and --config-name NAME; options of torchrun come before -m"
)
NEXT_ARGUMENT = r"-\D|[\w.]+="  # how an option or a key=value begins
# A key and its = that are several arguments; \0 stands between two arguments.
SPACED_KEY = rf"(?<![^\0])(\w[\w.]*)(?:\0=\0?|=\0)(?!{NEXT_ARGUMENT})"
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
    source: str = ""  # where it was written, in words that follow a message; "" for an argument


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
    options, assignments = read_arguments(argv, problems)
    config = OmegaConf.structured(root)
    set_keys = assign(config, schema_keys(root), assignments, problems)
    try:
        follow_keys(config, set_keys)
        result, missing = to_object(config, set_keys)
    except OmegaConfBaseException as error:  # a ${OTHER.KEY} without a value: no more to check
        refuse([*problems, f"{error.full_key}: {str(error).splitlines()[0]}"])
    if "--cfg" not in options:
        add_new_problems(problems, missing)
    elif not problems + check_choices(result):
        print_and_exit(OmegaConf.to_yaml(config, resolve=True))
    config_problems, warnings = validate(result, set_keys)
    problems = [x for x in problems + config_problems if not x.startswith(elsewhere)]
    if problems and find_problems:
        add_new_problems(problems, find_problems(result))
    if problems:
        refuse(problems)
    if not elsewhere:
        warn([*find_duplicates(assignments), *warnings])
    return result


def start_plan(root: type, argv: list[str]) -> NoReturn:
    """Goes on as `python -m rl2 plan` of this trainer on rank 0; the other ranks end."""
    if not is_first_rank():
        sys.exit(0)
    argv.remove("--plan")
    trainer = root.__name__.removesuffix("Config").lower()
    os.execv(sys.executable, [sys.executable, "-m", "rl2", "plan", trainer, *argv])


def add_new_problems(problems: list[str], by_key: dict[str, str]) -> None:
    """Adds problems by key, but for the keys that have one already (KEY=VALUE ...)."""
    known_keys = {problem.partition("=")[0] for problem in problems}
    problems += [problem for key, problem in by_key.items() if key not in known_keys]


def refuse(problems: list[str]) -> NoReturn:
    """Prints the problems on rank 0, and exits with status 2."""
    plural = "s" if len(problems) > 1 else ""
    lines = [f"{len(problems)} problem{plural} in the configuration:"]
    lines += [f"  - {problem}" for problem in problems]
    if is_first_rank():
        report_error("\n".join(lines))
    else:  # torchrun ends the first rank as soon as another one ends
        time.sleep(SECONDS_FOR_FIRST_RANK)
    sys.exit(2)


def warn(warnings: list[str]) -> None:
    """Prints the warnings on rank 0."""
    for warning in warnings if is_first_rank() else []:
        print(f"warning: {warning}", file=sys.stderr)


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


# Reading.


def read_arguments(argv: list[str], problems: list[str]) -> tuple[dict[str, str], list[Assignment]]:
    """(options by name, the assignments of the recipe and then of the arguments)."""
    options, words = read_options(join_spaced_words(argv, problems), problems)
    assignments = []
    with collecting(problems):
        assignments += read_recipe(options)
    for word in words:
        if not is_loose(word):
            with collecting(problems):
                assignments.append(read_override(word))
    problems += explain_loose_words(words)
    return options, assignments


def is_loose(word: str) -> bool:
    """Whether an argument is not meant to set or to remove a key."""
    return "=" not in word and word[:1] not in ("+", "~")


def explain_loose_words(words: list[str]) -> Iterator[str]:
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
        yield text


def join_spaced_words(argv: list[str], problems: list[str]) -> list[str]:
    """The arguments: `key = value`, `key =value` and `key= value` become one, and a problem."""
    text = "\0".join(argv)
    for key in re.findall(SPACED_KEY, text):
        problems.append(f"{key}= has spaces at its =: write it without them")
    return re.sub(SPACED_KEY, r"\1=", text).split("\0") if argv else []


def read_options(argv: list[str], problems: list[str]) -> tuple[dict[str, str], list[str]]:
    """(options by name, other arguments). An option is `--name value` or `--name=value`."""
    options = {}
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
            problems.append(explain_option(name, value))
        elif not value or (name == "--cfg" and value != "job"):
            problems.append(f"{name} needs a value: {name} {OPTIONS[name]}")
        else:
            options[name] = value
    return options, others


def explain_option(name: str, value: str) -> str:
    """What to write in place of an option that does not exist."""
    key = name.lstrip("-")
    if "." in key:
        return f"{name} has dashes: write {key}={value or 'VALUE'}"
    return f"{name}: unknown option; {OPTIONS_HELP}"


def read_recipe(options: dict[str, str]) -> list[Assignment]:
    """The assignments of the recipe file that the options name. ValueError if it has no keys."""
    name = options.get("--config-name", "")
    if not name and "--config-dir" in options:
        remedy = "the name of the file in that folder, with or without .yaml"
        raise ValueError(f"--config-dir needs --config-name: {remedy}")
    if not name:
        return []
    file = name if name.endswith((".yaml", ".yml")) else name + ".yaml"
    path = Path(options.get("--config-dir", "."), file)
    if not path.is_file():
        raise ValueError(f"--config-name {name}: there is no file {path}")
    try:
        recipe = OmegaConf.to_container(OmegaConf.load(path))
    except (YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not readable YAML: {error}") from error
    if not isinstance(recipe, dict):
        remedy = "write sections with keys below them, as --cfg job does"
        raise ValueError(f"{path} holds no keys: {remedy}")
    return [Assignment(key, value, f" (in {path})") for key, value in flatten(recipe)]


def flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of every key in nested dicts."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value and key not in OPEN_KEYS:
            yield from flatten(value, key + ".")
        else:
            yield key, value


def read_override(word: str) -> Assignment:
    """A `key=value` argument in Hydra's grammar. ValueError if it is none."""
    key, equals, text = word.partition("=")
    if key[:1] in ("+", "~"):
        raise ValueError(f"{word!r} sets no key: every key exists, so + and ~ are not needed")
    if not key or not equals:
        raise ValueError(f"{word!r} sets no key: write key=value")
    if text.startswith("~/"):  # Hydra takes no ~
        return Assignment(key, text)
    try:
        override = OverridesParser.create().parse_override(f"value={text}")
    except HydraException as error:
        raise ValueError(explain_quotes(key, text)) from error
    if override.is_sweep_override():
        remedy = f"for a list write {key}=[{text}], for a text {quote_for_shell(key, text)}"
        raise ValueError(f"{word} names several values, and a run has one: {remedy}")
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


def find_duplicates(assignments: list[Assignment]) -> Iterator[str]:
    """A warning for each argument that sets a key to another value than the first one does."""
    first: dict[str, Any] = {}
    for key, value, source in assignments:
        if not source and first.setdefault(key, value) != value:
            yield f"{key} is set to {first[key]} and to {value}; the last value counts"


# Setting keys.


def assign(
    config: Any, known: dict[str, Key], assignments: list[Assignment], problems: list[str]
) -> set[str]:
    """Sets keys of the config, which are `known`. Returns those that were set.

    A misspelled key sets the one key that it must mean, so that no other problem follows from it.
    """
    set_keys = set()
    for name, value, source in assignments:
        target, problem = find_target(name, value, known)
        if target:
            set_keys.add(target)
            types = known[target].types if target in known else ()
            value_problem = set_value(config, target, value, types)
            problem = problem or value_problem
        if problem:
            problems.append(problem + source)
    return set_keys


def find_target(name: str, value: Any, known: dict[str, Key]) -> tuple[str, str]:
    """(the key that `name` means, the problem with the name); "" stands for none."""
    if name.startswith(tuple(f"{key}." for key in OPEN_KEYS)):
        return name, ""
    key = known.get(name)
    if key is None:
        keys = [other for other in known if not known[other].is_section]
        if name in ALGORITHM_KEYS and "adv.estimator" in known:
            text = explain_algorithm(str(value)) or "set adv.estimator, actor.loss, actor.average"
            return "", f"unknown key {name}={value}: {text}"
        text, candidates = find_synonym(name, keys)
        if not text:
            candidates = near_keys(name, keys)
            near = " or ".join(candidates)
            text = f"did you mean {near}?" if near else "--help all lists all"
        target = candidates[0] if len(candidates) == 1 else ""
        return target, f"unknown key {name}={value}: {text}"
    if not key.is_section:
        return name, ""
    if value is None:  # a recipe may have a section without keys
        return "", ""
    remedy = f"set its keys, as {name}.NAME=VALUE; --help {name} lists them"
    return "", f"{name}={value}: {name} is a section; {remedy}"


def to_object(config: Any, set_keys: set[str]) -> tuple[Any, dict[str, str]]:
    """(the config as its dataclass, the problem of each key that is missing).

    Missing keys are empty texts, which pass the checks. Those without an effect may be missing.
    """
    filled = config.copy()
    empty_keys = sorted(OmegaConf.missing_keys(config))
    for key in empty_keys:
        OmegaConf.update(filled, key, "")
    result = OmegaConf.to_object(filled)
    missing = {}
    for key in empty_keys:
        if key not in set_keys and not find_unused(result, key)[0]:
            missing[key] = f"{key} is missing: {schema_keys(type(result))[key].help}"
    return result, missing


def set_value(config: Any, name: str, value: Any, types: tuple[Any, ...]) -> str:
    """Sets the key to a value of one of the `types`, () for any. Returns the problem, or ""."""
    if types and set(types) <= {str, dict, NoneType}:
        if value == "":
            return (
                f"{name}= is empty: write a value, or leave the key out; is a shell variable unset?"
            )
        if isinstance(value, bool):
            given = _shown(value)
            return f"{name}={given}: this key is a text, so quote it, as '{name}=\"{given}\"'"
        if isinstance(value, list):
            remedy = "it takes one text"
            if name.endswith("path"):
                remedy = "give one path; of several files give the folder that they are in"
            return f"{name}={_shown(value)}: {remedy}"
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


def near_keys(key: str, keys: list[str]) -> list[str]:
    """Up to three keys that a misspelled one may mean: near names, or near names' last parts."""
    key = key.lower()
    near = difflib.get_close_matches(key, keys, 3, 0.8)
    if not near:
        last_part = difflib.SequenceMatcher(b=key.rpartition(".")[2])
        for name in keys:
            last_part.set_seq1(name.rpartition(".")[2])
            if last_part.ratio() >= 0.7:
                near.append(name)
    return near[:3]


# Help.


def show_help(root: type, argv: list[str]) -> NoReturn:
    """Prints the help of the sections or keys that the arguments name, `all`, or the short one."""
    topics = [word for word in argv if not word.startswith("-") and "=" not in word]
    print_and_exit("\n\n".join(explain(root, topic) for topic in topics) or explain_common(root))


def explain(root: type, topic: str = "all") -> str:
    """The full help of every key of `topic`: a section, a key or `all`."""
    known = schema_keys(root)
    lines = []
    for name, key in known.items():
        is_in_topic = topic == "all" or f"{name}.".startswith(f"{topic}.")
        if is_in_topic and not key.is_section:
            lines.append(f"  {name}={_default(root, name)}")
            text = textwrap.fill(_with_choices(key.help, key), _width() - 6)
            lines.append(textwrap.indent(text, " " * 6))
        elif is_in_topic and "." not in name:
            lines += ["", f"{name}: {key.help}"]
    if not lines:
        near = ", ".join(near_keys(topic, list(known)) or ["all"])
        refuse([f"--help {topic}: there is no such section or key; try {near}"])
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
            short_help = _with_choices(key.help.split(";")[0], key)
            space = _width() - len(start)
            lines.append(start + textwrap.shorten(short_help, space, placeholder=" ..."))
    lines += [
        f"All keys: --help all, or --help SECTION of {', '.join(sections)}",
        "--cfg job prints the resolved config; --plan predicts the memory of each phase",
        "--config-dir DIR --config-name NAME starts from a YAML file",
        "A value with spaces, commas, = or parentheses needs quotes in quotes: 'key=\"a value\"'",
    ]
    return "\n".join(lines)


def _with_choices(text: str, key: Key) -> str:
    """The text, and the choices of the key if it has some."""
    choices = [*(key.functions or key.choices)]
    if key.functions:
        choices.append("file.py:function")
    return f"{text} [{' | '.join(choices)}]" if choices else text


def _default(root: type, name: str) -> str:
    """The default of a key as the user would write it."""
    value = get_value(root(), name)
    if value == MISSING:
        return "(required)"
    return "(none)" if value is None else _shown(value)


def _width() -> int:
    """Columns of the help: those of the terminal, from 80 to 100."""
    return max(80, min(100, shutil.get_terminal_size(fallback=(100, 24)).columns))
