"""Ring attention: seconds and activation memory of one update on one long sequence, shared by 1 or
by 2 processes of one thread each.

    python benchmarks/sequence.py [--lengths 8192 16384] [--layers 6] [--repeats 2]

The model is a random Llama of SmolLM2-135M's width. Memory is what the process's peak grows by in
its first long step."""

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
            found = {}
            for size in (1, 2):
                command = [
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--standalone",
                    f"--nproc_per_node={size}",
                ]
                command += [
                    __file__,
                    "--lengths",
                    str(length),
                    "--repeats",
                    str(arguments.repeats),
                    "--model",
                    folder,
                ]
                env = {**os.environ, "OMP_NUM_THREADS": "1"}
                out = subprocess.run(
                    command, stdout=subprocess.PIPE, check=True, text=True, env=env
                ).stdout
                found[size] = json.loads(out.splitlines()[-1])
                print(
                    f"{length} tokens, sp_size={size}: {found[size]['seconds']:.1f} s, "
                    f"{found[size]['mib']:.0f} MiB",
                    flush=True,
                )
            ratio = {key: found[2][key] / found[1][key] for key in found[1]}
            print(
                f"{length} tokens: {1 / ratio['seconds']:.2f}x as fast, {ratio['mib']:.2f} of "
                f"the memory",
                flush=True,
            )


if __name__ == "__main__":
    main()
