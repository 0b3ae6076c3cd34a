"""Seconds of one whole GRPO step (rollout, update, weights back) of rl2 and of TRL's GRPOTrainer at
the same settings:

    python benchmarks/grpo_step.py MODEL [--prompts 8] [--samples 8] [--longest 64] [--steps 4]

Word problems of reasoning-gym's gsm_symbolic, no KL term, one update a rollout, bf16 where the
machine is fast at it, no gradient checkpointing. Each runs in a process of its own; the first step
warms up and is not counted. Needs the `test` and `quickstart` extras."""

import json
import statistics
from pathlib import Path

from against_trl import SIDES, parser, problems, read_rows, steps_of, train

# Every answer of a group earns something else: rl2 does not run groups that all earned the same,
# which would flatter it.
ENV = "def reward_fn(messages):\n    return len(messages[-1]['content']) / 100\n"


def make_rows(count: int) -> list[dict]:
    return [
        {"messages": [{"role": "user", "content": item["question"]}], "answer": item["answer"]}
        for item in problems(count)
    ]


def run_rl2(arguments, folder: Path) -> list[dict]:
    (folder / "env.py").write_text(ENV)
    settings = [
        "data.max_length=512",
        "data.shuffle=false",
        f"data.prompts_per_rollout={arguments.prompts}",
        f"data.responses_per_prompt={arguments.samples}",
        f"actor.model_name={arguments.model}",
        "actor.max_length_per_device=4096",
        "actor.gradient_checkpointing=false",
        f"rollout.env_path={folder / 'env.py'}",
        f"rollout.max_running={arguments.prompts * arguments.samples}",
        f"rollout.train_sampling_params.max_new_tokens={arguments.longest}",
        "adv.norm_var=true",
        f"trainer.deterministic={arguments.deterministic}",
    ]
    return train("ppo", folder, settings, "tokens/sampled")


def run_trl(arguments, folder: Path) -> list[dict]:
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from rl2.worker import compute_dtype

    data = Dataset.from_list(
        [{"prompt": row["messages"], "answer": row["answer"]} for row in read_rows(folder)]
    )

    def length(completions, **_):
        return [len(reply[0]["content"]) / 100 for reply in completions]

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    total = arguments.prompts * arguments.samples
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=arguments.steps,
        learning_rate=1e-6,
        beta=0.0,
        num_generations=arguments.samples,
        max_completion_length=arguments.longest,
        temperature=1.0,
        per_device_train_batch_size=total // 4,
        gradient_accumulation_steps=4,
        gradient_checkpointing=False,
        bf16=compute_dtype("auto", device) == torch.bfloat16,
        use_cpu=device.type == "cpu",
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        lr_scheduler_type="constant",
    )
    trainer = GRPOTrainer(
        model=arguments.model, args=config, reward_funcs=length, train_dataset=data
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "step_time" in entry]
    return [
        {"seconds": e["step_time"], "tokens": e["completions/mean_length"] * total} for e in logs
    ]


def main() -> None:
    options = parser(__doc__, prompts=8, samples=8, longest=64, steps=4)
    options.add_argument(
        "--deterministic", default="true", help="rl2's rollouts that repeat bit for bit"
    )
    arguments = options.parse_args()
    if arguments.only:
        print(
            json.dumps(
                {"trl": run_trl, "rl2": run_rl2}[arguments.only](arguments, arguments.folder)
            )
        )
        return
    middle, rows = {}, make_rows(arguments.prompts * arguments.steps)
    for side in SIDES:
        steps = steps_of(side, rows)
        middle[side] = statistics.median(step["seconds"] for step in steps)
        tokens = statistics.mean(step["tokens"] for step in steps)
        rate = sum(step["tokens"] for step in steps) / sum(step["seconds"] for step in steps)
        print(
            f"{side}  {middle[side]:6.1f} s a step, {tokens:.0f} sampled tokens, {rate:.0f} "
            f"tokens/s",
            flush=True,
        )
    print(f"trl / rl2: {middle['trl'] / middle['rl2']:.2f}")


if __name__ == "__main__":
    main()
