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
    STORED,
    percentage,
    print_stages,
    right_by_step,
    summarize,
    summarize_stages,
    train_stages,
)

sys.path.insert(0, str(ROOT))  # the env imports rl2
sys.path.insert(0, str(ROOT / "envs"))

RESULTS_FILE = RESULTS / "coding_agent.jsonl"
NUM_TEST = 32  # programs
SFT_STEPS, SFT_BATCH = 5, 16
RL_STEPS, PROMPTS, SAMPLES = 12, 4, 8
COMMON = [  # keys of both trainers
    "data.max_length=512",
    "actor.max_length_per_device=4096",
    "actor.gradient_checkpointing=false",
]
SFT_KEYS = [f"data.batch_size={SFT_BATCH}", "actor.lr=1e-4", "trainer.n_epochs=1"]
RL_KEYS = [
    f"data.prompts_per_rollout={PROMPTS}",
    f"data.responses_per_prompt={SAMPLES}",
    STORED,
    "actor.lr=2e-5",
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
        write_rows(folder / f"{name}.jsonl", rows)


def run_one(arguments) -> dict:
    """SFT and GRPO of one seed. GRPO's evaluation at its start is the one after SFT."""
    folder, seed = arguments.folder, arguments.seed
    make_data(folder)
    sft_keys, rl_keys = COMMON + SFT_KEYS, COMMON + RL_KEYS
    rl, seconds = train_stages(arguments, str(seed), folder / "sft.jsonl", sft_keys, rl_keys)
    return {
        "seed": seed,
        **summarize_stages(rl, RL_STEPS, summarize_cuts),
        **seconds,
        "sft_keys": sft_keys,
        "rl_keys": rl_keys,
    }


def summarize_cuts(records: list[dict]) -> dict:
    """Also how many of the trajectories end at a limit."""
    num_cut = sum(record["finish_reason"] == "length" for record in records)
    return summarize(records) | {"cut": num_cut}


def report() -> None:
    """Prints the table in Markdown."""
    runs = sorted(read_results(RESULTS_FILE).values(), key=lambda run: run["seed"])
    print_stages(
        runs,
        {"seed": lambda run: str(run["seed"])},
        {"at a limit, %": lambda test: percentage(test, "cut")},
    )
    print("\nright in the steps of GRPO, %:")
    for run in runs:
        print(f"  seed {run['seed']}: {right_by_step(run)}")


def make_jobs(arguments) -> list[Job]:
    jobs = []
    for seed in range(arguments.seeds):
        jobs.append(make_job(arguments, f"seed-{seed}", arguments.model, seed))
    return jobs


def main() -> None:
    parser, run, one = make_parser(__doc__, ROOT / "runs" / "coding_agent")
    run.add_argument("model", help="folder of the model")
    one.add_argument("model")
    one.add_argument("seed", type=int)
    run_command(parser.parse_args(), RESULTS_FILE, make_jobs, run_one, report)


if __name__ == "__main__":
    main()
