"""Word problems that the model must first learn to format: SFT, then REINFORCE.

    python benchmarks/lab/word_problems.py run MODEL [--seeds 3] [--weights stored dithered]
    python benchmarks/lab/word_problems.py report

MODEL is the folder `model` that `python examples/quickstart.py prepare FOLDER` makes. It is
SmolLM2-135M-Instruct. The problems have two steps, small numbers, and the answer behind ####, as in
GSM8K. A few steps of SFT teach the form. Then REINFORCE trains on other problems, with a KL term to
a reference that is refreshed from the policy (kl.update_freq). Accuracy is greedy, on problems that
occur in no training set.

It shows in small what is reported of GSM8K and a 1B model: 22% after SFT, 38% after RL. The queue
can be stopped and started again; each finished run is a line of
benchmarks/lab/results/word_problems.jsonl.

Needs the `test` and `quickstart` extras.
"""

import random
from pathlib import Path

from rows import read_rows, write_rows
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
from stages import RL_WEIGHTS, add_weights, train_stages

RESULTS_FILE = RESULTS / "word_problems.jsonl"
NAMES = ["Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry"]
THINGS = ["apples", "books", "cards", "coins", "eggs", "pens", "shells", "stamps"]
# (question, first step, second step); x is the result of the first step
KINDS = [
    (
        "{name} has {a} {thing}. {name} gets {b} more and gives {c} away. How many are left?",
        "{a} + {b}",
        "{x} - {c}",
    ),
    (
        "A shop has {a} {thing}. It sells {b} on Monday and {c} on Tuesday. How many are left?",
        "{a} - {b}",
        "{x} - {c}",
    ),
    (
        "{name} has {a} boxes with {b} {thing} each, and {c} more {thing}. How many in all?",
        "{a} * {b}",
        "{x} + {c}",
    ),
    (
        "{name} has {a} boxes with {b} {thing} each and loses {c} {thing}. How many are left?",
        "{a} * {b}",
        "{x} - {c}",
    ),
    (
        "{name} has {a} {thing}. {other} has {b} more than {name}. How many do both have?",
        "{a} + {b}",
        "{a} + {x}",
    ),
    (
        "{name} has {a} {thing}. {other} has {b} fewer than {name}. How many do both have?",
        "{a} - {b}",
        "{a} + {x}",
    ),
]
LARGEST = 12  # of the numbers in a question
SIZES = {"test": 100, "sft": 240, "rl": 1200}  # no problem is in two of these sets
LONGEST = 32  # tokens of an answer
SFT_STEPS, SFT_BATCH = 10, 16
RL_STEPS = 24
COMMON = [  # keys of both trainers
    "data.max_length=128",
    'data.system_prompt="Calculate."',
    "actor.max_length_per_device=4096",
    "actor.gradient_checkpointing=false",
]


def make_problem(rng: random.Random) -> dict | None:
    """A random problem with its worked answer. None where a result would be negative."""
    question, *steps = rng.choice(KINDS)
    name, other = rng.sample(NAMES, 2)
    values = {key: rng.randint(2, LARGEST) for key in "abc"}
    lines = []
    for step in steps:
        formula = step.format(**values)
        values["x"] = evaluate(formula)
        if values["x"] < 0:
            return None
        lines.append(f"{formula} = {values['x']}")
    answer = str(values["x"])
    text = question.format(name=name, other=other, thing=rng.choice(THINGS), **values)
    return {"question": text, "answer": answer, "worked": "\n".join([*lines, f"#### {answer}"])}


def draw_problems(rng: random.Random, count: int) -> list[dict]:
    """Problems whose questions are all different."""
    problems: dict[str, dict] = {}
    while len(problems) < count:
        if problem := make_problem(rng):
            problems[problem["question"]] = problem
    return list(problems.values())


def evaluate(formula: str) -> int:
    """The value of two numbers with + - or * between them."""
    left, operator, right = formula.split()
    a, b = int(left), int(right)
    return {"+": a + b, "-": a - b, "*": a * b}[operator]


