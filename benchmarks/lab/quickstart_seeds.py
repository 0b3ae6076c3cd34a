"""The quickstart of one or more checkouts, three seeds each: accuracy, wall and CPU seconds.

    python benchmarks/lab/quickstart_seeds.py run DATA CHECKOUT [CHECKOUT ...] [--seeds 3]
    python benchmarks/lab/quickstart_seeds.py report

DATA/model is the model that `python examples/quickstart.py prepare DATA` makes; each checkout makes
its own task. Checkouts take turns, so that a busy machine slows all of them. Installation is left
out; loading, evaluation and the final export count. The queue can be stopped and started again;
each finished run is a line of benchmarks/lab/results/quickstart.jsonl.

Needs the `quickstart` extra.
"""

import json
import os
import subprocess
import time
from pathlib import Path

from rows import read_rows
from run_queue import (
    RESULTS,
    ROOT,
    cpu_seconds_of,
    make_job,
    make_parser,
    mean_and_error,
    read_results,
    run_missing,
)

RESULTS_FILE = RESULTS / "quickstart.jsonl"


def run_one(checkout: Path, data: Path, seed: int, folder: Path) -> dict:
    """Runs the training of a checkout's examples/quickstart.sh. Returns what it took and reached.

    `folder` stands for `runs/` of the checkout.
    """
    own_data = folder / "quickstart-data"
    own_data.mkdir(parents=True, exist_ok=True)
    if not (own_data / "model").exists():
        (own_data / "model").symlink_to(data.resolve() / "model")
    environment = {**os.environ, "PYTHONPATH": str(checkout), "SEED": str(seed)}
    prepare = ["python", "examples/quickstart.py", "prepare", str(own_data), "--no-model"]
    subprocess.run(prepare, cwd=checkout, env=environment, check=True)
    lines = (checkout / "examples/quickstart.sh").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("cores="))
    last = next(i for i, line in enumerate(lines) if line.endswith('"$@"'))
    script = "\n".join(["set -e", *lines[first : last + 1]])
    script = script.replace("runs/quickstart-data", str(own_data))
    output = folder / f"seed-{seed}"
    variables = f"out={output}\nprocesses=${{PROCESSES:-1}}"
    command = ["bash", "-c", f"{variables}\n{script}", "quickstart.sh", "trainer.resume=off"]
    start = time.perf_counter()
    cpu_seconds = cpu_seconds_of(command, cwd=checkout, env=environment)
    seconds = time.perf_counter() - start
    metrics = read_rows(output / "metrics.jsonl")
    tests = [share_of_right(line) for line in metrics if "test/reward/mean" in line]
    return {
        "checkout": checkout.name,
        "seed": seed,
        "before": tests[0],
        "after": tests[-1],
        "steps": metrics[-1]["step"],
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "threads": os.environ.get("OMP_NUM_THREADS", "all cores"),
    }


def share_of_right(line: dict) -> float:
    """The reward of the test is the share of right answers, unless it has parts."""
    return line.get("test/reward/right", line["test/reward/mean"])


def report() -> None:
    """Prints the table in Markdown."""
    results = list(read_results(RESULTS_FILE).values())
    print("| checkout | runs | before, % | after, % | steps | seconds | CPU s |")
    print("|---|---|---|---|---|---|---|")
    for checkout in dict.fromkeys(result["checkout"] for result in results):
        runs = [result for result in results if result["checkout"] == checkout]
        cells = [checkout, str(len(runs))]
        cells += [mean_and_error([run[key] for run in runs]) for key in ("before", "after")]
        for key in ("steps", "seconds", "cpu_seconds"):
            cells.append(f"{sum(run[key] for run in runs) / len(runs):.0f}")
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser, run, one = make_parser(__doc__, ROOT / "runs" / "quickstart_seeds")
    for command in (run, one):
        command.add_argument("data", type=Path)
    run.add_argument("checkouts", type=Path, nargs="+")
    one.add_argument("checkout", type=Path)
    one.add_argument("seed", type=int)
    arguments = parser.parse_args()
    if arguments.command == "report":
        report()
    elif arguments.command == "one":
        checkout = arguments.checkout.absolute()
        folder = arguments.folder.absolute() / checkout.name
        print(json.dumps(run_one(checkout, arguments.data, arguments.seed, folder)))
    else:
        jobs = []
        for seed in range(arguments.seeds):
            for checkout in arguments.checkouts:
                name = f"{checkout.absolute().name}-{seed}"
                jobs.append(make_job(arguments, name, arguments.data, checkout, seed))
        run_missing(jobs, RESULTS_FILE, arguments.folder)


if __name__ == "__main__":
    main()
