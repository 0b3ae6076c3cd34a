"""What actor.dither_weights changes in SFT and DPO, by learning rate.

    python benchmarks/lab/dither_offline.py run MODEL [--folder runs/dither_offline] [--seeds 3]
    python benchmarks/lab/dither_offline.py report

MODEL is the folder `model` that `python examples/quickstart.py prepare FOLDER` makes. The rows are
worked answers to the problems of word_problems.py; DPO rejects those whose last result is wrong.
Held-out rows give the loss before and after, and held-out questions are answered at temperature 1.
All runs of a trainer and a seed see the same rows in the same order. Each finished run is a line of
benchmarks/lab/results/dither_offline.jsonl; `report` prints the tables of learning.md and
draws docs/precision.png.

Needs the `test` and `quickstart` extras.
"""

import random
import shutil
from pathlib import Path

from rows import read_rows, write_rows
from run_queue import (
    DTYPE,
    RESULTS,
    ROOT,
    Job,
    make_job,
    make_parser,
    mean_and_error,
    read_results,
    run_command,
    train_in,
)
from word_problems import COMMON, draw_problems

RESULTS_FILE = RESULTS / "dither_offline.jsonl"
RATES = ("1e-6", "1e-5", "5e-5")
KINDS = {
    "stored": "actor.dither_weights=false",
    "dithered": "actor.dither_weights=true",
    "fp32": "actor.dtype=float32",
}
LABELS = {
    "stored": "bfloat16, weights as stored",
    "dithered": "bfloat16, dithered",
    "fp32": "float32",
}
DRAWN_RATE = "1e-5"
SIZES = {"train": 96, "held_out": 48}  # no problem is in both
STEPS, BATCH_SIZE = 12, 8
NAMES = ("trainer", "kind", "rate", "seed")  # what tells a run from the others


def make_data(folder: Path) -> None:
    """Writes rows of SFT and DPO, and the held-out questions."""
    if (folder / "questions.jsonl").exists():
        return
    rng = random.Random(1)
    remaining = iter(draw_problems(rng, sum(SIZES.values())))
    folder.mkdir(parents=True, exist_ok=True)
    for name, size in SIZES.items():
        part = [next(remaining) for _ in range(size)]
        write_rows(folder / f"sft-{name}.jsonl", [make_conversation(problem) for problem in part])
        write_rows(folder / f"dpo-{name}.jsonl", [make_pair(problem, rng) for problem in part])
    write_rows(folder / "questions.jsonl", [make_question(problem) for problem in part])


def make_question(problem: dict) -> dict:
    return {
        "messages": [{"role": "user", "content": problem["question"]}],
        "answer": problem["answer"],
    }


def make_conversation(problem: dict, worked: str | None = None) -> dict:
    reply = {"role": "assistant", "content": worked or problem["worked"]}
    return {"messages": [*make_question(problem)["messages"], reply]}


def make_pair(problem: dict, rng: random.Random) -> dict:
    """The worked answer, and one whose last result is off by 1 to 9."""
    wrong = str(int(problem["answer"]) + rng.randint(1, 9))
    lines = problem["worked"].splitlines()
    lines[-2] = f"{lines[-2].partition(' = ')[0]} = {wrong}"
    lines[-1] = f"#### {wrong}"
    return {
        "chosen": make_conversation(problem)["messages"],
        "rejected": make_conversation(problem, "\n".join(lines))["messages"],
    }


