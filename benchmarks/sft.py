"""Tokens per second of supervised fine-tuning, rl2 and TRL's SFTTrainer in turns, at the same
settings:

    python benchmarks/sft.py MODEL [--pack 1024] [--rows 20] [--steps 4] [--rounds 2]
    [--checkpointing true]

Word problems of reasoning-gym's gsm_symbolic with their worked answers, trained whole, in the same
order. TRL's step is 4 packs of --pack tokens, packed its own way (`bfd`), --trl-batch of them at a
time; rl2's is --rows rows, 20 of which are a little more, at most 4 packs at a time. fp32 weights,
bf16 where the machine is fast at it, AdamW. Each runs in a process of its own; the first step warms
up and is not counted. Needs the `test` and `quickstart` extras."""

import json
import statistics
import time
from pathlib import Path

from against_trl import SIDES, parser, problems, read_rows, steps_of, train

PACKS = 4  # of a step


def make_rows(count: int) -> list[dict]:
    return [
        {"text": f"{item['question']}\n{item['metadata']['answer_cot']}"}
        for item in problems(count)
    ]


def run_rl2(arguments, folder: Path) -> list[dict]:
    settings = [
        f"data.max_length={arguments.pack}",
        f"data.batch_size={arguments.rows}",
        "data.shuffle=false",
        f"actor.model_name={arguments.model}",
        "actor.lr=1e-5",
        f"actor.max_length_per_device={arguments.pack * PACKS}",
        f"actor.gradient_checkpointing={arguments.checkpointing}",
    ]
    return train("sft", folder, settings, "tokens/total")


def run_trl(arguments, folder: Path) -> list[dict]:
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from rl2.worker import compute_dtype

    class Clock(TrainerCallback):
        def __init__(self):
            self.ends = []

        def on_step_end(self, *_, **__):
            self.ends.append(time.perf_counter())

    clock = Clock()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = Dataset.from_list(read_rows(folder))
    config = SFTConfig(
        output_dir=str(folder / "trl"),
        max_steps=arguments.steps,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        max_length=arguments.pack,
        packing=True,
        per_device_train_batch_size=arguments.trl_batch,
        gradient_accumulation_steps=PACKS // arguments.trl_batch,
        gradient_checkpointing=arguments.checkpointing == "true",
        bf16=compute_dtype("auto", device) == torch.bfloat16,
        use_cpu=device.type == "cpu",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = SFTTrainer(model=arguments.model, args=config, train_dataset=data, callbacks=[clock])
    assert trainer.model.dtype == torch.float32
    trainer.train()
    ends, totals = (
        clock.ends,
        [entry["num_tokens"] for entry in trainer.state.log_history if "num_tokens" in entry],
    )
    steps = zip(ends, ends[1:], totals, totals[1:], strict=False)
    # The first entry stands for the step that warms up.
    return [{}] + [
        {"seconds": end - start, "tokens": after - before} for start, end, before, after in steps
    ]


def main() -> None:
    options = parser(__doc__, rows=20, pack=1024, steps=4, rounds=2, trl_batch=1)
    options.add_argument("--checkpointing", default="true", choices=["true", "false"])
    arguments = options.parse_args()
    if arguments.only:
        print(
            json.dumps(
                {"trl": run_trl, "rl2": run_rl2}[arguments.only](arguments, arguments.folder)
            )
        )
        return
    rates, rows = {side: [] for side in SIDES}, make_rows(arguments.rows * arguments.steps)
    print(
        f"{'round':8}{'':6}{'steps':>6}{'tokens a step':>15}{'seconds a step':>16}{'tokens/s':>10}"
    )
    for number in range(arguments.rounds):
        for side in SIDES:
            steps = steps_of(side, rows)
            seconds, tokens = ([step[key] for step in steps] for key in ("seconds", "tokens"))
            rates[side].append(sum(tokens) / sum(seconds))
            means = f"{statistics.mean(tokens):15.0f}{statistics.mean(seconds):16.1f}"
            told = f"{means}{rates[side][-1]:10.0f}"
            print(f"{number + 1:<8}{side:6}{len(steps):6}{told}", flush=True)
    ratios = [ours / theirs for ours, theirs in zip(rates["rl2"], rates["trl"], strict=True)]
    print(f"rl2 / trl: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
