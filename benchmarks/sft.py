"""Tokens per second of supervised fine-tuning with rl2 and with TRL's SFTTrainer.

    python benchmarks/sft.py MODEL [--pack 1024] [--rows 20] [--steps 4] [--rounds 2]
        [--checkpointing true] [--data FILE] [key=value ...]

The rows are word problems with their worked answers, see shared.py. All of their tokens are
trained. The order of the rows is the same. The libraries take turns.

- A step of TRL is 4 packs of --pack tokens, packed by TRL (`bfd`). --trl-batch packs run at a time.
- A step of rl2 is --rows rows. 20 rows have slightly more tokens than TRL's step. At most the
  tokens of 4 packs run at a time.

The weights are fp32, the compute dtype is bf16 if the hardware is fast at it, and the optimizer is
AdamW. Each library runs in its own process. The first step is a warm-up and does not count.

Needs the `test` extra, and `quickstart` without --data.
"""

import itertools
import json
import statistics
import time
from pathlib import Path

from shared import (
    make_parser,
    make_problems,
    measure_steps,
    read_rows,
    train_rl2,
)

PACKS_PER_STEP = 4


def make_rows(count: int, file: Path | None) -> list[dict]:
    return [{"text": "\n".join(problem)} for problem in make_problems(count, file)]


def run_rl2(arguments, folder: Path) -> list[dict]:
    settings = [
        f"data.max_length={arguments.pack}",
        f"data.batch_size={arguments.rows}",
        "data.shuffle=false",
        f"actor.model_name={arguments.model}",
        "actor.lr=1e-5",
        f"actor.max_length_per_device={arguments.pack * PACKS_PER_STEP}",
        f"actor.gradient_checkpointing={arguments.checkpointing}",
        *arguments.keys,
    ]
    return train_rl2("sft", folder, settings, "tokens/total")


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
    data = Dataset.from_list(read_rows(folder / "rows.jsonl"))
    config = SFTConfig(
        output_dir=str(folder / "trl"),
        max_steps=arguments.steps,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        max_length=arguments.pack,
        packing=True,
        per_device_train_batch_size=arguments.trl_batch,
        gradient_accumulation_steps=PACKS_PER_STEP // arguments.trl_batch,
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
    log = trainer.state.log_history
    totals = [entry["num_tokens"] for entry in log if "num_tokens" in entry]
    steps = [{}]  # the first entry stands for the warm-up
    pairs_of_ends = itertools.pairwise(clock.ends)
    pairs_of_totals = itertools.pairwise(totals)
    for (start, end), (before, after) in zip(pairs_of_ends, pairs_of_totals, strict=False):
        steps.append({"seconds": end - start, "tokens": after - before})
    return steps


def main() -> None:
    parser = make_parser(__doc__, rows=20, pack=1024, steps=4, rounds=2, trl_batch=1)
    parser.add_argument("--checkpointing", default="true", choices=["true", "false"])
    arguments = parser.parse_intermixed_args()
    if arguments.only:
        run = {"trl": run_trl, "rl2": run_rl2}[arguments.only]
        print(json.dumps(run(arguments, arguments.folder)))
        return
    rows = make_rows(arguments.rows * arguments.steps, arguments.data)
    rates = {library: [] for library in arguments.libraries}
    print(
        f"{'round':8}{'':6}{'steps':>6}{'tokens a step':>15}{'seconds a step':>16}{'tokens/s':>10}"
    )
    for i in range(arguments.rounds):
        for library in arguments.libraries:
            steps = measure_steps(library, rows)
            seconds = [step["seconds"] for step in steps]
            tokens = [step["tokens"] for step in steps]
            rate = sum(tokens) / sum(seconds)
            rates[library].append(rate)
            means = f"{statistics.mean(tokens):15.0f}{statistics.mean(seconds):16.1f}"
            print(f"{i + 1:<8}{library:6}{len(steps):6}{means}{rate:10.0f}", flush=True)
    if len(rates) == 2:
        rate_pairs = zip(rates["rl2"], rates["trl"], strict=True)
        ratios = [rl2_rate / trl_rate for rl2_rate, trl_rate in rate_pairs]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"rl2 / trl: {statistics.median(ratios):.2f} ({spread})")


if __name__ == "__main__":
    main()
