"""The config: typed sections, one dataclass each, every key explained beside it; Hydra's override grammar; and the
checks that find every problem before a model is loaded.

`parse(PPOConfig, argv, validate_ppo)` is the entry that all trainers share.
"""

import ast
import difflib
import inspect
import os
import shutil
import signal
import sys
import textwrap
import time
import traceback
from contextlib import contextmanager
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf, StringNode
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError
from yaml import YAMLError


def parse(root: type, argv: list[str], validate, usage: str = "rl2.trainer.ppo"):
    """The config that the arguments ask for, as a `root`. `--help` and `--cfg job` print and exit; problems, all of
    them in one message, exit with 2. `validate(config, set_keys, world_size)` returns (problems, warnings)."""
    if {"-h", "--help"} & set(argv):
        print(explain(root, usage))
        sys.exit(0)
    options, overrides, problems = _options(argv)
    config = OmegaConf.structured(root)
    set_keys = set()
    for key, value, source in _recipe(options, problems) + _overrides(overrides, problems):
        meant, problem = _set(config, key, value)
        if meant:
            set_keys.add(meant)
        if problem:
            problems.append(problem + source)
    missing = sorted(OmegaConf.missing_keys(config))
    if "--cfg" not in options:
        problems += [f"{key} is missing: {_docs(root)[key]}" for key in missing]
    wrong = _choices(root, config)
    if "--cfg" in options and not problems + wrong:
        print(OmegaConf.to_yaml(config, resolve=True), end="")
        sys.exit(0)
    for key in missing:  # so that what there is can be checked
        OmegaConf.update(config, key, "")
    result = OmegaConf.to_object(config)
    # A wrong choice may be why other keys seem to have no effect.
    found, warnings = validate(
        result, set() if wrong else set_keys, int(os.environ.get("WORLD_SIZE", "1"))
    )
    problems += wrong + found
    first = os.environ.get("RANK", "0") == "0"
    if problems and first:
        print(
            f"{len(problems)} problem{'s' * (len(problems) > 1)} in the configuration:",
            file=sys.stderr,
        )
        print("\n".join(f"  - {problem}" for problem in problems), file=sys.stderr)
    if problems:
        sys.exit(2)
    for warning in warnings if first else []:
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    return result


