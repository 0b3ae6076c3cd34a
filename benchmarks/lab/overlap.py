"""What rollout.num_processes saves where rewards are slow: seconds of a step on two cores.

    python benchmarks/lab/overlap.py run MODEL [--folder runs/overlap] [--seeds 3] [--seconds 5]
    python benchmarks/lab/overlap.py report

MODEL is the folder `model` that `python examples/quickstart.py prepare FOLDER` makes. The reward of
each answer takes --seconds, as that of a judge or of a test suite does. There are two processes of
one thread:

    together    both sample, then both train
    apart       one samples while the other trains

The first two steps are left out: the first one waits for its own rollout, and caches fill. The
kinds take turns. Each finished run is a line of benchmarks/lab/results/overlap.jsonl; `report`
prints the table.
"""

import json
import statistics
import subprocess
import sys

from run_queue import (
    RESULTS,
    ROOT,
    Job,
    make_job,
    make_parser,
    read_results,
    run_command,
)

RESULTS_FILE = RESULTS / "overlap.jsonl"
NUM_SAMPLERS = {"together": 0, "apart": 1}  # rollout.num_processes
NUM_STEPS, NUM_LEFT_OUT = 8, 2
ENV = """
import asyncio


async def reward_fn(messages):
    await asyncio.sleep({seconds})
    return len(messages[-1]["content"]) / 100
"""


def run_one(arguments) -> dict:
    """One run, under torchrun. Returns its result."""
    folder = arguments.folder / f"{arguments.kind}-{arguments.seconds}-{arguments.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"messages": [{"role": "user", "content": f"Tell me of {i}."}]} for i in range(64)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "env.py").write_text(ENV.format(seconds=arguments.seconds))
    keys = [
        f"data.path={folder / 'rows.jsonl'}",
        "data.prompts_per_rollout=4",
        "data.responses_per_prompt=4",
        f"actor.model_name={arguments.model}",
        "actor.max_length_per_device=2048",
        "actor.gradient_checkpointing=false",
        "actor.fsdp_size=1",
        f"rollout.env_path={folder / 'env.py'}",
        "rollout.max_running=16",
        "rollout.train_sampling_params.max_new_tokens=16",
        f"rollout.num_processes={NUM_SAMPLERS[arguments.kind]}",
        f"trainer.max_steps={NUM_STEPS}",
        "trainer.n_epochs=9",
        f"trainer.seed={arguments.seed}",
        f"trainer.save_dir={folder / 'run'}",
        "trainer.resume=off",
        "trainer.disable_wandb=true",
    ]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [sys.executable, *launch, "-m", "rl2.trainer.ppo", *keys]
    subprocess.run(command, check=True, cwd=ROOT)
    lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines][NUM_LEFT_OUT:]
    names = ("step", "rollout", "wait", "update", "sync")
    return {
        "kind": arguments.kind,
        "reward_seconds": arguments.seconds,
        "seed": arguments.seed,
        **{
            name: statistics.fmean(step.get(f"time/{name}", 0.0) for step in steps)
            for name in names
        },
    }


def make_jobs(arguments) -> list[Job]:
    jobs = []
    for seed in range(arguments.seeds):
        for kind in NUM_SAMPLERS:
            name = f"{kind}-{arguments.seconds}-{seed}"
            jobs.append(make_job(arguments, name, arguments.model, kind, arguments.seconds, seed))
    return jobs


def report() -> None:
    """Prints the table in Markdown: means over the runs, in seconds a step."""
    results = list(read_results(RESULTS_FILE).values())
    print("| reward, s | processes | runs | step | rollout | wait | update | sync |")
    print("|---|---|---|---|---|---|---|---|")
    for seconds in sorted({run["reward_seconds"] for run in results}):
        for kind in NUM_SAMPLERS:
            runs = [r for r in results if (r["kind"], r["reward_seconds"]) == (kind, seconds)]
            cells = [f"{seconds:g}", kind, str(len(runs))]
            for name in ("step", "rollout", "wait", "update", "sync"):
                cells.append(f"{statistics.fmean(run[name] for run in runs):.1f}")
            print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser, run, one = make_parser(__doc__, ROOT / "runs" / "overlap")
    run.add_argument("model", help="folder of the model")
    run.add_argument("--seconds", type=float, default=5.0, help="that a reward takes")
    for name in ("model", "kind"):
        one.add_argument(name)
    one.add_argument("seconds", type=float)
    one.add_argument("seed", type=int)
    run_command(parser.parse_args(), RESULTS_FILE, make_jobs, run_one, report)


if __name__ == "__main__":
    main()
