"""What is learned in equal seconds with and without rollout.num_processes, on two cores.

    python benchmarks/lab/overlap_learning.py run MODEL [--seeds 3] [--seconds 1200]
    python benchmarks/lab/overlap_learning.py report

MODEL is the folder `model` that `python examples/quickstart.py prepare FOLDER` makes. The task is
sums and differences of one-digit numbers, with GRPO and the settings of learning.py, but with
dithered weights or in float32 and a rate of 1e-5. There are two processes of one thread:

    together    both sample, then both train
    apart       one samples while the other trains; with --ahead 2 two steps ahead

--seconds after its model is loaded a run is asked to stop, which it does after its step. Then the
model plays the 50 questions that are held out. The kinds take turns. Each finished run is a line of
benchmarks/lab/results/overlap_learning.jsonl; `report` prints the table.

Needs the `test` and `quickstart` extras.
"""

import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from learning import ALGORITHMS, TASKS, make_data, run_keys, without_paths
from overlap import NUM_SAMPLERS
from rows import read_rows
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

RESULTS_FILE = RESULTS / "overlap_learning.jsonl"
TASK = TASKS["sums"]
SECONDS_TO_STOP = 3600  # after the signal, at most


def run_one(arguments) -> dict:
    """Trains for the time, and evaluates. Returns the result."""
    name = job_name(arguments.kind, arguments.ahead, arguments.seconds, arguments.seed)
    folder = arguments.folder / name
    make_data(TASK, arguments.folder)
    keys = [
        *run_keys(TASK, arguments.model, arguments.seed, folder, dtype="auto"),
        *ALGORITHMS["GRPO"],
        "actor.lr=1e-5",  # the best one of weights that are not rounded as stored
        "actor.fsdp_size=1",
        f"rollout.num_processes={NUM_SAMPLERS[arguments.kind]}",
    ]
    if arguments.kind == "apart":
        keys.append(f"rollout.max_staleness={arguments.ahead}")
    before = evaluate(keys, arguments.model, arguments.folder / "before")
    shutil.rmtree(folder, ignore_errors=True)  # of a run that failed
    train_for(arguments.seconds, [key for key in keys if "test_path" not in key], folder)
    steps = read_rows(folder / "metrics.jsonl")
    return {
        "kind": arguments.kind,
        "ahead": arguments.ahead,
        "asked_seconds": arguments.seconds,
        "seed": arguments.seed,
        "before": before,
        "accuracy": evaluate(keys, str(folder / "model"), folder.with_name(f"{name}-test")),
        "steps": len(steps),
        "seconds_in_steps": sum(step["time/step"] for step in steps),
        "keys": without_paths(keys),
    }


def train_for(seconds: float, keys: list[str], folder: Path) -> None:
    """Trains in two processes, and asks them to stop after the time. RuntimeError if one fails.

    torchrun would kill them 30 seconds after a signal.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    shared["MASTER_PORT"] = str(port)
    command = [sys.executable, "-m", "rl2.trainer.ppo", *keys]
    processes = [
        subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, **shared, "RANK": rank, "LOCAL_RANK": rank}
        )
        for rank in ("0", "1")
    ]
    end = math.inf
    while time.monotonic() < end and all(process.poll() is None for process in processes):
        if end == math.inf and (folder / "run.json").exists():  # written when all is loaded
            end = time.monotonic() + seconds
        time.sleep(0.2)
    for process in processes:
        process.send_signal(signal.SIGTERM)
    statuses = [process.wait(timeout=SECONDS_TO_STOP) for process in processes]
    if any(statuses) or not (folder / "model").exists():
        raise RuntimeError(f"the processes of {folder} ended with {statuses}")


def evaluate(keys: list[str], model: str, folder: Path) -> float:
    """The share of held-out questions that the model answers rightly, in one process."""
    changed = {
        "actor.model_name": model,
        "trainer.save_dir": folder,
        "trainer.experiment_name": folder.name,
        "trainer.eval_only": "true",
    }
    unused = ("data.path", "rollout.num_processes", "rollout.max_staleness")
    kept = [key for key in keys if key.partition("=")[0] not in (*changed, *unused)]
    kept += [f"{key}={value}" for key, value in changed.items()]
    command = [sys.executable, "-m", "rl2.trainer.ppo", *kept]
    subprocess.run(command, check=True, cwd=ROOT)
    return read_rows(folder / "metrics.jsonl")[-1]["test/reward/right"]


def job_name(kind: str, ahead: int, seconds: float, seed: int) -> str:
    kind = f"{kind}-{ahead}" if kind == "apart" else kind
    return f"{kind}-{seconds:g}-{seed}"


def make_jobs(arguments) -> list[Job]:
    jobs = []
    for seed in range(arguments.seeds):
        for kind in NUM_SAMPLERS:
            values = (kind, arguments.ahead, arguments.seconds, seed)
            jobs.append(make_job(arguments, job_name(*values), arguments.model, *values))
    return jobs


def report() -> None:
    """Prints the table in Markdown: means over the runs, with the standard error of the mean."""
    results = list(read_results(RESULTS_FILE).values())
    print("| asked, s | processes | runs | before, % | after, % | steps | seconds in steps |")
    print("|---|---|---|---|---|---|---|")
    groups: dict[tuple, list[dict]] = {}
    for run in results:
        kind = f"apart, {run['ahead']} ahead" if run["kind"] == "apart" else run["kind"]
        groups.setdefault((run["asked_seconds"], kind), []).append(run)
    for (seconds, kind), runs in sorted(groups.items()):
        cells = [f"{seconds:g}", kind, str(len(runs))]
        cells += [mean_and_error([run[key] for run in runs]) for key in ("before", "accuracy")]
        for key in ("steps", "seconds_in_steps"):
            cells.append(f"{sum(run[key] for run in runs) / len(runs):.0f}")
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser, run, one = make_parser(__doc__, ROOT / "runs" / "overlap_learning")
    run.add_argument("model", help="folder of the model")
    run.add_argument("--seconds", type=float, default=1200.0, help="until the run is to stop")
    run.add_argument("--ahead", type=int, default=1, help="rollout.max_staleness of apart")
    one.add_argument("model")
    one.add_argument("kind", choices=NUM_SAMPLERS)
    one.add_argument("ahead", type=int)
    one.add_argument("seconds", type=float)
    one.add_argument("seed", type=int)
    run_command(parser.parse_args(), RESULTS_FILE, make_jobs, run_one, report)


if __name__ == "__main__":
    main()
