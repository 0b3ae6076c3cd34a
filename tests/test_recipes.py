"""The recipes for GPUs: their data are made from published rows, and read as their runs do."""

import importlib.util
import os
import subprocess

import pytest
from common import ROOT, make_tokenizer, read_jsonl, run_main

from rl2.config.parse import parse
from rl2.config.schema import TRAINER_CONFIGS
from rl2.data.chat import ChatTemplate
from rl2.data.examples import PAIR_ROWS, SFT_ROWS
from rl2.inputs import read_examples
from rl2.ppo_inputs import make_prompts, read_ppo_inputs

KINDS = {"sft": SFT_ROWS, "dpo": PAIR_ROWS, "rm": PAIR_ROWS}
ON_A_CPU = {"quickstart.sh", "pipeline.sh", "install.sh"}
RECIPES = {path.name for path in (ROOT / "examples").glob("*.sh")} - ON_A_CPU


def conversation(question: str, reply: str) -> list[dict]:
    """Messages as the hub has them: content before role."""
    return [{"content": question, "role": "user"}, {"content": reply, "role": "assistant"}]


def preference(number: int, chosen: str, rejected: str, **columns) -> dict:
    question = f"Question {number}?"
    return {
        "chosen": conversation(question, chosen),
        "rejected": conversation(question, rejected),
        **columns,
    }


def feedback(number: int, chosen: str, rejected: str) -> dict:
    pair = preference(number, chosen, rejected)
    columns = {"messages": pair["chosen"], "score_chosen": 8.0, "score_rejected": 6.5}
    return {"prompt": f"Question {number}?", "prompt_id": f"{number:064x}", **pair, **columns}


