"""Seconds of one GRPO step of rl2 and of TRL's GRPOTrainer with the same settings.

    python benchmarks/grpo_step.py MODEL [--prompts 8] [--samples 8] [--longest 64] [--steps 4]
        [--data FILE] [key=value ...]

A step is the rollout, the update, and the transfer of the weights to the engine. The prompts are
word problems, see shared.py. There is no KL term, one update a rollout, and no
gradient checkpointing. The dtype is bf16 if the hardware is fast at it. Each library runs in its
own process. The first step is a warm-up and does not count.

Needs the `test` extra, and `quickstart` without --data.
"""

import json
import statistics
from pathlib import Path

from shared import (
    make_parser,
    make_problems,
    measure_steps,
    read_rows,
    train_rl2,
)

# The rewards in a group differ. rl2 does not train on groups with equal rewards, so that equal
# rewards would make its step faster.
ENV = "def reward_fn(messages):\n    return len(messages[-1]['content']) / 100\n"


def make_rows(count: int, file: Path | None) -> list[dict]:
    return [
        {"messages": [{"role": "user", "content": question}]}
        for question, _ in make_problems(count, file)
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
        "trainer.deterministic=true",
        *arguments.keys,
    ]
    return train_rl2("ppo", folder, settings, "tokens/sampled")


def run_trl(arguments, folder: Path) -> list[dict]:
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from rl2.worker import compute_dtype

    rows = read_rows(folder / "rows.jsonl")
    data = Dataset.from_list([{"prompt": row["messages"]} for row in rows])

    def length_reward(completions, **_):
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
        model=arguments.model, args=config, reward_funcs=length_reward, train_dataset=data
    )
    trainer.train()
    steps = []
    for entry in trainer.state.log_history:
        if "step_time" in entry:
            tokens = entry["completions/mean_length"] * total
            steps.append({"seconds": entry["step_time"], "tokens": tokens})
    return steps


def main() -> None:
    parser = make_parser(__doc__, prompts=8, samples=8, longest=64, steps=4)
    arguments = parser.parse_intermixed_args()
    if arguments.only:
        run = {"trl": run_trl, "rl2": run_rl2}[arguments.only]
        print(json.dumps(run(arguments, arguments.folder)))
        return
    rows = make_rows(arguments.prompts * arguments.steps, arguments.data)
    medians = {}
    for library in arguments.libraries:
        steps = measure_steps(library, rows)
        seconds = [step["seconds"] for step in steps]
        tokens = [step["tokens"] for step in steps]
        medians[library] = statistics.median(seconds)
        rate = sum(tokens) / sum(seconds)
        print(
            f"{library}  {medians[library]:6.1f} s a step, "
            f"{statistics.mean(tokens):.0f} sampled tokens, {rate:.0f} tokens/s",
            flush=True,
        )
    if len(medians) == 2:
        print(f"trl / rl2: {medians['trl'] / medians['rl2']:.2f}")


if __name__ == "__main__":
    main()
