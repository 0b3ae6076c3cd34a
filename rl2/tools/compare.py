"""Where two runs first part: what they recorded is compared in the order in which a step happens.

`find_difference` needs the run folders alone: no model, no data and no GPU.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from os.path import commonprefix
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from rl2.progress import Bar
from rl2.report.answers import prompt_of
from rl2.report.saved import Record, read_lines, read_yaml
from rl2.report.token_texts import find_tokenizer

# What differs from run to run. A warning may be about the cores of the machine.
TIMED = ("time/", "overlap/", "memory/", "resources/", "tokens/per_second", "warnings")
# The phases of a step in their order, and what a person calls them.
PHASES = {
    "data": "the rows of the data",
    "prompt": "the tokens of a prompt",
    "engine": "the engine's log-probabilities",
    "answer": "a sampled answer",
    "environment": "what the environment said",
    "reward": "the reward",
    "scores": "the trainer's log-probabilities",
    "advantage": "the advantage",
    "update": "the update",
    "weights": "the weights after the update",
    "evaluation": "the evaluation",
}
# What the answers of a step are compared by, in this order. An answer may lack some of it.
STAGES = (
    ("data", ("row", "prompt")),
    ("answer", ("tokens",)),  # each with its log-probability
    ("answer", ("messages", "finish_reason", "length")),
    ("reward", ("rewards", "weights", "reward", "is_filtered")),
    ("scores", ("trainer_logps",)),
    ("advantage", ("advantages", "advantage")),
)
METRIC_PHASES = {
    "reward": "reward",
    "rollout": "reward",
    "weights": "weights",
    "test": "evaluation",
}
TOKEN_COLUMNS = {"advantages", "trainer_logps"}
SAVED = {"tokens", "mask", "logps", *TOKEN_COLUMNS}  # of the columns of step_N.safetensors
ABSENT = "nothing"
SHOWN = 80  # characters of a value
SHOWN_TOKENS = 12  # before the one that differs

Answers = dict[int, Record]  # of a step, by their id


@dataclass(frozen=True)
class Difference:
    """The first thing that differs in a step, and its values in the two runs."""

    phase: str  # of PHASES
    name: str  # of what differs: a metric, a column, a reward part, a token
    values: tuple[Any, Any]
    step: int = 0
    split: str = ""  # of rollouts/; "" if a line of metrics.jsonl differs
    group: int | None = None
    answer: int | None = None  # its number in the group, from 0

    def __str__(self) -> str:
        place = "metrics.jsonl"
        if self.split:
            place = f"rollouts/{self.split}/step_{self.step}.jsonl"
        if self.answer is not None:
            place = f"group {self.group}, answer {self.answer} of {place}"
        first, second = _shorten(*self.values)
        return (
            f"step {self.step}, {PHASES[self.phase]} ({place})\n  {self.name}: {first} and {second}"
        )


class Run:
    """What is in the folder of a run. ValueError if it holds none."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.config: Record = read_yaml(folder / "config.yaml") or {}
        self.record: Record = read_yaml(folder / "run.json") or {}  # JSON is YAML
        lines, self.num_broken = read_lines(folder / "metrics.jsonl")
        self.metrics = {line["step"]: dict(flatten(line)) for line in lines}
        if not self.config and not lines:
            raise ValueError(
                f"{folder} is not the folder of a run: it has neither config.yaml nor a line in "
                "metrics.jsonl. Give the trainer.save_dir of a run"
            )

    def rollout_files(self, split: str, step: int) -> list[Path]:
        """Returns the transcripts of a step and their tokens, as far as the run has them."""
        path = self.folder / "rollouts" / split / f"step_{step}.jsonl"
        return [file for file in (path, path.with_suffix(".safetensors")) if file.exists()]

    @cached_property
    def decode(self) -> Callable[[list[int]], str]:
        """Ids to text; to their numbers where the tokenizer is not on this machine."""
        tokenizer = find_tokenizer(self.folder, self.config)
        return tokenizer.decode if tokenizer else str