PREFERENCES = [("Yes.", "No."), ("Same.", "Same."), ("Yes!", " "), ("A", "B"), ("C", "D")]
MORE_TURNS = [
    *conversation("Hello.", "Hello."),
    *conversation("Again?", "Again."),
]
# Rows in their published form, by the name, configuration and split of the data set.
PUBLISHED = {
    ("openai/gsm8k", "main", "train"): [
        {"question": "How many?", "answer": "48/2 = <<48/2=24>>24\n#### 72,000"},
    ],
    ("openai/gsm8k", "main", "test"): [{"question": "How much? ", "answer": "#### -3"}],
    ("HuggingFaceH4/MATH-500", None, "test"): [
        {
            "problem": "1+2?",
            "solution": "...",
            "answer": "3",
            "subject": "Algebra",
            "level": 1,
            "unique_id": "test/algebra/1.json",
        },
    ],
    ("Jiayi-Pan/Countdown-Tasks-3to4", None, "train"): [
        {"target": 24 + i // 2, "nums": [3, 9, 1]} for i in range(6)
    ],
    ("RUC-NLPIR/FlashRAG_datasets", "nq", "train"): [
        {"id": "0", "question": "capital of France?", "golden_answers": ["Paris", "paris"]},
    ],
    ("RUC-NLPIR/FlashRAG_datasets", "nq", "test"): [
        {"id": "0", "question": "capital of Peru?", "golden_answers": ["Lima"]},
    ],
    ("GAIR/LIMO", None, "train"): [
        {
            "question": f"What is {i} + 1?",
            "solution": f"It is {i + 1}.\n\n**Final Answer**\n\n\\boxed{{{i + 1}}}",
            "answer": str(i + 1),
        }
        for i in range(34)
    ],
    ("Skywork/Skywork-Reward-Preference-80K-v0.2", None, "train"): [
        *(preference(i, *pair, source="magpie_pro") for i, pair in enumerate(PREFERENCES)),
        {"chosen": MORE_TURNS, "rejected": [*MORE_TURNS[:-1], MORE_TURNS[1]], "source": "other"},
        {"chosen": MORE_TURNS, "rejected": MORE_TURNS[:2], "source": "other"},
    ],
    ("HuggingFaceH4/ultrafeedback_binarized", None, "train_prefs"): [
        feedback(i, *pair) for i, pair in enumerate(PREFERENCES)
    ],
    ("HuggingFaceH4/ultrafeedback_binarized", None, "test_prefs"): [feedback(9, "Yes.", "No.")],
}
ORZ = [
    [
        {"from": "human", "value": "1+1?"},
        {"from": "assistant", "ground_truth": {"value": "2"}},
    ],
]


def list_calls(script: str, folder) -> dict[str, list[str]]:
    """The arguments that a script gives to `python` and to `torchrun`, which do nothing here."""
    for program in ("python", "torchrun", "curl"):
        file = folder / program
        file.write_text(f'#!/usr/bin/env bash\nprintf "%s\\n" "$@" >{folder}/{program}.txt\n')
        file.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    for name in ("MODEL", "NUM_GPUS"):
        environment.pop(name, None)
    subprocess.run(["bash", str(ROOT / "examples" / script)], env=environment, check=True)
    return {
        program: (folder / f"{program}.txt").read_text().splitlines()
        for program in ("python", "torchrun")
    }


def make_data(monkeypatch, name: str, folder) -> tuple[list[dict], list[dict]]:
    """The rows that examples/data.py writes from PUBLISHED: (training rows, test rows)."""
    spec = importlib.util.spec_from_file_location("recipe_data", ROOT / "examples/data.py")
    data = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(data)

    def load_split(dataset, split, configuration=None):
        return PUBLISHED[dataset, configuration, split]

    monkeypatch.setattr(data, "load_split", load_split)
    monkeypatch.setattr(data, "download", lambda url: ORZ)
    monkeypatch.setattr(data, "NUM_HELD_OUT", 2)
    assert run_main(data.main, name, folder) == 0
    return read_jsonl(folder / "train.jsonl"), read_jsonl(folder / "test.jsonl")


@pytest.mark.parametrize("script", sorted(RECIPES))
def test_a_recipe_makes_and_reads_its_data(script, tmp_path, monkeypatch):
    """The run's own checks of config, rows and environment pass, and no row is dropped."""
    calls = list_calls(script, tmp_path)
    path, name, folder = calls["python"]
    assert path == "examples/data.py"
    train, test = make_data(monkeypatch, name, tmp_path / "data")
    standalone, processes, _, module, *overrides = calls["torchrun"]
    assert standalone == "--standalone"
    trainer = module.removeprefix("rl2.trainer.")
    assert f"data.path={folder}/train.jsonl" in overrides
    assert f"data.test_path={folder}/test.jsonl" in overrides
    for variable in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(variable, processes.removeprefix("--nproc_per_node="))
    monkeypatch.chdir(ROOT)
    overrides = [word.replace(folder, str(tmp_path / "data")) for word in overrides]
    config = parse(TRAINER_CONFIGS[trainer], overrides)
    template = ChatTemplate(make_tokenizer())
    # The models are on the hub.
    monkeypatch.setattr("rl2.inputs.check_num_positions", lambda *lengths: None)
    if trainer == "ppo":
        rows, _ = read_ppo_inputs(config)
        items, test_items = make_prompts(config, rows, {"": template})
    else:
        items, test_items = read_examples(config, KINDS[trainer], template)
    assert len(items) == len(train) > 0
    assert len(test_items[""]) == len(test) > 0


def test_prompts_of_public_data_show_the_format_that_the_environment_reads(tmp_path, monkeypatch):
    formats = {"gsm8k": "####", "orz": r"\boxed{}", "countdown": "<answer>", "search": "<search>"}
    rows = {name: make_data(monkeypatch, name, tmp_path / name) for name in formats}
    for name, shown_format in formats.items():
        for split in rows[name]:
            assert all(shown_format in row["messages"][0]["content"] for row in split)
    assert rows["gsm8k"][0][0]["answer"] == "72000"
    assert rows["gsm8k"][1][0]["answer"] == "-3"
    assert rows["orz"][0][0]["answer"] == "2"
    assert (rows["orz"][1][0]["answer"], rows["orz"][1][0]["level"]) == ("3", 1)
    assert rows["search"][0][0]["answer"] == ["Paris", "paris"]
    train, test = rows["countdown"]
    # 6 tasks in 3 pairs of equal ones: two pairs give a test row each, and none is trained on.
    assert [row["answer"] for row in test] == [24, 25]
    assert [(row["answer"], row["numbers"]) for row in train] == [(26, [3, 9, 1])] * 2


def test_limo_has_the_whole_solution_as_its_reply(tmp_path, monkeypatch):
    train, test = make_data(monkeypatch, "limo", tmp_path)
    assert (len(train), len(test)) == (17, 17)
    question, reply = train[0]["messages"]
    assert question["content"].startswith("What is 1 + 1?") and r"\boxed{}" in question["content"]
    assert reply["role"] == "assistant" and reply["content"].endswith(r"\boxed{2}")
    assert train[0]["answer"] == "2"


def test_pairs_that_teach_nothing_are_left_out(tmp_path, monkeypatch, capsys):
    train, test = make_data(monkeypatch, "ultrafeedback", tmp_path / "ultrafeedback")
    assert "2 of 5 pairs have equal or empty replies, left out" in capsys.readouterr().out
    assert [(row["chosen"], row["rejected"]) for row in train] == [
        ("Yes.", "No."),
        ("A", "B"),
        ("C", "D"),
    ]
    assert train[0]["messages"] == [{"content": "Question 0?", "role": "user"}]
    assert len(test) == 1
    train, test = make_data(monkeypatch, "skywork", tmp_path / "skywork")
    assert "3 of 7 pairs" in capsys.readouterr().out
    several_turns = next(row for row in [*train, *test] if len(row["messages"]) > 1)
    assert several_turns["messages"] == MORE_TURNS[:-1]
    assert (several_turns["chosen"], several_turns["rejected"]) == ("Again.", "Hello.")
