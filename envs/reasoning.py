r"""Any task of reasoning-gym, scored by the task itself: pip install 'reasoning-gym>=0.1.25'.

Row: {"messages": [...], "task": "leg_counting", "settings": {"max_animals": 3}, "seed": 0,
"index": 7, "answer": "12"}. The question is made again from the seed and the index when a reply is
scored. The answer is the task's own; other answers may be right too.

This file writes rows of a task by its name. More arguments are settings of the task; their
documentation and the list of all tasks are at github.com/open-thought/reasoning-gym:

    python envs/reasoning.py leg_counting 1000 train.jsonl --seed 0 max_animals=3

The model writes the answer into <answer></answer>. A reply may earn a part of 1.0, where the task
says so. Some rules are lenient: game_of_life_halting takes any text for the answer "False". Some
tasks compute long: run those with rollout.env_isolation=process. One step on a CPU, with a small
model in the folder MODEL:

    python -m rl2.trainer.ppo rollout.env_path=reasoning data.path=examples/rows/reasoning.jsonl \
        actor.model_name=MODEL trainer.max_steps=1 data.prompts_per_rollout=3 \
        data.responses_per_prompt=2 rollout.train_sampling_params.max_new_tokens=32
"""

import argparse
import functools
import json
import threading

from rl2.rewards.text import last_tagged

SYSTEM_PROMPT = "Think first, then write the answer, and nothing else, within <answer></answer>."
MAX_CHARACTERS = 1000  # of an answer, beyond those of the task's own
# rl2 calls from many threads. Tasks are made one at a time, so that a cache entry is made once.
LOCK = threading.Lock()


def reward_fn(messages, task, settings, seed, index, answer):
    """The score of the last <answer></answer> of the reply by the task's own rule: 0.0 to 1.0."""
    field = extract(messages)
    with LOCK:
        dataset, entry = make_entry(task, json.dumps(settings, sort_keys=True), seed, index)
    if str(entry["answer"]) != str(answer):
        raise ValueError(
            f"{task}, seed {seed}, index {index}: the row has the answer {answer!r}, and this "
            f"version of reasoning-gym {entry['answer']!r}: write the rows again"
        )
    if not field or len(field) > len(str(answer)) + MAX_CHARACTERS:
        return 0.0
    try:
        return float(dataset.score_answer(field, entry))
    except Exception:  # the task's own answer had a score, so it is the field that has none
        return 0.0


def extract(messages):
    """Returns the text of the last <answer></answer> of the reply, or None."""
    return last_tagged(messages[-1]["content"])


@functools.lru_cache(maxsize=10_000)
def make_entry(task, settings, seed, index):
    """Returns the task, and its question with this number.

    An error if it cannot score its own answer.
    """
    dataset = make_dataset(task, settings, seed, index + 1)
    entry = dataset[index]
    dataset.score_answer(entry["answer"], entry)
    return dataset, entry


def make_dataset(task, settings, seed, size):
    import reasoning_gym

    return reasoning_gym.create_dataset(task, seed=seed, size=size, **json.loads(settings))


def make_rows(task, settings, seed, count):
    """Rows of different questions, in the order of their indices."""
    questions = set()
    dataset = make_dataset(task, json.dumps(settings), seed, count)
    for index in range(count):
        entry = dataset[index]
        if entry["question"] in questions:
            continue
        questions.add(entry["question"])
        messages = [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": entry["question"]},
        ]
        row = {"messages": messages, "task": task, "settings": settings, "seed": seed}
        yield row | {"index": index, "answer": str(entry["answer"])}


def read_setting(word):
    """name=value, where the value is JSON or else a text."""
    name, equals, value = word.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{word!r}: expected NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def main():
    parser = argparse.ArgumentParser(description="Writes rows of a task of reasoning-gym.")
    parser.add_argument("task", help="a name, such as leg_counting")
    parser.add_argument("count", type=int, help="questions; equal ones are left out")
    parser.add_argument("file", help="JSON lines")
    parser.add_argument("settings", nargs="*", type=read_setting, help="NAME=VALUE of the task")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_intermixed_args()
    rows = make_rows(arguments.task, dict(arguments.settings), arguments.seed, arguments.count)
    number = 0
    with open(arguments.file, "w", encoding="utf-8") as file:
        for number, row in enumerate(rows, start=1):  # noqa: B007
            file.write(json.dumps(row) + "\n")
    print(f"{arguments.file}: {number} rows")


if __name__ == "__main__":
    main()