def run_one(arguments) -> dict:
    """One run. Returns its held-out metrics before and after."""
    trainer, kind, rate, seed = (getattr(arguments, name) for name in NAMES)
    data = arguments.folder
    make_data(data)
    folder = data / f"{trainer}-{kind}-{rate}-{seed}"
    keys = [
        *COMMON,
        f"actor.dtype={DTYPE}",
        f"data.batch_size={BATCH_SIZE}",
        f"actor.lr={rate}",
        KINDS[kind],
        f"trainer.max_steps={STEPS}",
        f"trainer.test_freq={STEPS}",
        "rollout.env_path=gsm8k",
        "rollout.test_sampling_params.max_new_tokens=32",
        "rollout.test_sampling_params.temperature=1",
    ]
    cpu_seconds = train_in(
        folder,
        trainer,
        *keys,
        f"data.path={data / f'{trainer}-train.jsonl'}",
        f"data.test_path={data / f'{trainer}-held_out.jsonl'}",
        f"data.seed={seed}",
        f"trainer.seed={seed}",
        f"actor.model_name={arguments.model}",
        f"rollout.test_path={data / 'questions.jsonl'}",
    )
    lines = read_rows(folder / "metrics.jsonl")
    tests = [line for line in lines if "test/loss" in line]
    visible = [line["actor/visible_update"] for line in lines if "actor/visible_update" in line]
    shutil.rmtree(folder / "model")  # 270 MB
    result = {name: getattr(arguments, name) for name in NAMES}
    return result | {
        "before": tests[0]["test/loss"],
        "after": tests[-1]["test/loss"],
        "right": tests[-1]["test/reward/right"],
        "right_before": tests[0]["test/reward/right"],
        "pairs": tests[-1].get("test/accuracy"),
        "margin": tests[-1].get("test/margin"),
        "loss": [line["actor/loss"] for line in lines if "actor/loss" in line],
        "visible_update": visible,
        "cpu_seconds": cpu_seconds,
        "keys": keys,
    }


def make_jobs(arguments) -> list[Job]:
    jobs = []
    for seed in range(arguments.seeds):
        for rate in arguments.rates:
            for trainer in arguments.trainers:
                for kind in arguments.kinds:
                    words = (trainer, kind, rate, seed)
                    name = "-".join(map(str, words))
                    jobs.append(make_job(arguments, name, arguments.model, *words))
    return jobs


def report() -> None:
    """Prints a table for each trainer, in Markdown, and draws docs/precision.png."""
    results = list(read_results(RESULTS_FILE).values())
    for trainer in ("sft", "dpo"):
        print(f"\n{trainer}\n\n| rate | weights | runs | held-out loss before | after ", end="")
        print("| right answers, % | pairs, % | visible update |\n|---|---|---|---|---|---|---|---|")
        for rate in sorted({run["rate"] for run in results}, key=float):
            for kind in KINDS:
                runs = [
                    run
                    for run in results
                    if (run["trainer"], run["rate"], run["kind"]) == (trainer, rate, kind)
                ]
                if runs:
                    print(report_row(rate, kind, runs))
    draw(results, ROOT / "docs" / "precision.png")


def draw(results: list[dict], file: Path) -> None:
    """Draws the training loss of SFT at DRAWN_RATE, mean of all seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for kind, style in (("stored", "-"), ("dithered", "-"), ("fp32", "k:")):
        losses = [
            run["loss"]
            for run in results
            if (run["trainer"], run["rate"], run["kind"]) == ("sft", DRAWN_RATE, kind)
        ]
        means = [sum(step) / len(step) for step in zip(*losses, strict=True)]
        label = f"{LABELS[kind]} ({len(losses)} seed{'s' * (len(losses) > 1)})"
        axes.plot(range(1, len(means) + 1), means, style, label=label)
    axes.set(xlabel="step", ylabel=f"loss of SFT, rate {DRAWN_RATE}", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)


def report_row(rate: str, kind: str, runs: list[dict]) -> str:
    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    after = [run["after"] for run in runs]
    pairs = [run["pairs"] for run in runs if run["pairs"] is not None]
    visible = [value for run in runs for value in run["visible_update"] if value is not None]
    cells = [
        rate,
        kind,
        str(len(runs)),
        f"{mean([run['before'] for run in runs]):.3f}",
        f"{mean(after):.3f} ({min(after):.3f} to {max(after):.3f})",
        mean_and_error([run["right"] for run in runs]),
        mean_and_error(pairs) if pairs else "",
        f"{mean(visible):.2g}" if visible else "",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser, run, one = make_parser(__doc__, ROOT / "runs" / "dither_offline")
    run.add_argument("model", help="folder of the model")
    run.add_argument("--trainers", nargs="*", choices=("sft", "dpo"), default=["sft", "dpo"])
    run.add_argument("--rates", nargs="*", choices=RATES, default=RATES)
    run.add_argument("--kinds", nargs="*", choices=KINDS, default=["stored", "dithered"])
    for name in ("model", "trainer", "kind", "rate"):
        one.add_argument(name)
    one.add_argument("seed", type=int)
    run_command(parser.parse_args(), RESULTS_FILE, make_jobs, run_one, report)


if __name__ == "__main__":
    main()
