"""The prompts and answers of transcripts, without what repeats itself, and their scores.

A prompt is there once for all its answers, and equal answers once with their count.
"""

import json
import math
from collections import defaultdict
from itertools import takewhile
from pathlib import Path
from statistics import fmean

from rl2.report.saved import MAX_CHARACTERS, Record, cut, read_lines, spread
from rl2.run.success import score_of

MAX_ANSWERS = 16  # of a group: different ones
# What the page shows of an answer, beside its messages.
COLUMNS = ("reward", "rewards", "advantage", "finish_reason", "length")


def prompt_of(record: Record) -> list[Record]:
    """Returns the messages before the first sampled turn; examples in a prompt have turns too."""
    messages = record.get("messages", [])
    turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    num_sampled = record.get("num_turns", len(turns))
    return messages[: turns[-num_sampled]] if 0 < num_sampled <= len(turns) else messages


def reward_of(record: Record) -> float:
    return record.get("reward") or 0.0


def describe_group(records: list[Record]) -> Record:
    """Returns the messages with which all answers begin, and a sample of the answers."""
    columns = zip(*map(prompt_of, records), strict=False)
    prompt = [first for first, *_ in takewhile(_are_equal, columns)]
    return {
        "group": records[0].get("group"),
        "size": len(records),
        "row": records[0].get("row"),
        "prompt": _cut_messages(prompt),
        "answers": _describe_answers(records, len(prompt)),
    }


def _are_equal(messages: tuple[Record, ...]) -> bool:
    return all(message == messages[0] for message in messages)


def _cut_messages(messages: list[Record]) -> list[Record]:
    return cut(messages, MAX_CHARACTERS // max(1, len(messages)))


def _describe_answers(records: list[Record], start: int) -> list[Record]:
    """Returns a sample of the different answers: their messages from `start`, and their `count`."""
    different: dict[str, Record] = {}
    for record in records:
        answer = {name: record[name] for name in COLUMNS if name in record}
        answer["messages"] = _cut_messages(record.get("messages", [])[start:])
        seen = different.setdefault(json.dumps(answer, sort_keys=True), {**answer, "count": 0})
        seen["count"] += 1
    return spread(list(different.values()), MAX_ANSWERS)


def describe_changes(first: Path, last: Path, part: str | None) -> str:
    """Says how the scores of the same questions changed between two files of transcripts.

    `part` is rollout.score.
    """
    old, new = (score_questions(read_questions(path), part) for path in (first, last))
    changes = [new[question] - old[question] for question in old if question in new]
    num_same = sum(math.isclose(change, 0, abs_tol=1e-9) for change in changes)
    num_better = sum(change > 1e-9 for change in changes)
    noun = "question" if len(changes) == 1 else "questions"
    return (
        f"Of {len(changes):,} {noun} of {first.parent.name}, by the mean {part or 'reward'} "
        f"{num_better:,} were answered better at step {last.stem.removeprefix('step_')} than at "
        f"step {first.stem.removeprefix('step_')}, {len(changes) - num_better - num_same:,} worse "
        f"and {num_same:,} the same."
    )


def read_questions(path: Path) -> dict[str, list[Record]]:
    """Returns the answers to each question, a text of its prompt and row."""
    questions: dict[str, list[Record]] = defaultdict(list)
    for record in read_lines(path)[0]:
        question = [prompt_of(record), record.get("row")]
        questions[json.dumps(question, sort_keys=True, default=str)].append(record)
    return questions


def score_questions(questions: dict[str, list[Record]], part: str | None) -> dict[str, float]:
    """Returns the mean score of the answers to each question. `part` is rollout.score.

    Answers on which the environment failed do not count, nor do questions that have no other.
    """
    scores = {}
    for question, records in questions.items():
        counted = [record for record in records if record.get("finish_reason") != "failed"]
        if counted:
            scores[question] = fmean(_score_record(record, part) for record in counted)
    return scores


def _score_record(record: Record, part: str | None) -> float:
    return score_of(record.get("rewards") or {}, reward_of(record), part) or 0.0
