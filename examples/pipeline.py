"""The parts of pipeline.sh other than training.

`prepare FOLDER` makes the rows of SFT, of the reward model, of DPO and of GRPO. `report FOLDER`
prints how the stages went.
"""

import argparse
import hashlib
import json
import random
import re
from collections import Counter
from pathlib import Path

# Of the generated problems, those with a short worked answer of small whole numbers are kept, if
# enough are of their kind: 1,267 problems of 9 kinds.
NUM_GENERATED = 24_000
MAX_ANSWER_CHARACTERS = 140
NUMBER_LIMIT = 50  # numbers in the worked answer are smaller
MIN_PROBLEMS_OF_KIND = 20
NUM_PROBLEMS = {"test": 100, "sft": 400, "pairs": 320}  # no problem is in two of these sets
# GRPO's task: sums and differences of two one-digit numbers. Each prompt begins with an example. It
# shows the form of an answer, and that it may be negative.
NUM_SUMS = {"train": 150, "test": 50}
TERMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
SYSTEM_PROMPT = "Calculate."
EXAMPLE = ("State the final answer to the following arithmetic problem: 10 - 12 =", "10 - 12 = -2")
# (title, stage, name of the metric, its key). Stages have the names that pipeline.sh gives them.
REPORTED_METRICS = (
    ("SFT", "sft", "perplexity", "test/perplexity"),
    ("reward model", "rm", "accuracy (chance 0.5)", "test/accuracy"),
    ("DPO", "dpo", "accuracy (chance 0.5)", "test/accuracy"),
    ("", "dpo", "margin", "test/margin"),
    ("GRPO", "grpo", "right answers", "test/reward/mean"),
)


