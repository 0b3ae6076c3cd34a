"""Rows in the shape of public data sets, as they come from the hub: they are read without a script.

cases/public_rows.yaml has them. `data.columns` is what a user adds where a column has another name.
"""

import asyncio
import json

import pytest
from common import read_cases
from env_helpers import env_of

from rl2.data.formats import read_pair_row, read_ppo_row, read_sft_row
from rl2.data.rows import load_rows
from rl2.env.load import load_env, preflight

ROWS = read_cases("public_rows")
READERS = {"ppo": read_ppo_row, "sft": read_sft_row, "pair": read_pair_row}
QUESTION = ROWS["question"]


def read(tmp_path, reader, row, columns=None):
    """The row as it is read from a file."""
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    return load_rows(str(file), read=reader, columns=columns)[0]


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in READERS for name in ROWS[kind]]
)
def test_a_row_is_read_as_it_comes(tmp_path, kind, name):
    case = ROWS[kind][name]
    seen = read(tmp_path, READERS[kind], case["row"], case.get("columns"))
    assert {column: seen.get(column) for column in case["expected"]} == case["expected"]


@pytest.mark.parametrize(("kind", "row", "message"), ROWS["refused"])
def test_a_row_that_does_not_suit_is_refused_with_the_remedy(tmp_path, kind, row, message):
    with pytest.raises(ValueError, match=f"(?s)rows.jsonl, row 1: .*{message}"):
        read(tmp_path, READERS[kind], row)


def test_answer_is_needed_only_where_the_environment_asks_for_it(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": [QUESTION], "solution": "72"}) + "\n")
    rows = {"data.path": load_rows(str(file), read=read_ppo_row)}
    preflight(env_of(lambda messages: 0.0), rows, 1)
    preflight(env_of(lambda messages, solution: 0.0), rows, 1)
    preflight(env_of(lambda messages, answer=None: 0.0), rows, 1)
    with pytest.raises(ValueError, match="needs column 'answer'.*data.columns.OLD=answer"):
        preflight(env_of(lambda messages, answer: 0.0), rows, 1)


def test_the_solutions_of_gsm8k_are_answers_of_its_environment(tmp_path):
    case = ROWS["ppo"]["openai/gsm8k"]
    seen = read(tmp_path, read_ppo_row, case["row"], case["columns"])
    env = load_env("gsm8k")
    conversation = [QUESTION, {"role": "assistant", "content": "24 + 48 = 72\n#### 72"}]
    assert asyncio.run(env.score(conversation, seen)) == {"right": 1.0, "format": 0.1}
    conversation[-1] = {"role": "assistant", "content": "#### 48"}
    assert asyncio.run(env.score(conversation, seen))["right"] == 0.0