def make_data(folder: Path) -> None:
    """Writes the sets. All questions are different."""
    if (folder / "rl.jsonl").exists():
        return
    remaining = iter(draw_problems(random.Random(0), sum(SIZES.values())))
    folder.mkdir(parents=True, exist_ok=True)
    for name, size in SIZES.items():
        rows = []
        for problem in (next(remaining) for _ in range(size)):
            messages = [{"role": "user", "content": problem["question"]}]
            if name == "sft":
                messages.append({"role": "assistant", "content": problem["worked"]})
            rows.append({"messages": messages, "answer": problem["answer"]})
        write_rows(folder / f"{name}.jsonl", rows)


def run_one(arguments) -> dict:
    """SFT and RL of one seed. The accuracy between them is that of RL's evaluation at its start."""
    folder = arguments.folder
    make_data(folder)
    sft_keys = [
        *COMMON,
        f"data.batch_size={SFT_BATCH}",
        "actor.lr=5e-5",
        "actor.scheduler=linear",
        f"trainer.max_steps={SFT_STEPS}",
    ]
    keys = [
        "data.prompts_per_rollout=16",
        "data.responses_per_prompt=8",
        *RL_WEIGHTS[arguments.weights],
        "adv.estimator=reinforce",
        "kl.coef=0.01",
        "kl.type=loss",
        "kl.update_freq=10",
        "rollout.env_path=gsm8k",
        "rollout.max_running=128",
        f"rollout.train_sampling_params.max_new_tokens={LONGEST}",
    ]
    rl_keys = [*COMMON, f"trainer.max_steps={RL_STEPS}", *keys]
    name = job_name(arguments.weights, arguments.seed)
    rl, seconds = train_stages(arguments, name, folder / "sft.jsonl", sft_keys, rl_keys)
    lines = read_rows(rl / "metrics.jsonl")
    tests = [line["test/reward/right"] for line in lines if "test/reward/right" in line]
    sampled = [line["reward/right"] for line in lines if "reward/right" in line]
    return {
        "weights": arguments.weights,
        "seed": arguments.seed,
        "after_sft": tests[0],
        "after_rl": tests[-1],
        "sampled_right": [round(value, 4) for value in sampled],
        **seconds,
        "keys": keys,
    }


def report() -> None:
    """Prints the table in Markdown."""
    results = read_results(RESULTS_FILE).values()
    for weights in RL_WEIGHTS:
        runs = [run for run in results if run["weights"] == weights]
        if runs:
            print_table(weights, sorted(runs, key=lambda run: run["seed"]))


def print_table(weights: str, runs: list[dict]) -> None:
    print(f"\n{weights}, {runs[0]['date']} to {runs[-1]['date']}, {runs[0]['machine']}\n")
    print("| seed | after SFT, % | after RL, % | points | CPU s of SFT | CPU s of RL |")
    print("|---|---|---|---|---|---|")
    for run in runs:
        gain = f"{100 * (run['after_rl'] - run['after_sft']):+.0f}"
        accuracies = f"{100 * run['after_sft']:.0f} | {100 * run['after_rl']:.0f} | {gain}"
        seconds = f"{run['sft_cpu_seconds']:.0f} | {run['rl_cpu_seconds']:.0f}"
        print(f"| {run['seed']} | {accuracies} | {seconds} |")
    means = [mean_and_error([run[key] for run in runs]) for key in ("after_sft", "after_rl")]
    gain = mean_and_error([run["after_rl"] - run["after_sft"] for run in runs])
    print(f"| mean | {means[0]} | {means[1]} | {gain} | | |")


def job_name(weights: str, seed: int) -> str:
    return f"{weights}-seed-{seed}"


def make_jobs(arguments) -> list[Job]:
    jobs = []
    for seed in range(arguments.seeds):
        for weights in arguments.weights:
            name = job_name(weights, seed)
            jobs.append(make_job(arguments, name, arguments.model, weights, seed))
    return jobs


def main() -> None:
    parser, run, one = make_parser(__doc__, ROOT / "runs" / "word_problems")
    run.add_argument("model", help="folder of the model")
    one.add_argument("model")
    add_weights(run, one)
    one.add_argument("seed", type=int)
    run_command(parser.parse_args(), RESULTS_FILE, make_jobs, run_one, report)


if __name__ == "__main__":
    main()
