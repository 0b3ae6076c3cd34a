"""Writes a public data set as rows of rl2: FOLDER/train.jsonl and FOLDER/test.jsonl.

    python examples/data.py gsm8k|orz|countdown|search|limo|skywork|ultrafeedback FOLDER

Needs a network. Each conversion names the data set and the columns that it reads. The conversions
are tested on rows of that form. The downloads have not been run.
"""

import argparse
import itertools
import json
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path

ORZ_URL = (
    "https://github.com/Open-Reasoner-Zero/Open-Reasoner-Zero/raw/refs/heads/main/"
    "data/orz_math_57k_collected.json"
)
NUM_HELD_OUT = 512
NUM_HELD_OUT_LIMO = 17  # of 817
NUM_COUNTDOWN = 50_000  # rows of Countdown to take

Splits = tuple[list[dict], list[dict]]  # training rows, test rows


def make_row(question: str, **columns) -> dict:
    return {"messages": [{"role": "user", "content": question}], **columns}


def gsm8k(row: dict) -> dict:
    """openai/gsm8k: question, answer. The answer is a solution that ends in "#### 72"."""
    solution = row["answer"]
    return make_row(
        f"{row['question'].strip()}\nReason step by step, then write the number after ####.",
        answer=solution.rpartition("####")[2].strip().replace(",", ""),
    )


def orz(row: list) -> dict:
    """Open-Reasoner-Zero: a list of messages.

    [{"from": "human", "value": ...}, {"from": "assistant", "ground_truth": {"value": ...}}]
    """
    return make_boxed_row(row[0]["value"], row[1]["ground_truth"]["value"])


def math500(row: dict) -> dict:
    """HuggingFaceH4/MATH-500: problem, answer, level."""
    return make_boxed_row(row["problem"], row["answer"]) | {"level": row["level"]}


def make_boxed_row(question: str, answer) -> dict:
    return make_row(
        f"{question.strip()}\nReason step by step, and put the final answer within \\boxed{{}}.",
        answer=str(answer),
    )


def countdown(row: dict) -> dict:
    """Jiayi-Pan/Countdown-Tasks-3to4: target, nums."""
    target = int(row["target"])
    numbers = [int(number) for number in row["nums"]]
    return make_row(
        f"Make {target} of the numbers {', '.join(map(str, numbers))}: use each exactly once, "
        "with + - * / and parentheses. Think first, then write the expression, and nothing else, "
        "within <answer></answer>, as in <answer>(1 + 2) / 3</answer>.",
        answer=target,
        numbers=numbers,
    )


def search(row: dict) -> dict:
    """RUC-NLPIR/FlashRAG_datasets: question, golden_answers. Each of these answers is right."""
    return make_row(
        "Answer the question. You may look things up: write <search>what you look for</search>, "
        "end your turn, and you will be given what was found. When you know the answer, write it, "
        "and nothing else, within <answer></answer>, as in <answer>Beijing</answer>.\n"
        f"Question: {row['question'].strip()}",
        answer=list(row["golden_answers"]),
    )


def limo(row: dict) -> dict:
    """GAIR/LIMO: question, solution, answer. The solution is a text that ends in the answer."""
    prompt = make_boxed_row(row["question"], row["answer"])
    reply = {"role": "assistant", "content": row["solution"]}
    return prompt | {"messages": [*prompt["messages"], reply]}


def pair(row: dict) -> dict | None:
    """Makes two conversations that differ in their last message; None if they teach nothing.

    Skywork/Skywork-Reward-Preference-80K-v0.2: chosen, rejected, source.
    HuggingFaceH4/ultrafeedback_binarized: prompt, prompt_id, chosen, rejected, messages,
    score_chosen, score_rejected. `prompt` has only the text of the first message.
    """
    *prompt, chosen = row["chosen"]
    *other_prompt, rejected = row["rejected"]
    replies = [chosen["content"].strip(), rejected["content"].strip()]
    if prompt != other_prompt or not all(replies) or replies[0] == replies[1]:
        return None
    return {"messages": prompt, "chosen": chosen["content"], "rejected": rejected["content"]}


def make_pairs(rows: Iterable[dict]) -> list[dict]:
    """Returns the pairs that teach something, and prints how many do not."""
    pairs = [pair(row) for row in rows]
    kept = [row for row in pairs if row is not None]
    print(f"{len(pairs) - len(kept)} of {len(pairs)} pairs have equal or empty replies, left out")
    return kept


def load_split(name: str, split: str, configuration: str | None = None):
    """Loads a split of a dataset of the Hugging Face hub."""
    from datasets import load_dataset

    return load_dataset(name, configuration, split=split)


def download(url: str):
    """Downloads and reads a JSON file."""
    with urllib.request.urlopen(url, timeout=300) as response:
        return json.load(response)


def hold_out(rows: list[dict], count: int) -> Splits:
    """Takes `count` test rows, spread evenly. Training rows with the same questions are dropped."""
    test = rows[:: len(rows) // count][:count]
    questions = {row["messages"][0]["content"] for row in test}
    return [row for row in rows if row["messages"][0]["content"] not in questions], test


def load_gsm8k() -> Splits:
    train = load_split("openai/gsm8k", "train", "main")
    test = load_split("openai/gsm8k", "test", "main")
    return [gsm8k(row) for row in train], [gsm8k(row) for row in test]


def load_orz() -> Splits:
    test = load_split("HuggingFaceH4/MATH-500", "test")
    return [orz(row) for row in download(ORZ_URL)], [math500(row) for row in test]


def load_countdown() -> Splits:
    tasks = load_split("Jiayi-Pan/Countdown-Tasks-3to4", "train")
    rows = [countdown(row) for row in itertools.islice(tasks, NUM_COUNTDOWN)]
    return hold_out(rows, NUM_HELD_OUT)


def load_search() -> Splits:
    train = load_split("RUC-NLPIR/FlashRAG_datasets", "train", "nq")
    test = load_split("RUC-NLPIR/FlashRAG_datasets", "test", "nq")
    return [search(row) for row in train], [search(row) for row in test][:NUM_HELD_OUT]


def load_limo() -> Splits:
    rows = [limo(row) for row in load_split("GAIR/LIMO", "train")]
    return hold_out(rows, NUM_HELD_OUT_LIMO)


def load_skywork() -> Splits:
    rows = load_split("Skywork/Skywork-Reward-Preference-80K-v0.2", "train")
    return hold_out(make_pairs(rows), NUM_HELD_OUT)


def load_ultrafeedback() -> Splits:
    train = load_split("HuggingFaceH4/ultrafeedback_binarized", "train_prefs")
    test = load_split("HuggingFaceH4/ultrafeedback_binarized", "test_prefs")
    return make_pairs(train), make_pairs(test)[:NUM_HELD_OUT]


LOADERS: dict[str, Callable[[], Splits]] = {
    "gsm8k": load_gsm8k,
    "orz": load_orz,
    "countdown": load_countdown,
    "search": load_search,
    "limo": load_limo,
    "skywork": load_skywork,
    "ultrafeedback": load_ultrafeedback,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=LOADERS)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    folder = arguments.folder
    if (folder / "test.jsonl").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    train, test = LOADERS[arguments.name]()
    for split, rows in (("train", train), ("test", test)):
        file = folder / f"{split}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        question = rows[0]["messages"][0]["content"]
        print(f"{file}: {len(rows)} rows. The first question: {question[:100]!r}")


if __name__ == "__main__":
    main()
