"""Rows in the shape of public data sets, as they come from the hub: they are read without a script.

The texts are made up; the columns and their types are those of the data sets. `data.columns` is
what a user adds where a column has another name.
"""

import asyncio
import json

import pytest
from env_helpers import env_of

from rl2.data.formats import read_pair_row, read_ppo_row, read_sft_row
from rl2.data.rows import load_rows
from rl2.env.load import load_env, preflight

QUESTION = {"role": "user", "content": "How many clips did she sell in April and May?"}
REPLY = {"role": "assistant", "content": "She sold 72 clips."}
OTHER_REPLY = {"role": "assistant", "content": "She sold 48 clips."}
TEXT, REPLY_TEXT, OTHER_TEXT = [m["content"] for m in (QUESTION, REPLY, OTHER_REPLY)]


def read(tmp_path, reader, row, columns=None):
    """The row as it is read from a file."""
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    return load_rows(str(file), read=reader, columns=columns)[0]


# name -> (row, data.columns, what must come out of it)
PPO_ROWS = {
    "openai/gsm8k": (
        {"question": TEXT, "answer": "48 / 2 = <<48/2=24>>24\n48 + 24 = 72\n#### 72"},
        {"question": "prompt"},
        {"messages": TEXT, "answer": "48 / 2 = <<48/2=24>>24\n48 + 24 = 72\n#### 72"},
    ),
    "BytedTsinghua-SIA/DAPO-Math-17k": (
        {
            "data_source": "math_dapo",
            "prompt": [{"content": TEXT, "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": "72", "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
        },
        None,
        {"messages": [QUESTION], "answer": "72", "data_source": "math_dapo"},
    ),
    "gsm8k as verl's preprocessing writes it": (
        {
            "data_source": "openai/gsm8k",
            "prompt": [QUESTION],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "72"},
            "extra_info": {"split": "train", "index": 0, "answer": "#### 72", "question": TEXT},
        },
        None,
        {"messages": [QUESTION], "answer": "72"},
    ),
    "trl-lib/DeepMath-103K": (
        {"prompt": [QUESTION], "solution": "$72$"},
        None,
        {"messages": [QUESTION], "solution": "$72$"},
    ),
    "open-r1/DAPO-Math-17k-Processed": (
        {"prompt": TEXT, "solution": "72", "data_source": "math_dapo", "ability": "MATH"},
        {"solution": "answer"},
        {"messages": TEXT, "answer": "72"},
    ),
    "one message, with gt_answer": (
        {"messages": QUESTION, "gt_answer": "72"},
        None,
        {"messages": [QUESTION], "answer": "72"},
    ),
    "ShareGPT, without the reply": (
        {"id": "a_0", "conversations": [{"from": "human", "value": TEXT}]},
        None,
        {"messages": [QUESTION], "id": "a_0"},
    ),
}
SFT_ROWS = {
    "GAIR/LIMO": (
        {"question": TEXT, "solution": REPLY_TEXT, "answer": "72"},
        {"question": "prompt", "solution": "completion"},
        {"messages": TEXT, "completion": REPLY_TEXT},
    ),
    "trl-lib/tldr": (
        {"prompt": TEXT, "completion": REPLY_TEXT},
        None,
        {"messages": TEXT, "completion": REPLY_TEXT},
    ),
    "nvidia/HelpSteer2": (
        {"prompt": TEXT, "response": REPLY_TEXT, "helpfulness": 3, "correctness": 4},
        None,
        {"messages": TEXT, "completion": REPLY_TEXT},
    ),
    "tatsu-lab/alpaca": (
        {"instruction": TEXT, "input": "", "output": REPLY_TEXT, "text": f"{TEXT} {REPLY_TEXT}"},
        None,
        {"messages": f"{TEXT} {REPLY_TEXT}"},
    ),
    "tatsu-lab/alpaca, the reply alone": (
        {"instruction": TEXT, "input": "", "output": REPLY_TEXT, "text": f"{TEXT} {REPLY_TEXT}"},
        {"instruction": "prompt", "output": "completion"},
        {"messages": TEXT, "completion": REPLY_TEXT},
    ),
    "teknium/OpenHermes-2.5": (
        {
            "conversations": [
                {"from": "system", "value": "Be short.", "weight": None},
                {"from": "human", "value": TEXT, "weight": 0.0},
                {"from": "gpt", "value": REPLY_TEXT, "weight": 1.0},
            ],
            "source": "airoboros2.2",
            "system_prompt": None,
        },
        None,
        {"messages": [{"role": "system", "content": "Be short."}, QUESTION, REPLY]},
    ),
    "allenai/tulu-3-sft-mixture": (
        {"id": "a", "messages": [QUESTION, REPLY], "source": "ai2-adapt-dev/x"},
        None,
        {"messages": [QUESTION, REPLY]},
    ),
    "trl-lib/Capybara": (
        {"source": "Airoboros", "messages": [QUESTION, REPLY], "num_turns": 1},
        None,
        {"messages": [QUESTION, REPLY]},
    ),
}
PAIR = {"messages": [QUESTION], "chosen": REPLY_TEXT, "rejected": OTHER_TEXT}
PAIR_ROWS = {
    "HuggingFaceH4/ultrafeedback_binarized": (
        {
            "prompt": TEXT,
            "prompt_id": "f0e37e9f",
            "chosen": [QUESTION, REPLY],
            "rejected": [QUESTION, OTHER_REPLY],
            "messages": [QUESTION, REPLY],
            "score_chosen": 8.5,
            "score_rejected": 4.0,
        },
        None,
        PAIR,
    ),
    "trl-lib/ultrafeedback_binarized": (
        {"chosen": [QUESTION, REPLY], "rejected": [QUESTION, OTHER_REPLY], "score_chosen": 8.5},
        None,
        PAIR,
    ),
    "Skywork/Skywork-Reward-Preference-80K-v0.2": (
        {"chosen": [QUESTION, REPLY], "rejected": [QUESTION, OTHER_REPLY], "source": "magpie"},
        None,
        PAIR,
    ),
    "Anthropic/hh-rlhf": (
        {
            "chosen": f"\n\nHuman: {TEXT}\n\nAssistant: Yes, 72.",
            "rejected": f"\n\nHuman: {TEXT}\n\nAssistant: No.",
        },
        None,
        {
            "messages": f"\n\nHuman: {TEXT}\n\nAssistant:",
            "chosen": " Yes, 72.",
            "rejected": " No.",
        },
    ),
    "Intel/orca_dpo_pairs": (
        {"system": "", "question": TEXT, "chosen": REPLY_TEXT, "rejected": OTHER_TEXT},
        {"question": "prompt"},
        {"messages": TEXT, "chosen": REPLY_TEXT, "rejected": OTHER_TEXT},
    ),
}
ALL_ROWS = [
    *[(read_ppo_row, name, *case) for name, case in PPO_ROWS.items()],
    *[(read_sft_row, name, *case) for name, case in SFT_ROWS.items()],
    *[(read_pair_row, name, *case) for name, case in PAIR_ROWS.items()],
]


@pytest.mark.parametrize(
    ("reader", "row", "columns", "expected"),
    [case[:1] + case[2:] for case in ALL_ROWS],
    ids=[case[1] for case in ALL_ROWS],
)
def test_a_row_is_read_as_it_comes(tmp_path, reader, row, columns, expected):
    seen = read(tmp_path, reader, row, columns)
    assert {name: seen.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("reader", "row", "message"),
    [
        # openai/gsm8k without data.columns
        (
            read_ppo_row,
            {"question": TEXT, "answer": "#### 72"},
            "column 'messages' is missing; the row has question, answer; prompt and conversations "
            "are read too; data.columns.OLD=messages renames a column",
        ),
        # Open-Reasoner-Zero's file: each row is a list of ShareGPT's messages
        (
            read_ppo_row,
            [{"from": "human", "value": TEXT}, {"from": "assistant", "ground_truth": {"value": 7}}],
            "expected a JSON object, got .*'from': 'human'.*write .*\"messages\": ",
        ),
        # allenai/tulu-3-sft-mixture in PPO: the reply stands in the conversation
        (read_ppo_row, {"messages": [QUESTION, REPLY]}, "the last message is the assistant's; rem"),
        # ShareGPT with an unknown sender
        (
            read_sft_row,
            {"conversations": [{"from": "alice", "value": TEXT}]},
            "from='alice' is unknown; it may be system, human",
        ),
        # GAIR/LIMO with one column renamed only
        (read_sft_row, {"prompt": TEXT, "solution": REPLY_TEXT}, "needs 'completion' beside it"),
        # trl-lib/tldr in PPO works as a prompt, a pair needs two replies
        (read_pair_row, {"prompt": TEXT, "completion": REPLY_TEXT}, "column 'chosen' is missing"),
        # nvidia/HelpSteer3: two responses and a preference
        (
            read_pair_row,
            {"context": [QUESTION], "response1": REPLY_TEXT, "response2": OTHER_TEXT},
            "column 'chosen' is missing; the row has context.*data.columns.OLD=chosen renames",
        ),
    ],
)
def test_a_row_that_does_not_suit_is_refused_with_the_remedy(tmp_path, reader, row, message):
    with pytest.raises(ValueError, match=f"(?s)rows.jsonl, row 1: .*{message}"):
        read(tmp_path, reader, row)


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
    row, columns, _ = PPO_ROWS["openai/gsm8k"]
    seen = read(tmp_path, read_ppo_row, row, columns)
    env = load_env("gsm8k")
    conversation = [QUESTION, {"role": "assistant", "content": "24 + 48 = 72\n#### 72"}]
    assert asyncio.run(env.score(conversation, seen)) == {"right": 1.0, "format": 0.1}
    conversation[-1] = {"role": "assistant", "content": "#### 48"}
    assert asyncio.run(env.score(conversation, seen))["right"] == 0.0
