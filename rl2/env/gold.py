"""What a row itself says is right, and the replies in which environments look for it."""

import contextlib
import json
from collections.abc import Collection

PROGRAM = "```python\n{}\n```"
FORMS = [
    "{}",
    "Answer: {}",
    "<answer>{}</answer>",
    r"\boxed{{}}",
    "#### {}",
    "<think>\nIt is simple.\n</think>\n<answer>{}</answer>",
]
WRONG = "31415926"  # also a program, which does nothing
ANSWER_COLUMNS = ("answer", "solution")
PROGRAM_COLUMNS = ("solutions", "solution", "code")  # of APPS and TACO, KodCode, MBPP


def gold_answers(row: dict, asked: Collection[str]) -> list[str]:
    """The right answers or programs of a row, as texts. `asked`: the columns that judge it.

    There are none if no column is known to have them. An object is none: it may be the tests.
    """
    columns = [column for column in ANSWER_COLUMNS if column in asked]
    if not columns and "test_cases" in asked:
        columns = list(PROGRAM_COLUMNS)
    return next((texts for column in columns if (texts := _texts(row.get(column)))), [])


def _texts(value: object) -> list[str]:
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    values = value if isinstance(value, list) else [value]
    texts = [
        str(each).rpartition("####")[2].strip()
        for each in values
        if isinstance(each, str | int | float)
    ]
    return [text for text in texts if text]
