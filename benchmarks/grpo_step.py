"""Seconds of one whole GRPO step (rollout, update, weights back) of rl2 and of TRL's GRPOTrainer at the same settings:

    python benchmarks/grpo_step.py MODEL [--prompts 8] [--samples 8] [--longest 64] [--steps 4]

Word problems of reasoning-gym's gsm_symbolic, no KL term, one update a rollout, bf16 where the machine is fast at it, no
gradient checkpointing. Each runs in a process of its own; the first step warms up and is not counted. Needs the `test` extra.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

# Every answer of a group earns something else: rl2 does not run groups that all earned the same, which would flatter it.
ENV = "def reward_fn(messages):\n    return len(messages[-1]['content']) / 100\n"


def make_rows(count: int) -> list[dict]:
    import reasoning_gym

    task = reasoning_gym.create_dataset("gsm_symbolic", size=count, seed=0)
    return [{"messages": [{"role": "user", "content": item["question"]}], "answer": item["answer"]} for item in task]


def run_rl2(arguments, folder: Path) -> list[dict]:
    (folder / "env.py").write_text(ENV)
    command = [
        "-m", "rl2.trainer.ppo", f"data.path={folder / 'rows.jsonl'}", "data.max_length=512", "data.shuffle=false",
        f"data.prompts_per_rollout={arguments.prompts}", f"data.responses_per_prompt={arguments.samples}",
        f"actor.model_name={arguments.model}", "actor.max_length_per_device=4096", "actor.gradient_checkpointing=false",
        f"rollout.env_path={folder / 'env.py'}", f"rollout.max_running={arguments.prompts * arguments.samples}",
        f"rollout.train_sampling_params.max_new_tokens={arguments.longest}", "adv.norm_var=true",
        f"trainer.deterministic={arguments.deterministic}", "trainer.disable_wandb=true", f"trainer.save_dir={folder}",
    ]  # fmt: skip
    subprocess.run([sys.executable, *command], check=True, stdout=sys.stderr)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{"seconds": line["time/step"], "tokens": line["tokens/sampled"]} for line in lines]


def run_trl(arguments, folder: Path) -> list[dict]:
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from rl2.worker import compute_dtype

    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    data = Dataset.from_list([{"prompt": row["messages"], "answer": row["answer"]} for row in rows])

    def length(completions, **_):
        return [len(reply[0]["content"]) / 100 for reply in completions]

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    total = arguments.prompts * arguments.samples
    config = GRPOConfig(
        output_dir=str(folder / "trl"), max_steps=arguments.steps, learning_rate=1e-6, beta=0.0,
        num_generations=arguments.samples, max_completion_length=arguments.longest, temperature=1.0,
        per_device_train_batch_size=total // 4, gradient_accumulation_steps=4, gradient_checkpointing=False,
        bf16=compute_dtype("auto", device) == torch.bfloat16, use_cpu=device.type == "cpu", shuffle_dataset=False,
        logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True, lr_scheduler_type="constant",
    )  # fmt: skip
    trainer = GRPOTrainer(model=arguments.model, args=config, reward_funcs=length, train_dataset=data)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "step_time" in entry]
    return [{"seconds": e["step_time"], "tokens": e["completions/mean_length"] * total} for e in logs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    for name, default in (("prompts", 8), ("samples", 8), ("longest", 64), ("steps", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--deterministic", default="true", help="rl2's rollouts that repeat bit for bit")
    parser.add_argument("--only", choices=["trl", "rl2"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        steps = {"trl": run_trl, "rl2": run_rl2}[arguments.only](arguments, arguments.folder)
        print(json.dumps(steps))
        return
    middle = {}
    for name in ("trl", "rl2"):
        with tempfile.TemporaryDirectory() as folder:
            rows = make_rows(arguments.prompts * arguments.steps)
            Path(folder, "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            command = [sys.executable, __file__, *sys.argv[1:], "--only", name, "--folder", folder]
            out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        steps = json.loads(out.splitlines()[-1])[1:]
        middle[name] = statistics.median(step["seconds"] for step in steps)
        tokens = statistics.mean(step["tokens"] for step in steps)
        rate = sum(step["tokens"] for step in steps) / sum(step["seconds"] for step in steps)
        print(f"{name}  {middle[name]:6.1f} s a step, {tokens:.0f} sampled tokens, {rate:.0f} tokens/s", flush=True)
    print(f"trl / rl2: {middle['trl'] / middle['rl2']:.2f}")


if __name__ == "__main__":
    main()
