"""Ring attention: seconds and activation memory of one update on one long sequence that 1 or 2
processes of one thread each share.

    python benchmarks/sequence.py [--lengths 8192 16384] [--layers 6] [--repeats 2]

The model is a random Llama of SmolLM2-135M's width. The memory is what the process's peak grows by
in its first long step.
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

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

from rl2.batch import Batch, Sample, collate
from rl2.config.schema import WorkerConfig
from rl2.parallel.mesh import init_distributed
from rl2.worker import Worker


def make_batch(length: int) -> Batch:
    """One sequence of `length` scored tokens."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 1000, (length + 1,), generator=generator).tolist()
    zeros = [0.0] * (length + 1)
    batch = collate([Sample(tokens, [0] + [1] * length, zeros, zeros, 0, 0)])
    batch.token_weights = batch.mask / batch.mask.sum()
    return batch


def weighted_logps(batch, scores):
    return (scores.logps * batch.token_weights).sum(), {}


def peak_memory_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(model: str, length: int, repeats: int) -> None:
    """Runs in each process under torchrun; rank 0 prints seconds and MiB as JSON."""
    device = init_distributed()
    config = WorkerConfig(
        model_name=model,
        gradient_checkpointing=False,
        max_length_per_device=length,
        sp_size=dist.get_world_size(),
    )
    worker = Worker(config, device, num_updates=100)

    def update_seconds(num_tokens):
        batch = make_batch(num_tokens)
        dist.barrier()
        start = time.perf_counter()
        worker.update(batch, weighted_logps)
        return time.perf_counter() - start

    update_seconds(64)
    before = peak_memory_kib()
    update_seconds(length)
    mib = (peak_memory_kib() - before) / 2**10
    seconds = statistics.median(update_seconds(length) for _ in range(repeats))
    if dist.get_rank() == 0:
        print(json.dumps({"seconds": seconds, "mib": mib}), flush=True)
    dist.destroy_process_group()


def measure_with(num_processes: int, model: str, length: int, repeats: int) -> dict[str, float]:
    """`measure` in a launch of its own."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={num_processes}", __file__, "--model", model]
    command += ["--lengths", str(length), "--repeats", str(repeats)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env=env)
    return json.loads(done.stdout.splitlines()[-1])


def make_model(folder: str, num_layers: int) -> None:
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=num_layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2**17,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


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
        measure(arguments.model, arguments.lengths[0], arguments.repeats)
        return
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder, arguments.layers)
        for length in arguments.lengths:
            results = {}
            for size in (1, 2):
                results[size] = measure_with(size, folder, length, arguments.repeats)
                print(
                    f"{length} tokens, sp_size={size}: {results[size]['seconds']:.1f} s, "
                    f"{results[size]['mib']:.0f} MiB",
                    flush=True,
                )
            speed_up = results[1]["seconds"] / results[2]["seconds"]
            memory = results[2]["mib"] / results[1]["mib"]
            print(f"{length} tokens: {speed_up:.2f}x as fast, {memory:.2f} of the memory")


if __name__ == "__main__":
    main()