def prepare(folder: Path) -> None:
    if (folder / "sums_test.jsonl").exists():
        return
    problems = make_problems()
    sets = divide(problems)
    problems_by_kind = {}
    for problem in problems:
        problems_by_kind.setdefault(problem["kind"], []).append(problem)
    rng = random.Random(0)
    rows = {
        "sft_train": [sft_row(problem) for problem in sets["sft"]],
        "pairs_train": pair_rows(sets["pairs"], problems_by_kind, rng),
        "sft_test": [sft_row(problem) for problem in sets["test"]],
        "pairs_test": pair_rows(sets["test"], problems_by_kind, rng),
        **make_sums(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    sizes = ", ".join(f"{size} {name}" for name, size in NUM_PROBLEMS.items())
    pair = rows["pairs_test"][0]
    share = share_of_shorter_chosen(rows["pairs_test"])
    print(f"word problems: {sizes}; {len(problems_by_kind)} kinds")
    print(f"A question:\n{pair['messages'][0]['content']}")
    print(f"chosen:\n{pair['chosen']}\nrejected:\n{pair['rejected']}")
    print(f"choosing the shorter of two answers is right for {share:.0%} of the held-out pairs")


def make_problems() -> list[dict]:
    """Returns word problems like those of GSM8K with worked answers, in a fixed random order."""
    import reasoning_gym

    problems = {}
    for item in reasoning_gym.create_dataset("gsm_symbolic", size=NUM_GENERATED, seed=0):
        question, _, _ = item["question"].partition(" Give the result as")
        worked_answer = item["metadata"]["answer_cot"]
        if is_simple(worked_answer) and worked_answer.endswith(f"#### {item['answer']}"):
            problems[question] = {
                "question": question,
                "answer": item["answer"],
                "worked_answer": worked_answer,
                "kind": tuple(item["metadata"]["variables"]),
            }
    kind_sizes = Counter(problem["kind"] for problem in problems.values())
    kept = []
    for problem in problems.values():
        if kind_sizes[problem["kind"]] >= MIN_PROBLEMS_OF_KIND:
            kept.append(problem)
    random.Random(0).shuffle(kept)
    return kept


def is_simple(worked_answer: str) -> bool:
    """Whether the answer is short and has only small whole numbers."""
    if len(worked_answer) > MAX_ANSWER_CHARACTERS:
        return False
    numbers = re.findall(r"[\d.,]*\d", worked_answer)
    return all(number.isdigit() and int(number) < NUMBER_LIMIT for number in numbers)


def divide(problems: list[dict]) -> dict[str, list[dict]]:
    """Returns the sets of NUM_PROBLEMS, one after the other."""
    sets = {}
    start = 0
    for name, size in NUM_PROBLEMS.items():
        sets[name] = problems[start : start + size]
        start += size
    assert start <= len(problems), f"{len(problems)} problems are not enough, {start} are needed"
    questions = {problem["question"] for problem in problems[:start]}
    assert len(questions) == start, "a problem is in two sets"
    return sets


def make_sums() -> dict[str, list[dict]]:
    """Returns all 200 sums and differences of reasoning-gym. No test question is trained."""
    answers = draw_questions("chain_sum", sum(NUM_SUMS.values()))
    assert EXAMPLE[0] not in answers
    rows = []
    for question, answer in answers.items():
        rows.append({"messages": make_messages(question, EXAMPLE), "answer": answer})
    num_train = NUM_SUMS["train"]
    return {"sums_train": rows[:num_train], "sums_test": rows[num_train:]}


def draw_questions(dataset: str, num_questions: int) -> dict[str, str]:
    """Draws from a data set of reasoning-gym until this many different questions have occurred.

    Returns the answer of each, in the order of the questions' hashes.
    """
    import reasoning_gym

    answers: dict[str, str] = {}
    seed = 0
    while len(answers) < num_questions:
        items = reasoning_gym.create_dataset(dataset, size=500, seed=seed, **TERMS)
        answers |= {item["question"]: item["answer"] for item in items}
        seed += 1
    return {question: answers[question] for question in sorted(answers, key=hash_of)}


def make_messages(question: str, example: tuple[str, ...] = ()) -> list[dict]:
    """A prompt: the system prompt, a question and its answer as an example, then the question."""
    roles = ("system", "user", "assistant", "user") if example else ("system", "user")
    texts = (SYSTEM_PROMPT, *example, question)
    pairs = zip(roles, texts, strict=True)
    return [{"role": role, "content": text} for role, text in pairs]


def hash_of(text: str) -> str:
    """Returns a fixed key to shuffle by. Python's own hash differs from run to run."""
    return hashlib.sha256(text.encode()).hexdigest()


def prompt(problem: dict) -> list[dict]:
    return [{"role": "user", "content": problem["question"]}]


def sft_row(problem: dict) -> dict:
    reply = {"role": "assistant", "content": problem["worked_answer"]}
    return {"messages": [*prompt(problem), reply]}


def pair_rows(problems: list[dict], problems_by_kind: dict, rng: random.Random) -> list[dict]:
    """Makes rows with the worked answer as the chosen reply.

    The rejected reply is, in turns, the worked answer with a slip in its last step, or the right
    answer to another problem of the same kind, with other numbers and names.
    """
    rows = []
    for i, problem in enumerate(problems):
        other_answers = []
        for other in problems_by_kind[problem["kind"]]:
            if other["answer"] != problem["answer"]:
                other_answers.append(other["worked_answer"])
        rejected = with_slip(problem, rng) if i % 2 == 0 else rng.choice(other_answers)
        chosen = problem["worked_answer"]
        rows.append({"messages": prompt(problem), "chosen": chosen, "rejected": rejected})
    return rows


def with_slip(problem: dict, rng: random.Random) -> str:
    """Returns the answer with a wrong result: as many digits, at most 9 from the right one."""
    answer = int(problem["answer"])
    wrong_answers = []
    for wrong in range(answer - 9, answer + 10):
        if wrong != answer and len(str(wrong)) == len(str(answer)):
            wrong_answers.append(wrong)
    wrong = str(rng.choice(wrong_answers))
    return re.sub(rf"(?<!\d){answer}(?!\d)", wrong, problem["worked_answer"])


def share_of_shorter_chosen(rows: list[dict]) -> float:
    """Returns the fraction of pairs with the shorter reply chosen. Equal lengths count as half."""
    total = 0.0
    for row in rows:
        chosen, rejected = len(row["chosen"]), len(row["rejected"])
        total += 0.5 if chosen == rejected else chosen < rejected
    return total / len(rows)


def report(folder: Path) -> None:
    print(f"\n{'':14}{'held out':24}{'before':>8}{'after':>8}{'seconds':>9}  model")
    for title, stage, name, key in REPORTED_METRICS:
        lines = read_metrics(folder / stage)
        values = [line[key] for line in lines if key in line]
        # Before training every pair ties: a new reward head gives 0, and DPO's policy still equals
        # its reference.
        before = "ties" if key == "test/accuracy" else f"{values[0]:.2f}"
        seconds = model = ""
        if title:
            seconds = f"{sum(line['time/step'] for line in lines):.0f}"
            model = folder / stage / "model"
        print(f"{title:14}{name:24}{before:>8}{values[-1]:>8.2f}{seconds:>9}  {model}")


def read_metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["prepare", "report"])
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "prepare":
        prepare(arguments.folder)
    else:
        report(arguments.folder)


if __name__ == "__main__":
    main()
