"""Full training, LoRA and QLoRA on two small tasks: rank, scale, layers and learning rate.

    python benchmarks/lab/lora.py run MODEL [--folder runs/lora] [--seeds 3] [--steps 8]
    python benchmarks/lab/lora.py report

MODEL is the folder `model` that `python examples/quickstart.py prepare FOLDER` makes. Tasks, steps
and evaluations are those of dither.py, so that its runs with all weights can be compared. `run` is
a queue that can be stopped and started again, also in two processes; --kinds, --rates and --tasks
choose a part of it. Each finished run is a line of benchmarks/lab/results/lora.jsonl; `report`
prints the tables of learning.md.

Needs the `test` and `quickstart` extras, and for QLoRA the `bitsandbytes` extra.
"""

from dither import HELD_OUT, run_grpo
from learning import make_data
from run_queue import (
    RESULTS,
    ROOT,
    Job,
    make_parser,
    mean_and_error,
    read_results,
    run_command,
    run_itself,
)

RESULTS_FILE = RESULTS / "lora.jsonl"
ATTENTION = "actor.lora_targets=[q_proj,k_proj,v_proj,o_proj]"
KINDS = {
    "full": [],
    "rank 32": ["actor.lora_rank=32"],
    "rank 32, attention": ["actor.lora_rank=32", ATTENTION],
    "rank 32, nf4": ["actor.lora_rank=32", "actor.quantize_base=nf4"],
    "rank 1": ["actor.lora_rank=1"],  # alpha is 2: as with rank 32, adapters are scaled by 2
    "rank 1, alpha 32": ["actor.lora_rank=1", "actor.lora_alpha=32"],
    "rank 32, alpha 32": ["actor.lora_rank=32", "actor.lora_alpha=32"],
}


def run_one(arguments) -> dict:
    """One run, in this process. Returns its result."""
    data = arguments.folder / arguments.task
    make_data(HELD_OUT[arguments.task], data)
    names = ("task", "kind", "rate", "seed", "steps")
    result = {name: getattr(arguments, name) for name in names}
    folder = data / name_of(**result).replace(" ", "_").replace(",", "")
    return result | run_grpo(arguments, folder, *KINDS[arguments.kind])


def name_of(task: str, kind: str, rate: str, seed: int, steps: int) -> str:
    return f"{task}-{kind}-{rate}-{seed}-{steps}"


def make_jobs(arguments) -> list[Job]:
    jobs = []
    for seed in range(arguments.seeds):
        for rate in arguments.rates:
            for kind in arguments.kinds:
                for task in arguments.tasks:
                    command = run_itself(
                        "one",
                        *(arguments.model, task, kind, rate, str(seed), str(arguments.steps)),
                        *("--folder", str(arguments.folder)),
                    )
                    jobs.append(Job(name_of(task, kind, rate, seed, arguments.steps), command))
    return jobs


def report() -> None:
    """Prints a table for each task, in Markdown."""
    results = list(read_results(RESULTS_FILE).values())
    for task in HELD_OUT:
        print(f"\n{task}\n\n| trained | rate | runs | sampled, % | greedy, % ", end="")
        print("| training, last 2 steps, % | KL a step |\n|---|---|---|---|---|---|---|")
        for kind in KINDS:
            of_kind = [run for run in results if (run["task"], run["kind"]) == (task, kind)]
            for rate in sorted({run["rate"] for run in of_kind}, key=float):
                print(report_row(kind, rate, [run for run in of_kind if run["rate"] == rate]))


def report_row(kind: str, rate: str, runs: list[dict]) -> str:
    divergences = [value for run in runs for value in run["kl"] if value is not None]
    cells = [
        kind,
        f"{float(rate):g}",
        str(len(runs)),
        mean_and_error([run["sampled"] for run in runs]),
        mean_and_error([run["greedy"] for run in runs]),
        mean_and_error([sum(run["right"][-2:]) / 2 for run in runs]),
        f"{sum(divergences) / len(divergences):.2g}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser, run, one = make_parser(__doc__, ROOT / "runs" / "lora")
    run.add_argument("model", help="folder of the model")
    run.add_argument("--tasks", nargs="*", choices=HELD_OUT, default=list(HELD_OUT))
    run.add_argument("--rates", nargs="*", default=["1e-4", "3e-4", "1e-3"])
    run.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    run.add_argument("--steps", type=int, default=8)
    for name in ("model", "task", "kind", "rate"):
        one.add_argument(name)
    for name in ("seed", "steps"):
        one.add_argument(name, type=int)
    run_command(parser.parse_args(), RESULTS_FILE, make_jobs, run_one, report)


if __name__ == "__main__":
    main()
