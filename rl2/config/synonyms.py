"""Answers for keys of other trainers and for names of algorithms.

synonyms.yaml has the table of keys. It is read only if a key or a function is unknown.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml

from rl2.config.presets import find_preset, load_presets

FILE = Path(__file__).with_name("synonyms.yaml")
OTHER_TRAINERS = {"dpo": "dpo", "ipo": "dpo", "sft": "sft", "rm": "rm"}  # name -> command of rl2
# Under which one looks for a key that names the algorithm.
ALGORITHM_KEYS = ("algorithm", "alg", "method", "algorithm.name", "trainer.algorithm")


class Alternative(NamedTuple):
    key: str  # of rl2
    remark: str = ""  # where the meaning differs; such a key does not stand for the other one

    def __str__(self) -> str:
        return f"{self.key} {self.remark}".rstrip()


@dataclass(frozen=True)
class Answer:
    """What to say about a key of another trainer: it has alternatives here, or a reason why not."""

    project: str = ""  # RL2, verl or TRL
    alternatives: tuple[Alternative, ...] = ()  # for different trainers of rl2
    reason: str = ""

    def for_critic(self) -> "Answer":
        """The answer to the critic's key, where the table has the actor's."""
        alternatives = []
        for key, remark in self.alternatives:
            key = key.replace("actor.", "critic.")
            alternatives.append(Alternative(key, remark.replace("actor.", "critic.")))
        reason = self.reason.replace("actor.", "critic.")
        return Answer(self.project, tuple(alternatives), reason)

    def usable(self, known: Collection[str]) -> list[Alternative]:
        """The alternatives that the trainer with the `known` keys has."""
        return [alternative for alternative in self.alternatives if alternative.key in known]

    def same_key(self, known: Collection[str]) -> str:
        """The key of rl2 that means the same, "" if none does."""
        usable = self.usable(known)
        return usable[0].key if usable and not usable[0].remark else ""

    def explain(self, known: Collection[str]) -> str:
        """The answer in words."""
        if self.reason:
            return f"there is no such key here: {self.reason}"
        owner = f"this is {self.project}'s; here"
        usable = self.usable(known)
        if usable:
            return f"{owner} set {' or '.join(map(str, usable))}"
        keys = " | ".join(map(str, self.alternatives))
        return f"{owner} {keys}, which this trainer does not have"


@cache
def load_answers() -> dict[str, Answer]:
    """Reads the answers by the other trainer's key; "section." stands for all keys below."""
    tables = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    answers: dict[str, Answer] = {}
    for row in tables["absent"]:
        answers |= dict.fromkeys(row["names"], Answer(reason=row["reason"]))
    for project, rows in tables["equivalents"].items():
        for row in rows:
            alternatives = []
            for text in row["here"]:
                key, _, remark = text.partition(" ")
                alternatives.append(Alternative(key, remark))
            answer = Answer(project, tuple(alternatives))
            answers |= dict.fromkeys(row["names"], answer)
    return answers


def find_answer(key: str, known: Collection[str]) -> Answer | None:
    """The answer for a key that is not among the `known` ones, if it is one of another trainer."""
    answers = load_answers()
    name = key.removeprefix("actor_rollout_ref.")
    if name in answers:
        return answers[name]
    as_actor = re.sub("^critic[.]", "actor.", name)
    for candidate in (as_actor, *_sections(as_actor)):
        if candidate in answers:
            answer = answers[candidate]
            return answer if as_actor == name else answer.for_critic()
    last_part = name.rpartition(".")[2]
    is_own = any(other.endswith(f".{last_part}") for other in known)
    return None if is_own else answers.get(last_part)


def _sections(name: str) -> Iterator[str]:
    """The sections that a key is in, the innermost first, each with its dot: a.b.c is in a.b."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield f"{name}."


def explain_algorithm(name: str) -> str:
    """How to choose the algorithm of this name, in words; "" if no algorithm has the name."""
    preset = find_preset(name)
    if preset:
        found = load_presets()[preset]
        return f"{found.title} is algo={preset}, which sets {found}"
    if name.lower() in OTHER_TRAINERS:
        return f"it has a trainer of its own, python -m rl2 {OTHER_TRAINERS[name.lower()]}"
    return ""