class Comparison:
    """Compares two runs.

    Numbers are equal if they differ by `tolerance` at most, or by this fraction of the larger one.
    Times and memory are not compared, and neither is what only one of the runs has recorded.
    """

    def __init__(self, first: Run, second: Run, tolerance: float = 0.0):
        self.runs = (first, second)
        self.tolerance = tolerance
        self.seen: set[str] = set()  # of the step: answers, tokens, weights

    def find(self, steps: Iterable[int]) -> Difference | None:
        """Returns the first difference in these steps, if any. Both runs must have them."""
        steps = sorted(steps)
        with Bar("comparing", len(steps), "step") as bar:
            for step in steps:
                self.seen = set()
                found = next(self._differences(step), None)
                if found is not None:
                    return replace(found, step=step)
                bar.add(1)
        return None

    def _differences(self, step: int) -> Iterator[Difference]:
        """Yields the differences in a step, the earliest first."""
        yield from self._rollout_differences("train", step)
        metrics = sorted(
            self._metric_differences(step), key=lambda found: list(PHASES).index(found.phase)
        )
        yield from (found for found in metrics if found.phase != "evaluation")
        for folder in sorted(self.runs[0].folder.glob("rollouts/test*")):
            for found in self._rollout_differences(folder.name, step):
                yield replace(found, phase="evaluation")
        yield from metrics

    def _metric_differences(self, step: int) -> Iterator[Difference]:
        first, second = (run.metrics[step] for run in self.runs)
        for name in first:
            if name not in second or name.startswith(TIMED):
                continue
            room = name.replace(".", "/").partition("/")[0]
            phase = METRIC_PHASES.get(room, "update")
            if room == "tokens":
                phase = "answer" if "answers" in self.seen else "data"
            if phase == "weights":
                self.seen.add("weights")
            if not self.are_equal(first[name], second[name]):
                yield Difference(phase, name, (first[name], second[name]))

    def _rollout_differences(self, split: str, step: int) -> Iterator[Difference]:
        files = [run.rollout_files(split, step) for run in self.runs]
        if not all(files):
            return
        if split == "train":
            self.seen.update(("answers", "tokens")[: min(map(len, files))])
        first, second = ([file.read_bytes() for file in own] for own in files)
        if first != second:
            for found in self._answer_differences(*map(read_answers, files)):
                yield replace(found, split=split)

    def _answer_differences(self, first: Answers, second: Answers) -> Iterator[Difference]:
        if first.keys() != second.keys():
            yield Difference("data", "ids of the answers", (list(first), list(second)))
        numbers = [number for number in first if number in second]
        for phase, names in STAGES:
            for number in numbers:
                a, b = first[number], second[number]
                for name, values in self._unequal(a, b, names):
                    group = a["group"]
                    answer = [n for n in first if first[n]["group"] == group].index(number)
                    found = self._describe(phase, name, values, a, b)
                    yield replace(found, group=group, answer=answer)

    def _unequal(
        self, a: Record, b: Record, names: Iterable[str]
    ) -> Iterator[tuple[str, tuple[Any, Any]]]:
        """Yields the entries that differ, among those of `names` that both have."""
        names = [name for name in names if name in a and name in b and a[name] != b[name]]
        first, second = (dict(flatten({name: each[name] for name in names})) for each in (a, b))
        for name in {**first, **second}:
            values = (first.get(name, ABSENT), second.get(name, ABSENT))
            if not self.are_equal(*values):
                yield name, values

    def _describe(
        self, phase: str, name: str, values: tuple[Any, Any], a: Record, b: Record
    ) -> Difference:
        """Words a difference of two answers for a person: its phase, name and values."""
        column, _, rest = name.partition(".")
        index = rest.partition(".")[0]
        position = int(index) if index.isdigit() else 0  # in a list
        if column == "messages" and not any(_is_reply(each, position) for each in (a, b)):
            phase = "environment"
        if column == "finish_reason" and "failed" in values:
            phase = "reward"
        if column not in {"tokens", *TOKEN_COLUMNS}:
            return Difference(phase, name, values)
        before = [token["id"] for token in a["tokens"][:position]][-SHOWN_TOKENS:]
        place = f"token {position + 1}, after {self.runs[0].decode(before)!r}"
        if column in TOKEN_COLUMNS:
            return Difference(phase, f"{column} of {place}", values)
        if name.endswith("logp"):
            return Difference("engine", f"log-probability of {place}", values)
        pairs = zip(self.runs, (a["tokens"], b["tokens"]), strict=True)
        texts = [_show_token(run, tokens[position : position + 1]) for run, tokens in pairs]
        return Difference(_find_phase(a, b, position), place, (texts[0], texts[1]))

    def are_equal(self, a: Any, b: Any) -> bool:
        if isinstance(a, int | float) and isinstance(b, int | float):
            is_close = math.isclose(a, b, rel_tol=self.tolerance, abs_tol=self.tolerance)
            return is_close or (math.isnan(a) and math.isnan(b))
        return bool(a == b)


