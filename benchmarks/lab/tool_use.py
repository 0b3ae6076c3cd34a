"""Arithmetic that a small model can solve with a calculator only: SFT, then GRPO.

    python benchmarks/lab/tool_use.py run MODEL [--seeds 3] [--weights stored dithered]
    python benchmarks/lab/tool_use.py report

MODEL is the folder `model` that `python examples/quickstart.py prepare FOLDER` makes. It is
SmolLM2-135M-Instruct. The questions are those of envs/calculator.py: products of numbers with three
and four digits. A few steps of SFT on conversations teach the form of a call. Then GRPO trains on
other questions, with a reward for the right answer and none for a call. Accuracy is greedy, on
questions that occur in no training set.

Whether the tool is needed is counted in the records of the runs: how many of the trajectories
without a call are right. The queue can be stopped and started again; each finished run is a line of
benchmarks/lab/results/tool_use.jsonl.

Needs the `test` and `quickstart` extras.
"""

import random
import sys
from pathlib import Path

from rows import write_rows
from run_queue import (
    RESULTS,
    ROOT,
    Job,
    make_job,
    make_parser,
    read_results,
    run_command,
)
from stages import (
    RL_WEIGHTS,
    add_weights,
    print_stages,
    right_by_step,
    summarize,
    summarize_stages,
    train_stages,
)

sys.path.insert(0, str(ROOT))  # envs/calculator.py imports rl2
sys.path.insert(0, str(ROOT / "envs"))
import calculator

RESULTS_FILE = RESULTS / "tool_use.jsonl"
NUM_TEST = 50  # questions
SFT_BATCH = 16
RL_STEPS, PROMPTS, SAMPLES = 10, 8, 8
COMMON = [  # keys of both trainers
    "data.max_length=256",
    "actor.max_length_per_device=4096",
    "actor.gradient_checkpointing=false",
]
SFT_KEYS = [f"data.batch_size={SFT_BATCH}", "actor.lr=5e-5", "trainer.n_epochs=1"]
RL_KEYS = [
    f"data.prompts_per_rollout={PROMPTS}",
    f"data.responses_per_prompt={SAMPLES}",
    "adv.estimator=reinforce",
    "adv.norm_var=true",
    "rollout.env_path=calculator",
    "rollout.max_turns=3",
    "rollout.max_running=128",
    "rollout.train_sampling_params.max_new_tokens=64",
    f"trainer.max_steps={RL_STEPS}",
]


def make_data(folder: Path, sft_steps: int) -> None:
    """Writes the sets; SFT sees each of its conversations once. No question is in two sets."""
    sets = {
        "test": (calculator.make_row, NUM_TEST),
        f"sft-{sft_steps}": (calculator.make_conversation, sft_steps * SFT_BATCH),
        "rl": (calculator.make_row, RL_STEPS * PROMPTS),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (name, (make, size)) in enumerate(sets.items()):
        rng = random.Random(seed)
        rows = [make(rng) for _ in range(size)]
        write_rows(folder / f"{name}.jsonl", rows)


def run_one(arguments) -> dict:
    """SFT and GRPO of one seed. GRPO's evaluation at its start is the one after SFT."""
    folder, sft_steps, seed = arguments.folder, arguments.sft_steps, arguments.seed
    make_data(folder, sft_steps)
    sft_keys = COMMON + SFT_KEYS
    rl_keys = COMMON + RL_KEYS + RL_WEIGHTS[arguments.weights]
    sft_rows = folder / f"sft-{sft_steps}.jsonl"
    name = job_name(arguments.weights, sft_steps, seed)
    rl, seconds = train_stages(arguments, name, sft_rows, sft_keys, rl_keys)
    return {
        "weights": arguments.weights,
        "sft_steps": sft_steps,
        "seed": seed,
        **summarize_stages(rl, RL_STEPS, summarize_calls),
        **seconds,
        "sft_keys": sft_keys,
        "rl_keys": rl_keys,
    }


def summarize_calls(records: list[dict]) -> dict:
    """Also how many of the trajectories do not call the tool.

    A call that the tool answers with an error is a call too.
    """
    without = [record for record in records if not calls_tool(record)]
    return summarize(records) | {
        "without_call": len(without),
        "right_without_call": sum(record["reward"] for record in without),
    }


def calls_tool(record: dict) -> bool:
    return any(message["role"] == "tool" for message in record["messages"])


def share_without_call(test: dict) -> float:
    return test["without_call"] / test["trajectories"]


def report() -> None:
    """Prints the table in Markdown."""
    runs = list(read_results(RESULTS_FILE).values())
    runs.sort(key=lambda run: (run["weights"], run["sft_steps"], run["seed"]))
    run_columns = {
        "weights": lambda run: run["weights"],
        "steps of SFT, GRPO": lambda run: f"{run['sft_steps']}, {len(run['sampled'])}",
        "seed": lambda run: str(run["seed"]),
    }
    test_columns = {
        "call the tool, %": lambda test: f"{100 * (1 - share_without_call(test)):.0f}",
        "right without a call": lambda test: (
            f"{test['right_without_call']:.0f} of {test['without_call']}"
        ),
    }
    print_stages(runs, run_columns, test_columns)
    steps = [step for run in runs for step in run["sampled"]]
    right, num = (
        sum(step[key] for step in steps) for key in ("right_without_call", "without_call")
    )
    print(f"\nsampled in training without a call: {num}, of which {right:.0f} are right")
    print("right in the steps of GRPO, %:")
    for run in runs:
        start = f"{run['weights']}, {run['sft_steps']} steps of SFT"
        print(f"  {start}, seed {run['seed']}: {right_by_step(run)}")


def job_name(weights: str, sft_steps: int, seed: int) -> str:
    return f"{weights}-sft-{sft_steps}-seed-{seed}"


def make_jobs(arguments) -> list[Job]:
    jobs = []
    for seed in range(arguments.seeds):
        for weights in arguments.weights:
            values = (weights, arguments.sft_steps, seed)
            jobs.append(make_job(arguments, job_name(*values), arguments.model, *values))
    return jobs


def main() -> None:
    parser, run, one = make_parser(__doc__, ROOT / "runs" / "tool_use")
    run.add_argument("model", help="folder of the model")
    run.add_argument("--sft-steps", type=int, default=5)
    one.add_argument("model")
    add_weights(run, one)
    one.add_argument("sft_steps", type=int)
    one.add_argument("seed", type=int)
    run_command(parser.parse_args(), RESULTS_FILE, make_jobs, run_one, report)


if __name__ == "__main__":
    main()
