"""What --help prints: the sections of a trainer, or every key of a section in full.

It is answered before a trainer is imported, which takes seconds: nothing here imports torch.
"""

import shutil
import signal
import sys
import textwrap
from typing import Any

from omegaconf import MISSING

from rl2.config.key import Key, schema_keys
from rl2.config.presets import KEY, describe_preset, has_presets, load_presets
from rl2.config.problem import Problem, refuse
from rl2.config.schema import TRAINER_CONFIGS
from rl2.config.unknown import near_keys
from rl2.config.values import get_value, show_value
from rl2.output import outlive_readers
from rl2.parallel.rank import is_first_rank


def answer_trainer(name: str) -> None:
    """Answers --help of the trainer `name`, such as ppo, and ends the program then.

    From here on the process outlives the readers of its output, and Ctrl-C ends it without a
    traceback, until the run listens to signals.
    """
    outlive_readers()
    answer_help(TRAINER_CONFIGS[name], sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def answer_help(root: type, argv: list[str]) -> None:
    """Prints the help on rank 0 and ends the program, if the arguments ask for it.

    `root` is the config class of a trainer or a subclass of one.
    """
    if "-h" not in argv and "--help" not in argv:
        return
    text = describe(root, argv)
    if is_first_rank():
        print(text)
    sys.exit(0)


def describe(root: type, argv: list[str]) -> str:
    """The help of the sections or keys that the arguments name, or of the trainer."""
    topics = [word for word in argv if not word.startswith("-") and "=" not in word]
    if not topics:
        return explain_usage(root)
    if topics == [KEY] and has_presets(schema_keys(root)):
        return explain_presets()
    return "\n\n".join(explain(root, topic) for topic in topics)


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
        message = f"--help {topic}: there is no such section or key; try {near}"
        refuse([Problem("--help", topic, message)])
    return "\n".join(lines).strip("\n")


def explain_usage(root: type) -> str:
    """The short help: how to start the trainer, its sections, and how to see their keys."""
    known = schema_keys(root)
    sections = [name for name in known if "." not in name]
    required = " ".join(f"{name}=..." for name, key in known.items() if key.default == MISSING)
    trainer = f"rl2.trainer.{root.__name__.removesuffix('Config').lower()}"
    lines = [
        f"torchrun --nproc_per_node=N -m {trainer} {required} key=value",
        f"python -m {trainer} ... is one process. The sections of keys:",
        *(f"  {name:10} {known[name].help}" for name in sections),
        f"--help {sections[0]} lists the keys of a section; --help all, --help KEY explain more",
    ]
    if has_presets(known):
        lines.append(f"{KEY}=NAME sets the keys of a published algorithm: --help {KEY} lists them")
    lines += [
        "--cfg job prints the config; --multirun KEY=A,B runs a job for each value",
        "--config-dir DIR --config-name NAME starts from a YAML file; rl2 plan predicts the memory",
        "A value with spaces, commas, = or parentheses needs quotes in quotes: 'key=\"a value\"'",
    ]
    return "\n".join(lines)


def explain_presets() -> str:
    """The presets and the keys that each sets."""
    lines = [f"{KEY}=NAME sets the keys of a published algorithm; those written beside it win:"]
    for name in load_presets():
        lines.append(f"  {name}")
        text = textwrap.fill(describe_preset(name), _width() - 6)
        lines.append(textwrap.indent(text, " " * 6))
    return "\n".join(lines)


def _with_choices(text: str, key: Key) -> str:
    """The text, and the choices of the key if it has some."""
    choices = [*key.choices]
    if key.functions:
        choices = [*key.functions, "file.py:function"]
    return f"{text} [{' | '.join(choices)}]" if choices else text


def _default(root: type, name: str) -> str:
    """The default of a key as the user would write it."""
    value: Any = get_value(root(), name)
    if value == MISSING:
        return "(required)"
    return "(none)" if value is None else show_value(value)


def _width() -> int:
    """Columns of the help: those of the terminal, from 80 to 100."""
    return max(80, min(100, shutil.get_terminal_size(fallback=(100, 24)).columns))
