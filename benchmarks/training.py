"""Seconds of one policy update, forward, backward and AdamW step, on group rollouts of uneven
lengths:

    python benchmarks/training.py MODEL [--groups 8] [--samples 8] [--prompt 94] [--shortest 8]
    [--longest 64]

- padded: right-padded rows of the plain Hugging Face model, log_softmax over all logits, bf16
  autocast, as common loops do;
- packed: rl2's worker, every sequence with its own prompt; packed+head is the same work without
  padding;
- shared: rl2's worker as it runs by default, each group's prompt once.
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
    rng, samples = random.Random(0), []
    for group in range(arguments.groups):
        prompt = [rng.randrange(5, 1000) for _ in range(arguments.prompt)]
        for _ in range(arguments.samples):
            answer = [
                rng.randrange(5, 1000)
                for _ in range(rng.randint(arguments.shortest, arguments.longest))
            ]
            tokens = prompt + answer
            mask = [0] * len(prompt) + [1] * len(answer)
            samples.append(
                Sample(tokens, mask, [0.0] * len(tokens), [0.0] * len(tokens), group, len(samples))
            )
    batch = collate(samples)
    batch.token_weights = batch.mask / batch.mask.sum()
    return batch


def make_padded(arguments, batch, device, dtype):
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
    more = {
        "model_name": arguments.model,
        "share_prompts": share,
        "max_length_per_device": arguments.budget,
    }
    worker = Worker(SimpleNamespace(**SECTION, **more), device, num_updates=100)
    return lambda: worker.update(
        batch, lambda part, scores: ((scores.logps * part.token_weights).sum(), {})
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    for name, default in (
        ("groups", 8),
        ("samples", 8),
        ("prompt", 94),
        ("shortest", 8),
        ("longest", 64),
        ("budget", 4096),
        ("repeats", 3),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    device, batch = init_distributed(), make_batch(arguments)
    useful = int(pack(batch, share_prompts=False).tokens.numel())
    print(
        f"{len(batch.inputs)} sequences: {batch.inputs.numel()} padded, {useful} packed, "
        f"{pack(batch).tokens.numel()} shared"
    )
    steps = {
        "padded": make_padded(arguments, batch, device, compute_dtype("auto", device)),
        "packed": make_worker(arguments, batch, device, share=False),
        "shared": make_worker(arguments, batch, device, share=True),
    }
    seconds = {name: [] for name in steps}
    for repeat in range(
        arguments.repeats + 1
    ):  # in turn, since machines drift; the first round warms up
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    middle = {name: statistics.median(times) for name, times in seconds.items()}
    for name, time_ in middle.items():
        print(
            f"{name:7} {time_:6.2f} s  {useful / time_:7.0f} sequence tokens/s  "
            f"x{middle['padded'] / time_:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
