"""From the command line to a checked config.

`parse(PPOConfig, argv)` is the entry that all trainers share. Its stages are in files of their own:
early.py answers --help, arguments.py reads the words, assign.py sets the keys and rules.py checks
the values.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl2.config.arguments import Arguments, Assignment, find_duplicates, read_arguments
from rl2.config.assign import assign
from rl2.config.early import answer_early, print_and_exit
from rl2.config.key import schema_keys
from rl2.config.key_rules import check_choices, find_unused, follow_keys
from rl2.config.presets import has_presets, take_preset
from rl2.config.problem import (
    ConfigError,
    Problem,
    add_new_problems,
    is_about,
    refuse,
    warn,
)
from rl2.config.rules import validate

FindProblems = Callable[[Any], list[Problem]]


def parse(
    root: type,
    argv: list[str],
    find_problems: FindProblems | None = None,
    elsewhere: Collection[str] = (),
    optional: Collection[str] = (),
) -> Any:
    """Returns the config that the arguments ask for, an instance of `root`.

    `root` is the config class of a trainer or a subclass of one, and has the checks of that one.

    `--help` and `--cfg job` print and exit. If there are problems, rank 0 prints all of them and
    every rank exits with status 2. `find_problems(config)` tries what the config names, such as the
    data. It is called only if there are problems, to show all of them together.

    `elsewhere` are sections and keys that need not fit this machine, for a job that will run on
    another one. They may be missing and are not checked, and there are no warnings. `optional` are
    keys that may be missing.
    """
    answer_early(root, argv)
    arguments = read_arguments(argv)
    draft = compose(root, arguments)
    if "--cfg" in arguments.options:
        if not draft.problems and not check_choices(draft.config):
            print_and_exit(OmegaConf.to_yaml(draft.tree, resolve=True))
        optional = schema_keys(root)
    problems, warnings = check(draft, find_problems, elsewhere, optional)
    if problems:
        refuse(problems)
    if not elsewhere:
        warn([*find_duplicates(arguments.assignments), *warnings])
    return draft.config


@dataclass
class Draft:
    """A config before its checks."""

    tree: DictConfig
    config: Any  # the tree as its dataclass; None if a ${OTHER.KEY} in it has no value
    set_keys: set[str]  # those that the arguments set
    problems: list[Problem]  # of the arguments
    missing: list[Problem]  # of the keys without a value; in `config` they are empty texts


def make_config(root: type, arguments: Arguments, find_problems: FindProblems | None = None) -> Any:
    """What `parse` does, for arguments that Python code gives. ConfigError has the problems."""
    draft = compose(root, arguments)
    problems, warnings = check(draft, find_problems)
    if problems:
        raise ConfigError(problems)
    warn(warnings)
    return draft.config


def compose(root: type, arguments: Arguments) -> Draft:
    """Sets what the arguments say in a new config of the class `root`."""
    problems = [*arguments.problems]
    tree: DictConfig = OmegaConf.structured(root)
    known = schema_keys(root)
    preset: list[Assignment] = []
    assignments = arguments.assignments
    if has_presets(known):
        preset, assignments = take_preset(assignments, problems)
    preset_keys = assign(tree, known, preset, problems)
    set_keys = assign(tree, known, assignments, problems)
    try:
        all_set_keys = set_keys | preset_keys
        follow_keys(tree, all_set_keys)
        set_keys &= all_set_keys
        config, missing = to_object(tree, set_keys)
    except OmegaConfBaseException as error:
        key = str(error.full_key)
        problems.append(Problem(key, MISSING, f"{key}: {str(error).splitlines()[0]}"))
        return Draft(tree, None, set_keys, problems, missing=[])
    return Draft(tree, config, set_keys, problems, missing)


def to_object(tree: DictConfig, set_keys: set[str]) -> tuple[Any, list[Problem]]:
    """(the config as its dataclass, the problems of the keys that are missing).

    Missing keys are empty texts, which pass the checks. Those without an effect may be missing.
    """
    filled = tree.copy()
    empty_keys = sorted(OmegaConf.missing_keys(tree))
    for key in empty_keys:
        OmegaConf.update(filled, key, "")
    config = OmegaConf.to_object(filled)
    known = schema_keys(type(config))
    missing = []
    for key in empty_keys:
        if key not in set_keys and not find_unused(config, key)[0]:
            missing.append(Problem(key, MISSING, f"{key} is missing: {known[key].help}"))
    return config, missing


def check(
    draft: Draft,
    find_problems: FindProblems | None = None,
    elsewhere: Collection[str] = (),
    optional: Collection[str] = (),
) -> tuple[list[Problem], list[Problem]]:
    """(problems, warnings) of a draft; `parse` explains the other arguments."""
    problems = [*draft.problems]
    if draft.config is None:  # there is no more to check
        return problems, []
    missing = [problem for problem in draft.missing if problem.key not in optional]
    found, warnings = validate(draft.config, draft.set_keys)
    add_new_problems(problems, [p for p in missing if not is_about(p, elsewhere)])
    problems += [problem for problem in found if not is_about(problem, elsewhere)]
    if problems and find_problems is not None:
        add_new_problems(problems, find_problems(draft.config))
    return problems, warnings
