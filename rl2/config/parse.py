"""From the command line to a checked config.

Hydra composes it: the dataclasses of schema.py, the preset that `algo` names, the file that
--config-name names, and the words KEY=VALUE. Before, arguments.py names all unknown keys; after,
rules.py finds all values that are wrong or do not fit together.
"""

import os
import sys
from collections.abc import Callable, Collection
from functools import cache
from typing import Any, NoReturn, TypeVar

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rl2.config.arguments import Arguments, read_arguments
from rl2.config.conditions import derive_keys
from rl2.config.key import schema_keys
from rl2.config.presets import KEY, NONE, has_presets, load_presets
from rl2.config.problem import Problem, describe, refuse
from rl2.config.rules import validate
from rl2.config.schema import Config
from rl2.parallel.rank import is_first_rank

Root = TypeVar("Root")  # the class of a config
PRIMARY = "arguments"  # the name of the config that Hydra begins with
# A run has one folder, that of rl2; and its own output.
QUIET = [
    "hydra.run.dir=.",
    "hydra.output_subdir=null",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
    "hydra.sweep.dir=${trainer.save_dir}",
]


def parse(root: type[Root], argv: list[str], elsewhere: Collection[str] = ()) -> Root:
    """Returns the config that the arguments ask for, an instance of `root`.

    `root` is the config class of a trainer or a subclass of one, and has the checks of that one; or
    that of a server, with the checks of values alone.

    `--help` prints and exits. If there are problems, rank 0 prints all of them and every rank exits
    with status 2.

    `elsewhere` are sections and keys that need not fit this machine, for a job that will run on
    another one. They may be missing and are not checked.
    """
    arguments = read_arguments(root, argv)
    if arguments.options:
        given = " ".join(arguments.options)
        arguments.problems.append(Problem("", f"{given} is an option of the trainers alone"))
    return accept(root, arguments, elsewhere)


def accept(root: type[Root], arguments: Arguments, elsewhere: Collection[str] = ()) -> Root:
    """What `parse` does, for arguments that have been read."""
    config, problems = compose(root, arguments, elsewhere)
    if problems or config is None:
        refuse(problems)
    return config


def let_hydra_answer(
    root: type[Root], arguments: Arguments, run: Callable[[Root], None]
) -> NoReturn:
    """Lets Hydra answer the options --cfg, --info and --multirun, and ends the program.

    `run(config)` runs a job of --multirun, whose run folder is trainer.save_dir/NUMBER. What is
    shown may lack keys, and its keys are not compared with each other.
    """
    if arguments.problems:
        refuse(arguments.problems)
    if "--multirun" not in arguments.options and not is_first_rank():
        sys.exit()

    @hydra.main(version_base="1.3", config_path=None, config_name=PRIMARY)
    def job(tree: DictConfig) -> None:
        config, problems = finish(root, tree, arguments)
        if problems:
            refuse(problems)
        config.trainer.save_dir = HydraConfig.get().runtime.output_dir
        run(config)

    store_config(root, arguments)
    folder = ["--config-dir", arguments.folder] if arguments.folder else []
    sys.argv[1:] = folder + arguments.options + QUIET + arguments.words
    job()
    sys.exit()


def make_config(root: type[Root], arguments: Arguments) -> Root:
    """What `parse` does, for arguments that Python code gives. ValueError lists the problems."""
    config, problems = compose(root, arguments)
    if problems or config is None:
        raise ValueError(describe(problems))
    return config


@cache
def store_schema(root: type) -> str:
    """Gives Hydra's store the schema and the presets. Returns the name of the schema there."""
    name = f"rl2_{root.__qualname__}"
    store = ConfigStore.instance().store
    store(name, root)
    for preset, keys in {NONE: {}, **load_presets()}.items():
        store(preset, nested(keys), group=KEY, package="_global_")
    return name


def store_config(root: type, arguments: Arguments) -> None:
    """Gives Hydra's store the config that the keys of a file or of Python make on the schema."""
    keys = dict(arguments.keys)
    defaults: list[object] = [store_schema(root)]
    if has_presets(schema_keys(root)):
        defaults.append({KEY: keys.pop(KEY, None) or NONE})
    of_file: Any = keys.pop("defaults", ["_self_"])
    defaults += of_file
    ConfigStore.instance().store(PRIMARY, nested({"defaults": defaults} | keys))


def nested(values: dict[str, object]) -> DictConfig:
    """The config of dotted keys. An entry of a map replaces a plain value."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *path, last = name.split(".")  # OmegaConf.update would also split at brackets
        branch = tree
        for part in path:
            if not isinstance(branch.get(part), dict):
                branch[part] = {}
            branch = branch[part]
        branch[last] = value
    return OmegaConf.create(tree)


def compose(
    root: type[Root], arguments: Arguments, elsewhere: Collection[str] = ()
) -> tuple[Root | None, list[Problem]]:
    """Lets Hydra compose a config of the class `root`. Returns it with its problems.

    The config is None if the arguments have problems, or Hydra does not take them: then there is no
    more to check. `parse` explains `elsewhere`.
    """
    if arguments.problems:
        return None, arguments.problems
    store_config(root, arguments)
    GlobalHydra.instance().clear()
    # Hydra wants a folder: there is no config in this one.
    folder = os.path.abspath(arguments.folder or os.path.dirname(__file__))
    try:
        with hydra.initialize_config_dir(folder, version_base="1.3"):
            config, problems = finish(root, hydra.compose(PRIMARY, arguments.words), arguments)
        left_out = tuple(f"{key}." for key in elsewhere)
        return config, [
            problem for problem in problems if not f"{problem.key}.".startswith(left_out)
        ]
    except OverrideParseException as error:
        remedy = "close brackets, and quote a text with marks such as , = ( < !"
        word = (error.override or "").lstrip("+")
        text = f"{word} cannot be read: {remedy}, as 'key=\"a value\"'"
        return None, [Problem("", text)]
    except (HydraException, OmegaConfBaseException, OSError) as error:
        text = str(error.__cause__ or error).partition("Config search path")[0]
        reason, _, place = text.partition("full_key:")
        key, text = place.partition("\n")[0].strip(), " ".join(reason.split())
        return None, [Problem(key, f"{key}: {text}" if key else text)]


def finish(root: type, tree: DictConfig, arguments: Arguments) -> tuple[Any, list[Problem]]:
    """Makes the dataclass of a composed config, with the keys that follow from others.

    Returns it with its problems. Missing keys are empty texts, which pass the checks.
    """
    OmegaConf.set_struct(tree, False)
    missing = []
    names = OmegaConf.missing_keys(tree)
    for name, key in schema_keys(root).items():
        if key.default == MISSING and name in names:
            missing.append(Problem(name, f"{name} is missing: {key.help}"))
            OmegaConf.update(tree, name, "")
    config: Any = OmegaConf.to_object(tree)
    if isinstance(config, Config) and config.trainer.eval_only and not config.data.test_ratio:
        missing = [problem for problem in missing if problem.key != "data.path"]
    derive_keys(config, arguments.set_keys)
    return config, missing + validate(config, arguments.set_keys)
