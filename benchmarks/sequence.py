"""Seconds and activation memory of ring attention with 1 and with 2 processes.

    python benchmarks/sequence.py [--lengths 8192 16384] [--layers 6] [--repeats 2]

Measures one update on one long sequence. Each process has one thread. The model is a random Llama
with the width of SmolLM2-135M. The memory is the growth of the process's peak in its first long
step.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace

import torch

SECTION = {
    "fsdp_size": 0,
    "tp_size": 1,
    "dtype": "auto",
    "gradient_checkpointing": False,
    "max_inference_length_per_device": None,
    "share_prompts": True,
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


def measure(arguments) -> None:
    import torch.distributed as dist

    from rl2.batch import Sample, collate
    from rl2.parallel.mesh import init_distributed
    from rl2.worker import Worker

    device = init_distributed()
    section = SimpleNamespace(
        **SECTION,
        model_name=arguments.model,
        sp_size=dist.get_world_size(),
        max_length_per_device=arguments.lengths[0],
    )
    worker = Worker(section, device, num_updates=100)

    def step(length):
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, 1000, (length + 1,), generator=generator).tolist()
        zeros = [0.0] * (length + 1)
        batch = collate([Sample(tokens, [0] + [1] * length, zeros, zeros, 0, 0)])
        batch.token_weights = batch.mask / batch.mask.sum()
        dist.barrier()
        start = time.perf_counter()
        worker.update(batch, lambda part, scores: ((scores.logps * part.token_weights).sum(), {}))
        return time.perf_counter() - start

    step(64)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step(arguments.lengths[0])
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10
    seconds = statistics.median(step(arguments.lengths[0]) for _ in range(arguments.repeats))
    if dist.get_rank() == 0:
        print(json.dumps({"seconds": seconds, "mib": memory}), flush=True)
    dist.destroy_process_group()


def launch(sp_size: int, length: int, repeats: int, model: str) -> dict:
    """Run `measure` with `sp_size` processes. Returns the seconds and the memory in MiB."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={sp_size}",
        __file__,
        f"--lengths={length}",
        f"--repeats={repeats}",
        f"--model={model}",
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env=env)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.model:
        return measure(arguments)
    from transformers import AutoModelForCausalLM, LlamaConfig

    with tempfile.TemporaryDirectory() as folder:
        config = LlamaConfig(
            vocab_size=8192,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=arguments.layers,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=2**17,
            tie_word_embeddings=True,
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        for length in arguments.lengths:
            results = {}
            for sp_size in (1, 2):
                result = launch(sp_size, length, arguments.repeats, folder)
                results[sp_size] = result
                print(
                    f"{length} tokens, sp_size={sp_size}: {result['seconds']:.1f} s, "
                    f"{result['mib']:.0f} MiB",
                    flush=True,
                )
            speedup = results[1]["seconds"] / results[2]["seconds"]
            memory = results[2]["mib"] / results[1]["mib"]
            print(
                f"{length} tokens: {speedup:.2f}x as fast, {memory:.2f} of the memory", flush=True
            )


if __name__ == "__main__":
    main()
