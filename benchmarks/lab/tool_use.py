"""Arithmetic that a small model can solve with a calculator only: SFT, then GRPO.

    python benchmarks/lab/tool_use.py run MODEL [--folder runs/tool_use] [--seeds 3]
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

import json
import random
import shutil
import sys
from pathlib import Path

from run_queue import (
    RESULTS,
    ROOT,
    Job,
    make_parser,
    read_results,
    run_command,
    run_itself,
    train_in,
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
STORED = "actor.dither_weights=false"  # as when the rates were chosen
SFT_KEYS = [f"data.batch_size={SFT_BATCH}", "actor.lr=5e-5", STORED, "trainer.n_epochs=1"]
RL_KEYS = [
    f"data.prompts_per_rollout={PROMPTS}",
    f"data.responses_per_prompt={SAMPLES}",
    "actor.lr=3e-5",
    STORED,
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
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_one(arguments) -> dict:
    """SFT and GRPO of one seed. GRPO's evaluation at its start is the one after SFT."""
    model, folder = arguments.model, arguments.folder
    sft_steps, seed = arguments.sft_steps, arguments.seed
    make_data(folder, sft_steps)
    sft, rl = folder / f"sft-{sft_steps}-{seed}", folder / f"rl-{sft_steps}-{seed}"
    sft_seconds = train_in(
        sft,
        "sft",
        *COMMON,
        *SFT_KEYS,
        f"data.path={folder / f'sft-{sft_steps}.jsonl'}",
        f"data.seed={seed}",
        f"actor.model_name={model}",
    )
    rl_seconds = train_in(
        rl,
        "ppo",
        *COMMON,
        *RL_KEYS,
        f"data.path={folder / 'rl.jsonl'}",
        f"data.test_path={folder / 'test.jsonl'}",
        f"data.seed={seed}",
        f"trainer.seed={seed}",
        f"actor.model_name={sft / 'model'}",
    )
    for run_folder in (sft, rl):  # 270 MB each
        shutil.rmtree(run_folder / "model")
    tests = [summarize(read_records(rl, "test", step)) for step in (0, RL_STEPS)]
    steps = [summarize(read_records(rl, "train", step + 1)) for step in range(RL_STEPS)]
    return {
        "sft_steps": sft_steps,
        "seed": seed,
        "after_sft": tests[0],
        "after_rl": tests[1],
        "sampled": steps,
        "sft_cpu_seconds": sft_seconds,
        "rl_cpu_seconds": rl_seconds,
        "sft_keys": COMMON + SFT_KEYS,
        "rl_keys": COMMON + RL_KEYS,
    }


def read_records(run: Path, split: str, step: int) -> list[dict]:
    """The trajectories of a step, as the run folder has them."""
    text = (run / "rollouts" / split / f"step_{step}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def summarize(records: list[dict]) -> dict:
    """How many of the trajectories are right and call the tool, and their mean length.

    A call that the tool answers with an error is a call too.
    """
    without = [record for record in records if not calls_tool(record)]
    return {
        "trajectories": len(records),
        "right": sum(record["reward"] for record in records),
        "without_call": len(without),
        "right_without_call": sum(record["reward"] for record in without),
        "turns": sum(record["num_turns"] for record in records) / len(records),
        "tokens": sum(record["length"] for record in records) / len(records),
    }


def calls_tool(record: dict) -> bool:
    return any(message["role"] == "tool" for message in record["messages"])


def report() -> None:
    """Prints the table in Markdown."""
    runs = list(read_results(RESULTS_FILE).values())
    runs.sort(key=lambda run: (run["sft_steps"], run["seed"]))
    print(f"{runs[0]['date']} to {runs[-1]['date']}, {runs[0]['machine']}\n")
    columns = ["steps of SFT, GRPO", "seed", "", "right, %", "call the tool, %"]
    columns += ["right without a call", "turns", "tokens", "CPU s"]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for run in runs:
        for stage in ("sft", "rl"):
            test = run[f"after_{stage}"]
            num = test["trajectories"]
            cells = [
                f"{run['sft_steps']}, {len(run['sampled'])}",
                str(run["seed"]),
                f"after {stage.upper()}",
                f"{100 * test['right'] / num:.0f}",
                f"{100 * (num - test['without_call']) / num:.0f}",
                f"{test['right_without_call']:.0f} of {test['without_call']}",
                f"{test['turns']:.2f}",
                f"{test['tokens']:.1f}",
                f"{run[f'{stage}_cpu_seconds']:.0f}",
            ]
            print(f"| {' | '.join(cells)} |")
    steps = [step for run in runs for step in run["sampled"]]
    right, num = (
        sum(step[key] for step in steps) for key in ("right_without_call", "without_call")
    )
    print(f"\nsampled in training without a call: {num}, of which {right:.0f} are right")
    print("right in the steps of GRPO, %:")
    for run in runs:
        shares = [f"{100 * step['right'] / step['trajectories']:.0f}" for step in run["sampled"]]
        print(f"  {run['sft_steps']} steps of SFT, seed {run['seed']}: {', '.join(shares)}")


def make_jobs(arguments) -> list[Job]:
    jobs = []
    for seed in range(arguments.seeds):
        numbers = [str(arguments.sft_steps), str(seed)]
        command = run_itself("one", arguments.model, *numbers, "--folder", str(arguments.folder))
        jobs.append(Job(f"sft-{arguments.sft_steps}-seed-{seed}", command))
    return jobs


def main() -> None:
    parser, run, one = make_parser(__doc__, ROOT / "runs" / "tool_use")
    run.add_argument("model", help="folder of the model")
    run.add_argument("--sft-steps", type=int, default=5)
    one.add_argument("model")
    one.add_argument("sft_steps", type=int)
    one.add_argument("seed", type=int)
    run_command(parser.parse_args(), RESULTS_FILE, make_jobs, run_one, report)


if __name__ == "__main__":
    main()
