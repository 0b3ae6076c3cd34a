"""Public data sets as rows of rl2: `python examples/data.py gsm8k|orz|countdown|search FOLDER` writes train.jsonl and
test.jsonl there. Needs a network. What each set looks like is said where it is read; the conversions are tested on rows of
that look, the downloads have not been run."""

import argparse
import itertools
import json
import urllib.request
from pathlib import Path

ORZ = "https://github.com/Open-Reasoner-Zero/Open-Reasoner-Zero/raw/refs/heads/main/data/orz_math_57k_collected.json"
NUM_HELD_OUT = 512


def ask(text: str, **columns) -> dict:
    return {"messages": [{"role": "user", "content": text}], **columns}


def gsm8k(row: dict) -> dict:
    """openai/gsm8k: question, answer; the answer is a solution that ends in "#### 72"."""
    told = row["answer"].rpartition("####")[2].strip().replace(",", "")
    return ask(
        f"{row['question'].strip()}\nReason step by step, then write the number after ####.",
        answer=told,
    )


def orz(row: list) -> dict:
    """Open-Reasoner-Zero: [{"from": "human", "value"}, {"from": "assistant", "ground_truth": {"value"}}]."""
    question, answer = row[0]["value"].strip(), row[1]["ground_truth"]["value"]
    return ask(
        f"{question}\nReason step by step, and put the final answer within \\boxed{{}}.",
        answer=str(answer),
    )


def math500(row: dict) -> dict:
    """HuggingFaceH4/MATH-500: problem, solution, answer, subject, level."""
    problem = {"value": row["problem"]}, {"ground_truth": {"value": row["answer"]}}
    return orz(list(problem)) | {"level": row["level"]}


def countdown(row: dict) -> dict:
    """Jiayi-Pan/Countdown-Tasks-3to4: target, nums."""
    numbers, target = [int(n) for n in row["nums"]], int(row["target"])
    return ask(
        f"Make {target} of the numbers {', '.join(map(str, numbers))}: use each exactly once, with + - * / and parentheses. "
        "Think first, then write the expression, and nothing else, within <answer></answer>, as in "
        "<answer>(1 + 2) / 3</answer>.",
        answer=target,
        numbers=numbers,
    )


def search(row: dict) -> dict:
    """RUC-NLPIR/FlashRAG_datasets: question, golden_answers (all of them right)."""
    return ask(
        f"Answer the question. You may look things up: write <search>what you look for</search>, end your turn, and you will "
        "be given what was found. When you know the answer, write it, and nothing else, within <answer></answer>, as in "
        f"<answer>Beijing</answer>.\nQuestion: {row['question'].strip()}",
        answer=list(row["golden_answers"]),
    )


def hub(name: str, split: str, config: str | None = None):
    from datasets import load_dataset

    return load_dataset(name, config, split=split)


def make(name: str) -> tuple[list[dict], list[dict]]:
    """(rows to train, rows to test)."""
    if name == "gsm8k":
        return tuple(
            [gsm8k(row) for row in hub("openai/gsm8k", split, "main")]
            for split in ("train", "test")
        )
    if name == "orz":
        with urllib.request.urlopen(ORZ, timeout=300) as response:
            rows = json.load(response)
        return [orz(row) for row in rows], [
            math500(row) for row in hub("HuggingFaceH4/MATH-500", "test")
        ]
    if name == "countdown":
        rows = [
            countdown(row)
            for row in itertools.islice(hub("Jiayi-Pan/Countdown-Tasks-3to4", "train"), 50_000)
        ]
        return rows[NUM_HELD_OUT:], rows[:NUM_HELD_OUT]
    parts = {split: hub("RUC-NLPIR/FlashRAG_datasets", split, "nq") for split in ("train", "test")}
    return [search(row) for row in parts["train"]], [search(row) for row in parts["test"]][
        :NUM_HELD_OUT
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=["gsm8k", "orz", "countdown", "search"])
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if (arguments.folder / "test.jsonl").exists():
        return
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for split, rows in zip(("train", "test"), make(arguments.name), strict=True):
        (arguments.folder / f"{split}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
        print(
            f"{arguments.folder}/{split}.jsonl: {len(rows)} rows, e.g. {rows[0]['messages'][0]['content'][:100]!r}"
        )


if __name__ == "__main__":
    main()