def find_difference(
    first: Path, second: Path, steps: Iterable[int], tolerance: float = 0.0
) -> Difference | None:
    """Returns the first difference of two runs in these steps, which both must have recorded.

    `tolerance` is that of `Comparison`. ValueError if a folder holds no run.
    """
    return Comparison(Run(first), Run(second), tolerance).find(steps)


def flatten(tree: Any, prefix: str = "", is_deep: bool = True) -> Iterator[tuple[str, Any]]:
    """Yields (dotted name, value) of every value in nested objects, and in lists if `is_deep`."""
    kinds = (dict, list) if is_deep else (dict,)
    items = enumerate(tree) if isinstance(tree, list) else tree.items()
    for name, value in items:
        if isinstance(value, kinds) and value:
            yield from flatten(value, f"{prefix}{name}.", is_deep)
        else:
            yield f"{prefix}{name}", value


def read_answers(files: list[Path]) -> Answers:
    """Returns the records of a step by their id, with prompts, and with tokens if they are kept."""
    records = {record["id"]: record for record in read_lines(files[0])[0]}
    for record in records.values():
        record["prompt"] = prompt_of(record)
    if len(files) < 2:
        return records
    columns = load_file(files[1])
    owners = np.repeat(columns["trajectory"], columns["length"])
    for number, record in records.items():
        own = {name: columns[name][owners == number].tolist() for name in columns.keys() & SAVED}
        ids, masks, logps = (own.pop(name) for name in ("tokens", "mask", "logps"))
        if any(masks):  # else it failed or was filtered out
            triples = zip(ids, masks, logps, strict=True)
            record["tokens"] = [
                {"id": id, "mask": mask, "logp": logp} for id, mask, logp in triples
            ]
            record |= own
    return records


def _is_reply(record: Record, index: int) -> bool:
    """Returns whether a message was sampled."""
    return any(message["role"] == "assistant" for message in record["messages"][index : index + 1])


def _find_phase(a: Record, b: Record, position: int) -> str:
    """Returns the phase of the token at the position, the first in which two answers differ."""
    masks = [[token["mask"] for token in each["tokens"][: position + 1]] for each in (a, b)]
    if not all(map(any, masks)):
        return "prompt"
    return "answer" if any(mask[position:] == [1] for mask in masks) else "environment"


def _show_token(run: Run, tokens: list[Record]) -> str:
    ids = [token["id"] for token in tokens]
    return f"{ids[0]} {run.decode(ids)!r}" if ids else "the end"


def _shorten(*values: Any) -> list[str]:
    """Returns the values as texts; long ones are cut around their first difference."""
    texts = [str(value) for value in values]
    start = max(0, len(commonprefix(texts)) - SHOWN // 2)
    if max(map(len, texts)) <= SHOWN:
        return texts
    return [f"{'...' if start else ''}{text[start : start + SHOWN]!r}" for text in texts]
