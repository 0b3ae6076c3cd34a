"""From the command line to a checked config: overrides, recipes, near names and `--help`.

`parse(PPOConfig, argv, validate_ppo)` is the entry that all trainers share.
"""

import difflib
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import MISSING, OmegaConf, StringNode
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rl2.config.key import Key, schema_keys
from rl2.config.rules import VALIDATORS, check_choices, get_value

OPTIONS = ("--cfg", "--config-dir", "--config-name")  # each takes a value
OPTIONS_HELP = "--help [SECTION | all], --cfg job, --config-dir DIR and --config-name NAME"
HELP_COLUMN = 40  # where the explanations of the short help begin
ENGINE_ARGS = "rollout.engine_args"  # a dict: its keys are not in the schema


class Assignment(NamedTuple):
    key: str
    value: Any
    source: str = ""  # where it was written, in words that follow a message


def parse(root: type, argv: list[str]) -> Any:
    """The config that the arguments ask for, an instance of `root`.

    `root` is a key of VALIDATORS or a subclass of one, whose checks it has then.

    `--help` and `--cfg job` print and exit. If there are problems, rank 0 prints all of them and
    every rank exits with status 2.
    """
    if {"-h", "--help"} & set(argv):
        show_help(root, argv)
    options, words, problems = read_options(argv)
    recipe, recipe_problems = read_recipe(options)
    overrides, override_problems = read_overrides(words)
    config = OmegaConf.structured(root)
    set_keys, key_problems = assign(config, recipe + overrides)
    problems += recipe_problems + override_problems + key_problems
    missing = sorted(OmegaConf.missing_keys(config))
    if "--cfg" not in options:
        problems += [f"{key} is missing: {schema_keys(root)[key].help}" for key in missing]
    result = to_object(config, missing)
    choice_problems = check_choices(result)
    if "--cfg" in options and not problems + choice_problems:
        print_and_exit(OmegaConf.to_yaml(config, resolve=True))
    if choice_problems:  # which may be why other keys seem to have no effect
        set_keys = set()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    validate = next(VALIDATORS[kind] for kind in root.__mro__ if kind in VALIDATORS)
    found_problems, warnings = validate(result, set_keys, world_size)
    report(problems + choice_problems + found_problems, warnings)
    return result


def is_first_rank() -> bool:
    """Whether this is rank 0, as torchrun says; torch.distributed is not there yet."""
    return os.environ.get("RANK", "0") == "0"


def report(problems: list[str], warnings: list[str]) -> None:
    """Prints them on rank 0. Exits with status 2 if there are problems."""
    lines = [f"warning: {warning}" for warning in warnings]
    if problems:
        plural = "s" if len(problems) > 1 else ""
        lines = [f"{len(problems)} problem{plural} in the configuration:"]
        lines += [f"  - {problem}" for problem in problems]
    if lines and is_first_rank():
        print("\n".join(lines), file=sys.stderr, flush=True)
    if problems:
        sys.exit(2)


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


def read_options(argv: list[str]) -> tuple[dict[str, str], list[str], list[str]]:
    """(options by name, overrides, problems). An option is `--name value` or `--name=value`."""
    options = {}
    overrides = []
    problems = []
    words = iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        if name in OPTIONS:
            options[name] = value if equals else next(words, "")
        elif word.startswith("-"):
            problems.append(f"{word} is no option: there are {OPTIONS_HELP}")
        else:
            overrides.append(word)
    if options.get("--cfg", "job") != "job":
        problems.append(f"--cfg {options['--cfg']}: the only choice is job")
    return options, overrides, problems


def read_recipe(options: dict[str, str]) -> tuple[list[Assignment], list[str]]:
    """(assignments, problems) of the recipe file that the options name."""
    if "--config-name" not in options:
        if "--config-dir" not in options:
            return [], []
        remedy = "the name of the file in that folder, with or without .yaml"
        return [], [f"--config-dir needs --config-name: {remedy}"]
    name = options["--config-name"]
    file = name if name.endswith((".yaml", ".yml")) else name + ".yaml"
    path = Path(options.get("--config-dir", "."), file)
    if not path.is_file():
        return [], [f"--config-name {name}: there is no file {path}"]
    try:
        recipe = OmegaConf.to_container(OmegaConf.load(path))
    except (YAMLError, OmegaConfBaseException) as error:
        return [], [f"{path} is not readable YAML: {error}"]
    return [Assignment(key, value, f" (in {path})") for key, value in _flatten(recipe or {})], []


