"""What pipeline.sh does beside training: `prepare FOLDER` makes the rows of the stages before GRPO, whose task is the
quickstart's; `report FOLDER` tells how the stages went."""

import argparse
import json
import random
import re
from collections import Counter
from pathlib import Path

# Of 24,000 generated problems, those with a short worked answer of small whole numbers: 1,267 of 9 kinds.
NUM_GENERATED, LONGEST_ANSWER, LARGEST, SMALLEST_KIND = 24000, 140, 50, 20
SIZES = {"test": 100, "sft": 400, "pairs": 320}  # problems; no two of these sets share one
STAGES = ("sft", "rm", "dpo", "grpo")


def prepare(folder: Path) -> None:
    if (folder / "pairs_test.jsonl").exists():
        return
    problems, start = make_problems(), 0
    parts = {}
    for name, size in SIZES.items():
        parts[name], start = problems[start : start + size], start + size
        assert len(parts[name]) == size, f"{len(problems)} problems are not enough"
    asked = [{problem["question"] for problem in part} for part in parts.values()]
    assert sum(map(len, asked)) == len(set.union(*asked)), "a problem is in two sets"
    by_kind = {}
    for problem in problems:
        by_kind.setdefault(problem["kind"], []).append(problem)
    rng, rows = random.Random(0), {}
    for split in ("train", "test"):
        sft, pairs = (parts[name if split == "train" else "test"] for name in ("sft", "pairs"))
        rows[f"sft_{split}"] = [sft_row(problem) for problem in sft]
        rows[f"pairs_{split}"] = [
            pair_row(problem, i, by_kind, rng) for i, problem in enumerate(pairs)
        ]
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    sizes = ", ".join(f"{size} {name}" for name, size in SIZES.items())
    print(f"word problems: {sizes}; {len(by_kind)} kinds. A question:\n{problems[0]['question']}")
    print(
        f"chosen:\n{rows['pairs_test'][0]['chosen']}\nrejected:\n{rows['pairs_test'][0]['rejected']}"
    )
    print(
        f"choosing the shorter of two answers is right for {shorter(rows['pairs_test']):.0%} of the held-out pairs"
    )


def make_problems() -> list[dict]:
    """Word problems in the manner of GSM8K with their worked answers, in a fixed random order."""
    import reasoning_gym

    found, numbers = {}, re.compile(r"[\d.,]*\d")
    for item in reasoning_gym.create_dataset("gsm_symbolic", size=NUM_GENERATED, seed=0):
        question, answer = item["question"].split(" Give the result as")[0], item["answer"]
        worked, kind = item["metadata"]["answer_cot"], tuple(item["metadata"]["variables"])
        small = all(
            number.isdigit() and int(number) < LARGEST for number in numbers.findall(worked)
        )
        if small and len(worked) <= LONGEST_ANSWER and worked.endswith(f"#### {answer}"):
            found[question] = {
                "question": question,
                "answer": answer,
                "worked": worked,
                "kind": kind,
            }
    sizes = Counter(problem["kind"] for problem in found.values())
    problems = [problem for problem in found.values() if sizes[problem["kind"]] >= SMALLEST_KIND]
    random.Random(0).shuffle(problems)
    return problems


def sft_row(problem):
    return {"messages": [*prompt(problem), {"role": "assistant", "content": problem["worked"]}]}


def prompt(problem):
    return [{"role": "user", "content": problem["question"]}]


def pair_row(problem, number, by_kind, rng):
    """The worked answer is chosen. Rejected is, for every other row, the same with a slip in its last step, as long to
    the character; for the rest the right answer to another problem of the kind, with other numbers and names."""
    others = [
        other["worked"]
        for other in by_kind[problem["kind"]]
        if other["answer"] != problem["answer"]
    ]
    rejected = rng.choice(others) if number % 2 else slip(problem, rng)
    return {"messages": prompt(problem), "chosen": problem["worked"], "rejected": rejected}


def slip(problem, rng):
    answer = int(problem["answer"])
    near = [answer + by for by in range(-9, 10) if by and len(str(answer + by)) == len(str(answer))]
    return re.sub(rf"(?<!\d){answer}(?!\d)", str(rng.choice(near)), problem["worked"])


def shorter(rows) -> float:
    """How often the shorter answer is the chosen one; a tie is half."""
    lengths = [(len(row["chosen"]), len(row["rejected"])) for row in rows]
    return sum((a < b) + (a == b) / 2 for a, b in lengths) / len(lengths)


def report(folder: Path) -> None:
    lines = {stage: read(folder / stage) for stage in STAGES}
    told = [
        ("SFT", "sft", "perplexity", "test/perplexity", "{:.2f}"),
        ("reward model", "rm", "accuracy (chance 0.5)", "test/accuracy", "{:.2f}"),
        ("DPO", "dpo", "accuracy (chance 0.5)", "test/accuracy", "{:.2f}"),
        ("", "dpo", "margin", "test/margin", "{:.2f}"),
        ("GRPO", "grpo", "right answers", "test/reward/mean", "{:.2f}"),
    ]
    print(f"\n{'':14}{'held out':24}{'before':>8}{'after':>8}{'seconds':>9}  model")
    for title, stage, what, key, form in told:
        before, after = (form.format(x) for x in ends(lines[stage], key))
        if key == "test/accuracy":
            before = "ties"  # a new head says 0 to all, and DPO's policy is its reference
        spent = f"{sum(line['time/step'] for line in lines[stage]):.0f}" if title else ""
        where = folder / stage / "model" if title else ""
        print(f"{title:14}{what:24}{before:>8}{after:>8}{spent:>9}  {where}")


def read(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def ends(lines, key):
    """The metric before the first step and after the last one."""
    found = [line[key] for line in lines if key in line]
    return found[0], found[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["prepare", "report"])
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    {"prepare": prepare, "report": report}[arguments.what](arguments.folder)


if __name__ == "__main__":
    main()
