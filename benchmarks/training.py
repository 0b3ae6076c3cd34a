"""Seconds of one policy update on groups of answers with uneven lengths.

    python benchmarks/training.py MODEL [--groups 8] [--samples 8] [--prompt 94] [--shortest 8]
        [--longest 64]

An update is the forward, the backward and the AdamW step.

- padded: the plain Hugging Face model on right-padded rows, with log_softmax over all logits and
  bf16 autocast, as in common training loops.
- packed: rl2's worker without padding. Every sequence has its own prompt.
- shared: rl2's worker with its defaults. The prompt of a group runs once.
"""

import argparse
import random
import statistics
import time
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM

from rl2.batch import Sample, collate
from rl2.packing import pack
from rl2.parallel.mesh import init_distributed
from rl2.worker import Worker, compute_dtype

SECTION = {
    "fsdp_size": 0,
    "sp_size": 1,
    "tp_size": 1,
    "dtype": "auto",
    "gradient_checkpointing": False,
    "max_inference_length_per_device": None,
    "lr": 1e-6,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "warmup_ratio": 0.0,
    "scheduler": "constant",
    "offload_model": False,
    "offload_optimizer": False,
    "optimizer_dir": None,
    "lora_rank": 0,
}


def make_batch(arguments):
    rng = random.Random(0)
    samples = []
    for group in range(arguments.groups):
        prompt = [rng.randrange(5, 1000) for _ in range(arguments.prompt)]
        for _ in range(arguments.samples):
            length = rng.randint(arguments.shortest, arguments.longest)
            answer = [rng.randrange(5, 1000) for _ in range(length)]
            tokens = prompt + answer
            mask = [0] * len(prompt) + [1] * len(answer)
            zeros = [0.0] * len(tokens)
            samples.append(Sample(tokens, mask, zeros, zeros, group, len(samples)))
    batch = collate(samples)
    batch.token_weights = batch.mask / batch.mask.sum()
    return batch


def make_padded(arguments, batch, device, dtype):
    """A function that runs one update of the plain model on padded rows."""
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    batch = SimpleNamespace(**{k: v.to(device) for k, v in vars(batch).items() if v is not None})

    def step():
        rows = max(1, arguments.budget // batch.inputs.shape[1])
        for start in range(0, len(batch.inputs), rows):
            part = slice(start, start + rows)
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                logits = model(input_ids=batch.inputs[part], use_cache=False).logits
            logps = logits.float().log_softmax(-1).gather(2, batch.targets[part, :, None])[..., 0]
            (logps * batch.token_weights[part]).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def make_worker(arguments, batch, device, share):
    """A function that runs one update of a worker."""
    section = SimpleNamespace(
        **SECTION,
        model_name=arguments.model,
        share_prompts=share,
        max_length_per_device=arguments.budget,
    )
    worker = Worker(section, device, num_updates=100)

    def loss_fn(part, scores):
        return (scores.logps * part.token_weights).sum(), {}

    return lambda: worker.update(batch, loss_fn)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=94)
    parser.add_argument("--shortest", type=int, default=8)
    parser.add_argument("--longest", type=int, default=64)
    parser.add_argument("--budget", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    device = init_distributed()
    batch = make_batch(arguments)
    num_tokens = pack(batch, share_prompts=False).tokens.numel()
    print(
        f"{len(batch.inputs)} sequences: {batch.inputs.numel()} padded, {num_tokens} packed, "
        f"{pack(batch).tokens.numel()} shared"
    )
    steps = {
        "padded": make_padded(arguments, batch, device, compute_dtype("auto", device)),
        "packed": make_worker(arguments, batch, device, share=False),
        "shared": make_worker(arguments, batch, device, share=True),
    }
    seconds = {name: [] for name in steps}
    # The variants take turns, since the speed of a machine drifts. The first round is a warm-up.
    for repeat in range(arguments.repeats + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, median in medians.items():
        print(
            f"{name:7} {median:6.2f} s  {num_tokens / median:7.0f} sequence tokens/s  "
            f"x{medians['padded'] / median:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
