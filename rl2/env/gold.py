"""Whether the right answers that come with the rows earn what they should, before a run begins.

A row whose right answer earns no more than a wrong reply, because of its form or by mistake, can
only teach the model something wrong.
"""

import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

SECONDS = 10.0  # after which no further row is tried
MAX_NAMED = 3
SHOWN = 60  # letters of an answer
ANSWER_FORMS = ("{}", "#### {}", "\\boxed{{{}}}", "<answer>{}</answer>")
WRONG = "pass"  # no answer, and a program that does nothing
SOLUTION_FORMS = ("{}", "```python\n{}\n```")
ANSWER_COLUMNS = ("answer", "solution", "ground_truth")  # if the environment asks for them
SOLUTION_COLUMNS = ("solution", "solutions")  # whole replies or programs, as in NuminaMath and APPS

# Plays the reply to a row and returns its reward.
Play = Callable[[dict, str], Awaitable[float]]


@dataclass(frozen=True)
class Gold:
    """The right answer of a row."""

    column: str
    text: str
    forms: tuple[str, ...]  # that environments ask for
    values: list[str]  # that are right in one of these forms


def find_gold(row: dict, asked: set[str]) -> Gold | None:
    """Returns the right answer of a row, if it has one. `asked` are the columns of the env."""
    for column in ANSWER_COLUMNS:
        if column in asked and row.get(column) is not None:
            text = _first(row[column])
            # GSM8K's answers end with "#### 72".
            values = list(dict.fromkeys((text, text.rpartition("####")[2].strip())))
            return Gold(column, text, ANSWER_FORMS, values)
    for column in SOLUTION_COLUMNS:
        if column not in asked and row.get(column):
            text = _first(row[column])
            return Gold(column, text, SOLUTION_FORMS, [text])
    return None


def _first(value: Any) -> str:
    """The value as a text; of a list, which may be in JSON, its first item."""
    if isinstance(value, str) and value.startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            return value
    if isinstance(value, list) and value:
        value = value[0]
    return str(value)


async def find_unrewarded(rows: list[tuple[str, dict]], asked: set[str], play: Play) -> list[str]:
    """Returns a warning if right answers earn no more than wrong ones.

    `rows` are those to try, with their places in the data.
    """
    begin = time.monotonic()
    num_earned, has_programs = 0, False
    unrewarded: list[str] = []
    for place, row in rows:
        gold = find_gold(row, asked)
        if gold is None or time.monotonic() - begin > SECONDS:
            continue
        has_programs |= gold.forms == SOLUTION_FORMS
        least = max([await play(row, form.format(WRONG)) for form in ("", *gold.forms)])
        right = [form.format(value) for value in gold.values for form in gold.forms]
        if max([await play(row, reply) for reply in right]) > least:
            num_earned += 1
        else:
            unrewarded.append(f"{place} ({gold.column}: {gold.text[:SHOWN]!r})")
    if not unrewarded or not (num_earned or has_programs):
        return []  # the environment may ask for another form of its answers
    more = ", ..." if len(unrewarded) > MAX_NAMED else ""
    return [
        f"in {len(unrewarded)} of {num_earned + len(unrewarded)} rows that were tried the right "
        "answer of the row earns no more than a wrong reply, in none of the usual forms: "
        f"{', '.join(unrewarded[:MAX_NAMED])}{more}; rl2 env shows what earns how much"
    ]
