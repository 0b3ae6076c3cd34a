"""What --help prints: the sections of a trainer, or every key of a section in full.

It is answered before a trainer is imported, which takes seconds: nothing here imports torch.
"""

import signal
import sys
import textwrap

from omegaconf import MISSING

from rl2.config.key import Key, schema_keys
from rl2.config.presets import KEY, describe_preset, has_presets, load_presets
from rl2.config.problem import Problem, refuse
from rl2.config.schema import TRAINER_CONFIGS
from rl2.config.values import show_value
from rl2.output import outlive_readers
from rl2.parallel.rank import is_first_rank

WIDTH = 80  # columns


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

    It is that of the sections or keys that they name, or of the trainer. `root` is the config class
    of a trainer or a subclass of one.
    """
    if "-h" not in argv and "--help" not in argv:
        return
    topics = [word for word in argv if not word.startswith("-") and "=" not in word]
    text = "\n\n".join(explain(root, topic) for topic in topics) or explain_usage(root)
    if is_first_rank():
        print(text)
    sys.exit(0)


def explain(root: type, topic: str = "all") -> str:
    """The help of all keys, or of those whose names begin with `topic`; of the presets for algo."""
    known = schema_keys(root)
    lines = []
    for name, key in known.items():
        if topic != "all" and not name.startswith(topic):
            continue
        if key.is_section:
            lines += ["", f"{name}: {key.help}"]
            continue
        default = "(required)" if key.default == MISSING else show_value(key.default)
        lines += _entry(f"{name}={default}", _with_choices(key))
    if topic == KEY and has_presets(known):
        lines.append(f"{KEY}=NAME sets the keys of a published algorithm; those beside it win:")
        for name in load_presets():
            lines += _entry(name, describe_preset(name))
    if not lines:
        message = f"--help {topic}: no section or key begins so; --help lists the sections"
        refuse([Problem("", message)])
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
    ]
    lines += [f"  {name:10} {known[name].help}" for name in sections]
    lines.append(
        f"--help {sections[0]} lists the keys of a section; --help all, --help KEY explain more"
    )
    if has_presets(known):
        lines.append(f"{KEY}=NAME sets the keys of a published algorithm: --help {KEY} lists them")
    lines += [
        "--cfg job prints the config; --multirun KEY=A,B runs a job for each value",
        "--config-dir DIR --config-name NAME starts from a YAML file; rl2 plan predicts the memory",
        "A value with spaces, commas, = or parentheses needs quotes in quotes: 'key=\"a value\"'",
    ]
    return "\n".join(lines)


def _entry(title: str, text: str) -> list[str]:
    """The lines of a key or a preset."""
    return [f"  {title}", textwrap.indent(textwrap.fill(text, WIDTH - 6), " " * 6)]


def _with_choices(key: Key) -> str:
    """The help of a key, and its choices if it has some."""
    choices = key.functions + ("file.py:function",) if key.functions else key.choices
    return f"{key.help} [{' | '.join(choices)}]" if choices else key.help
