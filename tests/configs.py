"""Helpers of the tests of the config: commands that pass, and the problems of a command."""

from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from omegaconf import OmegaConf

from rl2.config.arguments import read_arguments
from rl2.config.parse import compose
from rl2.config.problem import Problem
from rl2.config.schema import DPOConfig, PPOConfig, RMConfig, SFTConfig

ROOTS = {"ppo": PPOConfig, "sft": SFTConfig, "dpo": DPOConfig, "rm": RMConfig}
# The required keys of each trainer, with paths in a folder that has FILES.
BASE = {
    "ppo": ["data.path=train.jsonl", "actor.model_name=model", "rollout.env_path=env.py"],
    "sft": ["data.path=train.jsonl", "actor.model_name=model"],
    "dpo": ["data.path=train.jsonl", "actor.model_name=model"],
    "rm": ["data.path=train.jsonl", "critic.model_name=model"],
}
OWN_FUNCTIONS = """
from rl2.algorithms.advantages import Estimator
from rl2.algorithms.losses import PolicyLoss, PreferenceLoss
def policy(x):
    return -x.log_ratio * x.advantages, {}
loss = PolicyLoss(policy, settings=("clip_high",))
aged = PolicyLoss(policy, settings=(), needs=("ages",))
def critic(x):
    return x.rewards - x.values, x.rewards
estimator = Estimator(critic, needs=("rewards", "values"), settings=("lamda",))
def grouped(x):
    return x.rewards * x.mask
group_estimator = Estimator(grouped, needs=("rewards", "group"), settings=())
def typed(x):
    return x.rewards, x.rewards
needs_all = Estimator(typed, needs=("values", "group"), settings=("gamma",))
def paired(x):
    return x.margin
unpaired = PreferenceLoss(lambda x: x.gains, in_pairs=False)
"""
FILES = {
    "own.py": OWN_FUNCTIONS,
    "broken.py": "f = undefined",
    "model/config.json": "{}",
    "train.jsonl": "",
    "env.py": "",
    "note.txt": "",
    "list.yaml": "- a",
    "section.yaml": "actor: 3",
    "unknown.yaml": "actor:\n  lrr: 1\ntrainer:\n  resume: off\n",
    "reference.yaml": "actor:\n  lr: ${oops}",
    "old.yaml": "data:\n  seed: 5\n  num_few_shot: null\nteacher:\n  dtype: auto\n",
    "twice.yaml": "actor:\n  lr: 1\n  lr: 2",
    "cut.yaml": "actor: [",
    "binary.yaml": "\0",
    "right.yaml": "actor:\ntrainer:\n  max_steps: 100\n",
}


def key_types(kind: Any, prefix: str = "") -> Iterator[tuple[str, set[Any]]]:
    """The types that each key of a config class may have."""
    for name, annotation in get_type_hints(kind).items():
        if is_dataclass(annotation):
            yield from key_types(annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", {annotation, *get_args(annotation)}


def write_files(folder: Path) -> None:
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def resolved(config: Any) -> Any:
    """A config that was made in Python, with what follows other keys. Its paths name nothing."""
    config.data.path = "rows.jsonl"
    if isinstance(config, PPOConfig):
        config.rollout.env_path = "env.py"
    return OmegaConf.to_object(OmegaConf.structured(config))


def find_problems(trainer: str, words: list[str]) -> list[Problem]:
    """The problems of a command that also has the required keys."""
    root = ROOTS[trainer]
    return compose(root, read_arguments(root, BASE[trainer] + words))[1]


def problem_keys(trainer: str, *words: str) -> list[str]:
    return [problem.key for problem in find_problems(trainer, [*words])]
