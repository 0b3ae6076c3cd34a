"""A coding agent with a small model: SFT, then GRPO through the agent's own requests.

    python benchmarks/lab/coding_agent.py run MODEL [--folder runs/coding_agent] [--seeds 3]
    python benchmarks/lab/coding_agent.py report

MODEL is the folder `model` that `python examples/quickstart.py prepare FOLDER` makes. It is
SmolLM2-135M-Instruct. The agent is mini-swe-agent, as envs/mini_swe_agent.py runs it: the model
reads a function whose test fails, and mends it. A few steps of SFT on conversations of the agent,
with the right commands in the place of the model's, teach what commands look like. Then GRPO trains
on other programs. The reward comes from tests that run after the agent. Accuracy is greedy, on
programs that occur in no training set.

The queue can be stopped and started again; each finished run is a line of
benchmarks/lab/results/coding_agent.jsonl.

Needs the `test` and `quickstart` extras, and mini-swe-agent.
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

sys.path.insert(0, str(ROOT))  # the env imports rl2
sys.path.insert(0, str(ROOT / "envs"))

RESULTS_FILE = RESULTS / "coding_agent.jsonl"
NUM_TEST = 16  # programs
SFT_STEPS, SFT_BATCH = 7, 16
RL_STEPS, PROMPTS, SAMPLES = 8, 4, 4
COMMON = [  # keys of both trainers
    "data.max_length=512",
    "actor.max_length_per_device=4096",
    "actor.gradient_checkpointing=false",
]
SFT_KEYS = [f"data.batch_size={SFT_BATCH}", "actor.lr=1e-4", "trainer.n_epochs=1"]
RL_KEYS = [
    f"data.prompts_per_rollout={PROMPTS}",
    f"data.responses_per_prompt={SAMPLES}",
    "actor.lr=5e-5",
    "adv.estimator=reinforce",
    "adv.norm_var=true",
    "rollout.env_path=mini_swe_agent",
    "rollout.env_timeout=600",
    "rollout.max_turns=2",
    "rollout.max_running=64",
    "rollout.train_sampling_params.max_new_tokens=72",
    f"trainer.max_steps={RL_STEPS}",
]


def draw_rows(seed: int, size: int, taken: set[str]) -> list[dict]:
    """Rows of different programs, of which none is taken. Adds their programs to `taken`."""
    import mini_swe_agent

    generator = random.Random(seed)
    rows: list[dict] = []
    while len(rows) < size:
        row = mini_swe_agent.make_row(generator)
        program = row["files"]["solution.py"]
        if program not in taken:
            taken.add(program)
            rows.append(row)
    return rows


def make_conversation(row: dict) -> dict:
    """The agent's own conversation about a program, with the right commands as the replies."""
    import mini_swe_agent as env
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

    from rl2.rewards.workspace import Workspace

    mend = f"sed -i 's|return .*|return {row['right']}|' solution.py && python test_solution.py"
    commands = iter(["cat solution.py", f"{mend} && echo {env.END}"])

    class Scripted(LitellmTextbasedModel):
        def _query(self, messages, **kwargs):
            reply = f"```bash\n{next(commands)}\n```"
            return super()._query(messages, mock_response=reply, **kwargs)

    policy = Scripted(model_name="openai/rl2", cost_tracking="ignore_errors", **env.FORM)
    with Workspace(row["files"], env.LIMITS) as workspace:
        agent = DefaultAgent(policy, env.Shell(workspace), **env.PROMPTS)
        end = agent.run(row["messages"][-1]["content"])
    assert end["exit_status"] == "Submitted", (row, agent.messages)
    messages = [message for message in agent.messages if message["role"] != "exit"]
    return {"messages": [{key: m[key] for key in ("role", "content")} for m in messages]}


def make_data(folder: Path) -> None:
    """Writes the sets; SFT sees each of its conversations once. No program is in two sets."""
    folder.mkdir(parents=True, exist_ok=True)
    taken: set[str] = set()
    sets = {
        "test": draw_rows(0, NUM_TEST, taken),
        "sft": [make_conversation(row) for row in draw_rows(1, SFT_STEPS * SFT_BATCH, taken)],
        "rl": draw_rows(2, RL_STEPS * PROMPTS, taken),
    }
    for name, rows in sets.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_one(arguments) -> dict:
    """SFT and GRPO of one seed. GRPO's evaluation at its start is the one after SFT."""
    model, folder, seed = arguments.model, arguments.folder, arguments.seed
    make_data(folder)
    sft, rl = folder / f"sft-{seed}", folder / f"rl-{seed}"
    sft_seconds = train_in(
        sft,
        "sft",
        *COMMON,
        *SFT_KEYS,
        f"data.path={folder / 'sft.jsonl'}",
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
    """How many of the trajectories are right, and their mean length."""
    return {
        "trajectories": len(records),
        "right": sum(record["reward"] for record in records),
        "cut": sum(record["finish_reason"] == "length" for record in records),
        "turns": sum(record["num_turns"] for record in records) / len(records),
        "tokens": sum(record["length"] for record in records) / len(records),
    }


def report() -> None:
    """Prints the table in Markdown."""
    runs = sorted(read_results(RESULTS_FILE).values(), key=lambda run: run["seed"])
    print(f"{runs[0]['date']} to {runs[-1]['date']}, {runs[0]['machine']}\n")
    columns = ["seed", "", "right, %", "at a limit, %", "turns", "tokens", "CPU s"]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for run in runs:
        for stage in ("sft", "rl"):
            test = run[f"after_{stage}"]
            num = test["trajectories"]
            cells = [
                str(run["seed"]),
                f"after {stage.upper()}",
                f"{100 * test['right'] / num:.0f}",
                f"{100 * test['cut'] / num:.0f}",
                f"{test['turns']:.2f}",
                f"{test['tokens']:.1f}",
                f"{run[f'{stage}_cpu_seconds']:.0f}",
            ]
            print(f"| {' | '.join(cells)} |")
    print("\nright in the steps of GRPO, %:")
    for run in runs:
        shares = [f"{100 * step['right'] / step['trajectories']:.0f}" for step in run["sampled"]]
        print(f"  seed {run['seed']}: {', '.join(shares)}")


def make_jobs(arguments) -> list[Job]:
    jobs = []
    for seed in range(arguments.seeds):
        command = run_itself("one", arguments.model, str(seed), "--folder", str(arguments.folder))
        jobs.append(Job(f"seed-{seed}", command))
    return jobs


def main() -> None:
    parser, run, one = make_parser(__doc__, ROOT / "runs" / "coding_agent")
    run.add_argument("model", help="folder of the model")
    one.add_argument("model")
    one.add_argument("seed", type=int)
    run_command(parser.parse_args(), RESULTS_FILE, make_jobs, run_one, report)


if __name__ == "__main__":
    main()
