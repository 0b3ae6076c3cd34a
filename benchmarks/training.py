"""Seconds of one policy update (forward, backward, AdamW step) on groups of answers of uneven
lengths.

    python benchmarks/training.py MODEL [--groups 8] [--samples 8] [--prompt 94] [--shortest 8]
                                  [--longest 64] [--budget 4096] [--repeats 3] [--only KIND]

- padded: right-padded rows of the plain Hugging Face model, log_softmax over all logits, bf16
  autocast, as common loops do
- packed: rl2's worker, where every sequence has its own prompt
- shared: rl2's worker as it runs by default, with each group's prompt once

--only measures one of them, and says how much memory the process had at its peak: on a GPU what
torch allocated, else all of it.
"""

import argparse
import random
import resource
import statistics
import time
from functools import partial

import torch
from transformers import AutoModelForCausalLM

from rl2.batch import Batch, Sample, collate
from rl2.config.schema import WorkerConfig
from rl2.packing import pack
from rl2.parallel.mesh import init_distributed
from rl2.worker import Worker, compute_dtype

LEARNING_RATE = 1e-6


def make_batch(arguments) -> Batch:
    rng = random.Random(0)

    def random_tokens(length):
        return [rng.randrange(5, 1000) for _ in range(length)]

    samples = []
    for group in range(arguments.groups):
        prompt = random_tokens(arguments.prompt)
        for _ in range(arguments.samples):
            answer = random_tokens(rng.randint(arguments.shortest, arguments.longest))
            tokens = prompt + answer
            mask = [0] * len(prompt) + [1] * len(answer)
            zeros = [0.0] * len(tokens)
            samples.append(Sample(tokens, mask, zeros, zeros, group, len(samples)))
    batch = collate(samples)
    batch.token_weights = batch.mask / batch.mask.sum()
    return batch


def make_padded_step(arguments, batch, device):
    """A function that makes one update of the plain model."""
    dtype = compute_dtype("auto", device)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True
    )
    inputs, targets = batch.inputs.to(device), batch.targets.to(device)
    weights = batch.token_weights.to(device)

    def step():
        num_rows = max(1, arguments.budget // inputs.shape[1])
        for start in range(0, len(inputs), num_rows):
            rows = slice(start, start + num_rows)
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                logits = model(input_ids=inputs[rows], use_cache=False).logits
            logps = logits.float().log_softmax(-1).gather(2, targets[rows, :, None].long())[..., 0]
            (logps * weights[rows]).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def weighted_logps(batch, scores):
    return (scores.logps * batch.token_weights).sum(), {}


def make_worker_step(arguments, batch, device, share_prompts):
    """A function that makes one update of rl2's worker."""
    config = WorkerConfig(
        model_name=arguments.model,
        gradient_checkpointing=False,
        max_length_per_device=arguments.budget,
        share_prompts=share_prompts,
        lr=LEARNING_RATE,
    )
    worker = Worker(config, device, num_updates=100)
    return lambda: worker.update(batch, weighted_logps)


def peak_memory(device: torch.device) -> float:
    """MiB of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8, help="answers of a group")
    parser.add_argument("--prompt", type=int, default=94, help="tokens of a prompt")
    parser.add_argument("--shortest", type=int, default=8, help="tokens of the shortest answer")
    parser.add_argument("--longest", type=int, default=64, help="tokens of the longest answer")
    parser.add_argument("--budget", type=int, default=4096, help="tokens of a micro-batch")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=("padded", "packed", "shared"))
    arguments = parser.parse_args()
    device = init_distributed()
    batch = make_batch(arguments)
    num_packed = pack(batch, share_prompts=False).tokens.numel()
    print(
        f"{len(batch.inputs)} sequences: {batch.inputs.numel()} padded, {num_packed} packed, "
        f"{pack(batch).tokens.numel()} shared"
    )
    makers = {
        "padded": make_padded_step,
        "packed": partial(make_worker_step, share_prompts=False),
        "shared": partial(make_worker_step, share_prompts=True),
    }
    steps = {}
    for name, make in makers.items():
        if arguments.only in (None, name):
            steps[name] = make(arguments, batch, device)
    seconds = {name: [] for name in steps}
    # In turn, since machines drift. The first round warms up.
    for repeat in range(arguments.repeats + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if repeat > 0:
                seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, median in medians.items():
        line = f"{name:7} {median:6.2f} s  {num_packed / median:7.0f} sequence tokens/s"
        if arguments.only:
            print(f"{line}  {peak_memory(device):.0f} MiB")
        else:
            print(f"{line}  x{medians['padded'] / median:.2f}", flush=True)


if __name__ == "__main__":
    main()