@contextmanager
def user_errors():
    """Shows what rl2 itself refuses, and files and hubs that are out of reach, as one message; everything else with its
    traceback."""
    try:
        yield
    except (ValueError, RuntimeError, OSError, SafetensorError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = Path(__file__).parents[1] in Path(frames[-1].filename).parents
        if "by peer" in str(error):  # gloo's connection to a process that is gone
            error = "another process ended; if it said nothing above, it was killed, perhaps for its memory"
        elif not (ours or isinstance(error, OSError | SafetensorError)):
            raise
        rank = os.environ.get("RANK", "0")
        if (
            rank != "0"
        ):  # most errors meet all ranks: the first one tells, and torchrun ends the others meanwhile
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(5)
        print(
            f"error{'' if rank == '0' else f' on rank {rank}'}: {error}",
            file=sys.stderr,
            flush=True,
        )
        sys.exit(1)


def dump(config) -> str:
    """The config as YAML that --config-name reads back."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def _options(argv):
    """--cfg, --config-dir and --config-name (as `--name value` or `--name=value`), the overrides, and what is wrong."""
    options, overrides, problems, words = {}, [], [], list(argv)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if name in ("--cfg", "--config-dir", "--config-name"):
            options[name] = value if equals else (words.pop(0) if words else "")
        elif word.startswith("-"):
            problems.append(
                f"{word} is no option: there are --help, --cfg job, --config-dir DIR and --config-name NAME"
            )
        else:
            overrides.append(word)
    if options.get("--cfg", "job") != "job":
        problems.append(f"--cfg {options['--cfg']}: the only choice is job")
    return options, overrides, problems


def _recipe(options, problems):
    """(key, value, where it was written) of each entry of the recipe file."""
    if "--config-name" not in options:
        if "--config-dir" in options:
            problems.append(
                "--config-dir needs --config-name: the file in that folder, with or without .yaml"
            )
        return []
    name = options["--config-name"]
    path = Path(
        options.get("--config-dir", "."),
        name if name.endswith((".yaml", ".yml")) else name + ".yaml",
    )
    if not path.is_file():
        problems.append(f"--config-name {name}: there is no file {path}")
        return []
    try:
        recipe = OmegaConf.to_container(OmegaConf.load(path))
    except (YAMLError, OmegaConfBaseException) as error:
        problems.append(f"{path} is not readable YAML: {error}")
        return []
    return [(key, value, f" (in {path})") for key, value in _flatten(recipe or {})]


def _flatten(tree, prefix=""):
    for key, value in tree.items():
        deeper = isinstance(value, dict) and value and prefix + key != "rollout.engine_args"
        yield from _flatten(value, f"{prefix}{key}.") if deeper else [(prefix + str(key), value)]


def _overrides(words, problems):
    """(key, value, "") of each key=value argument."""
    found, parser = [], OverridesParser.create()
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
            problems.append(
                f"{word} names several values, and a run has one: for a list write {key}=[{text}]"
            )
        else:
            found.append((override.key_or_group, override.value(), ""))
    return found


def _set(config, key, value) -> tuple[str | None, str | None]:
    """Sets one key, or the one that it is a slip of. Returns which that was, and what is wrong."""
    if key.startswith("rollout.engine_args."):
        OmegaConf.update(config, key, value, force_add=True)
        return key, None
    known = dict(_leaves(config))
    if key not in known:
        near = difflib.get_close_matches(key, known, 3, 0.75)
        last = key.rpartition(".")[2]
        near += [k for k in known if k.rpartition(".")[2] == last and k not in near]
        near = near or [
            k for k in known if difflib.get_close_matches(last, [k.rpartition(".")[2]], 1, 0.7)
        ]
        hint = f": did you mean {' or '.join(near[:3])}?" if near else "; --help lists all"
        meant = _set(config, near[0], value)[0] if len(near) == 1 else None
        return meant, f"unknown key {key}={value}{hint}"
    if isinstance(value, bool) and isinstance(known[key], StringNode):
        return key, f"{key}={value}: this is text, so quote it: '{'off' if not value else 'on'}'"
    try:
        OmegaConf.update(config, key, value, force_add=False)
    except OmegaConfBaseException as error:
        return key, f"{key}={value}: {str(error).splitlines()[0]}"
    return key, None


def _leaves(config, prefix=""):
    """(dotted key, node) of everything that can be set."""
    for key in config:
        node = config._get_node(key)
        if OmegaConf.is_dict(node) and OmegaConf.get_type(node) is not dict:
            yield from _leaves(node, f"{prefix}{key}.")
        else:
            yield prefix + key, node


def _walk(section, prefix=""):
    """(dotted key, field, the class it stands in) of all fields below a config class."""
    for entry in fields(section):
        kind = entry.default_factory if entry.default_factory is not NO_DEFAULT else None
        if is_dataclass(kind):
            yield from _walk(kind, f"{prefix}{entry.name}.")
        else:
            yield prefix + entry.name, entry, section


def _choices(root, config) -> list[str]:
    problems = []
    for key, entry, _ in _walk(root):
        value, choices = (
            OmegaConf.select(config, key, throw_on_missing=False),
            entry.metadata.get("choices"),
        )
        if choices and value is not None and value not in choices:
            problems.append(f"{key}={value}: choose {', '.join(choices[:-1])} or {choices[-1]}")
    return problems


def _docs(root) -> dict[str, str]:
    """Key -> the string under its field, read from the source; a class without one takes its parents'."""
    return {
        key: next(
            texts[entry.name]
            for texts in map(_class_docs, section.__mro__[:-1])
            if entry.name in texts
        )
        for key, entry, section in _walk(root)
    }


@cache
def _class_docs(section) -> dict[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0].body
    return {
        statement.target.id: following.value.value
        for statement, following in pairwise(body)
        if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr)
    }


def explain(root: type, usage: str) -> str:
    """The help: every key with its default, its choices and what it is."""
    width = min(120, shutil.get_terminal_size().columns)
    lines = [
        f"torchrun --nproc_per_node=N -m {usage} key=value ...     (python -m {usage} for one process)",
        "",
    ]
    lines += [
        "--cfg job prints the resolved config; --config-dir DIR --config-name NAME starts from a YAML recipe;"
    ]
    lines += [
        "values with spaces, commas, = or parentheses need quotes in quotes: 'key=\"a value\"'."
    ]
    defaults, docs, section = OmegaConf.structured(root), _docs(root), None
    for key, entry, _ in _walk(root):
        if key.split(".")[0] != section:
            section = key.split(".")[0]
            lines += ["", section]
        value = OmegaConf.to_container(defaults)
        for part in key.split("."):
            value = value[part]
        shown = "(required)" if value == "???" else "(none)" if value is None else value
        choices = entry.metadata.get("choices")
        text = docs[key] + (f" [{' | '.join(choices)}]" if choices else "")
        lines += [
            f"  {key}={shown}",
            *textwrap.wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6),
        ]
    return "\n".join(lines)