def _flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value and key != ENGINE_ARGS:
            yield from _flatten(value, key + ".")
        else:
            yield key, value


def read_overrides(words: list[str]) -> tuple[list[Assignment], list[str]]:
    """(assignments, problems) of the `key=value` arguments, in Hydra's grammar."""
    assignments = []
    problems = []
    parser = OverridesParser.create()
    for word in words:
        key, equals, text = word.partition("=")
        if key[:1] in "+~" or not equals:
            remedy = "write key=value; every key exists already, so + and ~ are not needed"
            problems.append(f"{word!r} sets no key: {remedy}")
            continue
        try:
            override = parser.parse_override(word)
        except HydraException:
            quoted = text.replace('"', '\\"')
            problems.append(
                f"{word} cannot be read: put quotes in quotes where a value has spaces, commas, "
                f"parentheses or =, as in '{key}=\"{quoted}\"'"
            )
            continue
        if override.is_sweep_override():
            remedy = f"for a list write {key}=[{text}]"
            problems.append(f"{word} names several values, and a run has one: {remedy}")
        else:
            assignments.append(Assignment(override.key_or_group, override.value()))
    return assignments, problems


# Setting keys.


def assign(config: Any, assignments: list[Assignment]) -> tuple[set[str], list[str]]:
    """Sets the keys. Returns (the keys that were set, problems).

    A misspelled key sets the one key that it must mean, so that no other problem follows from it.
    """
    set_keys = set()
    problems = []
    nodes = dict(_leaf_nodes(config))
    for key, value, source in assignments:
        candidates = [key]
        if key not in nodes and not key.startswith(ENGINE_ARGS + "."):
            candidates = near_keys(key, list(nodes))
            near = " or ".join(candidates)
            hint = f": did you mean {near}?" if near else "; --help all lists all"
            problems.append(f"unknown key {key}={value}{hint}{source}")
        if len(candidates) == 1:
            target = candidates[0]
            set_keys.add(target)
            problem = set_value(config, nodes.get(target), target, value)
            if problem and target == key:
                problems.append(problem + source)
    return set_keys, problems


def to_object(config: Any, missing: list[str]) -> Any:
    """The config as its dataclass. Missing keys are empty texts, which pass the checks."""
    filled = config.copy()
    for key in missing:
        OmegaConf.update(filled, key, "")
    return OmegaConf.to_object(filled)


def set_value(config: Any, node: Any, key: str, value: Any) -> str:
    """Sets the key, whose node in `config` is `node`. Returns the problem, or ""."""
    if isinstance(value, bool) and isinstance(node, StringNode):
        return f"{key}={value}: this is text, so quote it: '{'on' if value else 'off'}'"
    try:
        OmegaConf.update(config, key, value, force_add=node is None)
    except OmegaConfBaseException as error:
        return f"{key}={value}: {str(error).splitlines()[0]}"
    return ""


def near_keys(key: str, known: list[str]) -> list[str]:
    """Up to three known keys that a misspelled key may mean: near names, or the same last part."""
    near = difflib.get_close_matches(key, known, 3, 0.75)
    last_part = key.rpartition(".")[2]
    near += [name for name in known if name.rpartition(".")[2] == last_part]
    if not near:
        last_parts = [name.rpartition(".")[2] for name in known]
        close = difflib.get_close_matches(last_part, last_parts, len(known), 0.7)
        near = [name for name in known if name.rpartition(".")[2] in close]
    return list(dict.fromkeys(near))[:3]


def _leaf_nodes(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, node) of every key."""
    for name in config:
        node = config._get_node(name)
        if OmegaConf.is_dict(node) and OmegaConf.get_type(node) is not dict:
            yield from _leaf_nodes(node, f"{prefix}{name}.")
        else:
            yield prefix + name, node


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
        f"All keys: --help SECTION, one of {', '.join(sections)}, or --help all",
        "--cfg job prints the resolved config",
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
    if isinstance(value, bool):
        return str(value).lower()
    return "(none)" if value is None else str(value)


def _width() -> int:
    """Columns of the help: those of the terminal, from 80 to 100."""
    return max(80, min(100, shutil.get_terminal_size(fallback=(100, 24)).columns))
