"""What trainer.save_best, data.curriculum and actor.loss=dppo do on two tasks of a tiny model.

    python benchmarks/lab/features.py run [--folder runs/features] [--seeds 3]
    python benchmarks/lab/features.py report

The model has two random layers of width 32 and a token for each character. Tasks:

    letters  the share of a reply's characters that are a to h; all prompts are equally hard
    classes  "upper 3": 1 if the first three characters of the reply are upper-case letters. There
             are five classes of 5 to 32 characters, and 1 to 4 of them to write: of random replies
             a third to one in 100,000 is right

A rollout of 8 prompts x 8 answers trains eight updates: four passes of two mini-batches. Its last
updates are far from the policy that sampled it. The kinds of runs are GRPO with the clip of PPO at
0.2 (`plain`), this with a curriculum, and this with the loss of DPPO. Each seed has a model of its
own. Every run has two sets of 40 held-out prompts: trainer.save_best goes by the first, and the
second compares its best step with the last one. Each is answered twice at temperature 1, every four
steps.

`run` is a queue that can be stopped and started again. All kinds of a task and seed are a line of
benchmarks/lab/results/features.jsonl; `report` prints the table of learning.md.

Needs the `test` extra.
"""

import string
import sys
from pathlib import Path

from run_queue import (
    RESULTS,
    ROOT,
    Job,
    make_job,
    make_parser,
    mean_and_error,
    read_results,
    run_command,
)

sys.path.insert(0, str(ROOT / "tests"))

RESULTS_FILE = RESULTS / "features.jsonl"
STEPS = {"letters": 24, "classes": 48}
NUM_TRAIN, NUM_TEST = 40, 40  # prompts; of each test set
KINDS = {
    "plain": {},
    "curriculum": {"data.curriculum": [0.1, 0.9]},
    "dppo": {"actor.loss": "dppo"},
}
COMMON = {
    "algo": "grpo",
    "actor.lr": 0.005,
    "actor.dtype": "float32",
    "actor.gradient_checkpointing": False,
    "actor.update_per_rollout": 2,
    "actor.epochs_per_rollout": 4,
    "data.prompts_per_rollout": 8,
    "data.responses_per_prompt": 8,
    "data.responses_per_test_prompt": 2,
    "data.max_length": 64,
    "rollout.max_running": 160,
    "rollout.train_sampling_params.max_new_tokens": 8,
    "rollout.test_sampling_params.temperature": 1,
    "trainer.n_epochs": 1000,
    "trainer.test_freq": 4,
    "trainer.save_best": "choose",
    "trainer.resume": "off",
    "trainer.disable_wandb": True,
}
CLASSES = {
    "vowel": "aeiou",
    "digit": string.digits,
    "lower": string.ascii_lowercase,
    "upper": string.ascii_uppercase,
    "sign": string.punctuation,
}
ENVS = {
    "letters": """
def reward_fn(messages, answer):
    reply = messages[-1]["content"]
    return sum(letter in answer for letter in reply) / max(len(reply), 1)
""",
    "classes": """
def reward_fn(messages, answer):
    count, allowed = int(answer[0]), answer[1:]
    beginning = messages[-1]["content"][:count]
    return float(len(beginning) == count and all(letter in allowed for letter in beginning))
""",
}


def make_rows(task: str, first: int, count: int) -> list[dict]:
    """Prompts with the numbers from `first`, so that no prompt is in two sets."""
    rows = []
    for number in range(first, first + count):
        prompt, answer = "say a", "abcdefgh"
        if task == "classes":
            name = list(CLASSES)[number % len(CLASSES)]
            length = 1 + number // len(CLASSES) % 4
            prompt, answer = f"{name} {length}", f"{length}{CLASSES[name]}"
        messages = [{"role": "user", "content": f"{prompt}, {number}"}]
        rows.append({"messages": messages, "answer": answer})
    return rows


def run_one(arguments) -> dict:
    """The runs of all kinds, one after the other. Returns their results."""
    from common import make_model

    folder = arguments.folder / f"{arguments.task}-{arguments.seed}"
    model = make_model(folder / "model", seed=arguments.seed)
    (folder / "env.py").write_text(ENVS[arguments.task])
    names = ("task", "seed")
    result = {name: getattr(arguments, name) for name in names}
    return result | {kind: run_kind(arguments, kind, model, folder) for kind in KINDS}


def run_kind(arguments, kind: str, model: str, folder: Path) -> dict:
    import rl2

    task, seed = arguments.task, arguments.seed
    steps = STEPS[task]
    chosen = NUM_TRAIN + NUM_TEST  # where the prompts begin that save_best does not see
    run = rl2.train(
        "ppo",
        rows=make_rows(task, 0, NUM_TRAIN),
        test_rows={
            "choose": make_rows(task, NUM_TRAIN, NUM_TEST),
            "held": make_rows(task, chosen, NUM_TEST),
        },
        env=folder / "env.py",
        model_name=model,
        **COMMON,
        **KINDS[kind],
        **{
            "data.seed": seed,
            "trainer.seed": seed,
            "trainer.max_steps": steps,
            "trainer.save_dir": str(folder / kind),
            "trainer.experiment_name": kind,
        },
    )
    tests = {
        name: {
            line["step"]: line[f"test/{name}/reward/mean"] for line in run.metrics if is_test(line)
        }
        for name in ("choose", "held")
    }
    best_step = max((step for step in tests["choose"] if step), key=tests["choose"].get)
    trained = [line for line in run.metrics if "actor/loss" in line]
    return {
        "best_step": best_step,
        "best": tests["held"][best_step],
        "last": tests["held"][steps],
        "held": [round(value, 4) for value in tests["held"].values()],
        "reward": [round(line["reward/mean"], 4) for line in trained],
        "kl": [line["actor/approx_kl"] for line in trained],
        "keys": COMMON | KINDS[kind],
    }


def is_test(line: dict) -> bool:
    return "test/held/reward/mean" in line


def make_jobs(arguments) -> list[Job]:
    jobs = []
    for seed in range(arguments.seeds):
        for task in ENVS:
            jobs.append(make_job(arguments, f"{task}-{seed}", task, seed))
    return jobs


def report() -> None:
    """Prints the table in Markdown."""
    results = list(read_results(RESULTS_FILE).values())
    print("| task | run | last step, % | of each seed | best step, % | of each seed ", end="")
    print("| its step | training, % | KL an update |\n|---|---|---|---|---|---|---|---|---|")
    for task in ENVS:
        for kind in KINDS:
            runs = [result[kind] for result in results if result["task"] == task]
            if runs:
                print(report_row(task, kind, runs))


def report_row(task: str, kind: str, runs: list[dict]) -> str:
    cells = [task, kind]
    for key in ("last", "best"):
        values = [run[key] for run in runs]
        cells += [mean_and_error(values), ", ".join(f"{100 * value:.0f}" for value in values)]
    cells.append(", ".join(str(run["best_step"]) for run in runs))
    cells.append(mean_and_error([sum(run["reward"]) / len(run["reward"]) for run in runs]))
    divergences = [value for run in runs for value in run["kl"] if value is not None]
    cells.append(f"{sum(divergences) / len(divergences):.2g}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser, run, one = make_parser(__doc__, ROOT / "runs" / "features")
    for command in (run, one):
        command.set_defaults(model="")  # each run makes its own
    one.add_argument("task", choices=ENVS)
    one.add_argument("seed", type=int)
    run_command(parser.parse_args(), RESULTS_FILE, make_jobs, run_one, report)


if __name__ == "__main__":
    main()
