"""The prompts and answers of transcripts, without what repeats itself.

A prompt is shown once for all its answers, equal answers once with their count, and the messages
with which all prompts begin, such as examples, once for all prompts.
"""

import json
import math
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import takewhile
from os.path import commonprefix
from pathlib import Path

from rl2.report.saved import Record, cut_messages, read_lines, spread, to_json
from rl2.report.token_texts import SavedTokens
from rl2.run.success import score_of

MAX_ANSWERS = 16  # of a group: different ones
MAX_QUESTIONS = 40  # that an evaluation answered better than another one; as many worse and same
MIN_SHARED_TEXT = 200  # characters; less is not worth a fold of its own
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


@dataclass(frozen=True)
class SharedStart:
    """What all prompts of a split begin with, such as a system prompt and examples."""

    messages: list[Record] = field(default_factory=list)
    text: str = ""  # with which the content of the next message begins
    role: str = ""  # of that message

    @classmethod
    def find(cls, prompts: list[list[Record]]) -> "SharedStart":
        """Finds it. The last message of a prompt is never shared as a whole."""
        prompts = [prompt for prompt in prompts if prompt]
        if not prompts:
            return cls()
        columns = zip(*(prompt[:-1] for prompt in prompts), strict=False)
        messages = [first for first, *others in takewhile(_are_equal, columns)]
        following = [prompt[len(messages)] for prompt in prompts]
        roles = {message.get("role") for message in following}
        contents = [message.get("content") for message in following]
        texts = {content for content in contents if isinstance(content, str)}
        text = ""
        if len(roles) == 1 and len(texts) > 1 and None not in contents:
            text = commonprefix(list(texts))
            text = text[: text.rfind("\n") + 1]  # whole lines
        if len(text) < MIN_SHARED_TEXT:
            return cls(messages)
        return cls(messages, text, roles.pop() or "?")

    def strip(self, prompt: list[Record]) -> list[Record]:
        """Returns the prompt without it; the whole prompt if it begins in another way."""
        num_shared = len(self.messages)
        rest = prompt[num_shared:]
        if prompt[:num_shared] != self.messages or not rest:
            return prompt
        if self.text:
            content = rest[0].get("content")
            if not isinstance(content, str) or not content.startswith(self.text):
                return prompt
            rest = [{**rest[0], "content": f"… {content[len(self.text) :]}"}, *rest[1:]]
        return rest

    def to_page(self) -> list[Record]:
        """Returns the messages to show."""
        text = [{"role": self.role, "content": f"{self.text}…"}] if self.text else []
        return cut_messages([*self.messages, *text])


def _are_equal(messages: tuple[Record, ...]) -> bool:
    return all(message == messages[0] for message in messages)


def describe_group(
    records: list[Record], shared: SharedStart, tokens: SavedTokens | None = None
) -> Record:
    """Returns the messages with which all answers begin, and a sample of the answers."""
    prompts = zip(*map(prompt_of, records), strict=False)
    prompt = [first for first, *others in takewhile(_are_equal, prompts)]
    return {
        "group": records[0].get("group"),
        "size": len(records),
        "row": records[0].get("row"),
        "prompt": cut_messages(shared.strip(prompt)),
        "answers": describe_answers(records, len(prompt), tokens),
    }


def describe_answers(
    records: list[Record], start: int, tokens: SavedTokens | None = None
) -> list[Record]:
    """Returns a sample of the different answers: their messages from `start`, and their `count`."""
    equal: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        seen = [record.get("messages", [])[start:], *(record.get(name) for name in COLUMNS)]
        equal[json.dumps(seen, sort_keys=True, default=str)].append(record)
    answers = []
    for same in spread(list(equal.values()), MAX_ANSWERS):
        record = same[0]
        messages = cut_messages(record.get("messages", [])[start:])
        if tokens is not None:
            tokens.add_to(messages, record["id"])
        answer = {name: record[name] for name in COLUMNS if name in record}
        answers.append({**answer, "count": len(same), "messages": messages})
    return answers


def compare_evaluations(first: Path, last: Path, part: str | None, num_bytes: int) -> Record:
    """Returns how the scores of the same questions changed between two files of transcripts.

    `part` is rollout.score. The result has the counts of all questions, their mean scores, and of
    those that were answered better, worse and the same a sample each, in at most `num_bytes`.
    """
    before, after = read_questions(first), read_questions(last)
    old, new = (score_questions(questions, part) for questions in (before, after))
    common = [question for question in old if question in new]
    changes: dict[str, list[str]] = {"better": [], "worse": [], "same": []}
    for question in common:
        changes[_describe_change(old[question], new[question])].append(question)
    sample: dict[str, str] = {}
    for change, questions in changes.items():
        sample |= dict.fromkeys(spread(questions, MAX_QUESTIONS), change)
    shared = SharedStart.find([prompt_of(before[question][0]) for question in common])
    shown: list[Record] = []
    for question in common:
        if question not in sample:
            continue
        prompt = prompt_of(before[question][0])
        shown.append(
            {
                "change": sample[question],
                "row": before[question][0].get("row"),
                "prompt": cut_messages(shared.strip(prompt)),
                "before": describe_answers(before[question], len(prompt)),
                "after": describe_answers(after[question], len(prompt)),
            }
        )
        num_bytes -= len(to_json(shown[-1]))
        if num_bytes < 0:
            shown.pop()
            break
    counts = {change: len(questions) for change, questions in changes.items()}
    means = []
    for scores in (old, new):
        total = sum(scores[question] for question in common)
        means.append(total / len(common) if common else math.nan)
    return {
        "score": part,
        "means": means,
        "shared": shared.to_page(),
        "counts": counts,
        "questions": shown,
    }


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
            scores[question] = sum(score_record(record, part) for record in counted) / len(counted)
    return scores


def score_record(record: Record, part: str | None) -> float:
    return score_of(record.get("rewards") or {}, reward_of(record), part) or 0.0


def _describe_change(old: float, new: float) -> str:
    """Returns whether the mean score became better, worse or stayed the same."""
    if math.isclose(old, new, abs_tol=1e-9):
        return "same"
    return "better" if new > old else "worse"
