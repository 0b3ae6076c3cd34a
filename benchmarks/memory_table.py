"""The table of docs/memory.md: predicted GiB on each GPU by phase, of GRPO with Qwen's shapes.

    python benchmarks/memory_table.py 0.6b 1.5b 7b 32b --gpus 1 2 8 64 [key=value ...]

It needs no GPU and no network: a shape becomes a config.json. The keys are those of the actor.
"""

import argparse
import tempfile
import time
from pathlib import Path

import yaml
from transformers import Qwen2Config, Qwen3Config

from rl2.commands.plan import predict
from rl2.config.schema import PPOConfig
from rl2.memory_plan import GIB

COMMON = {"max_position_embeddings": 40960, "dtype": "bfloat16"}
SHAPES = {
    "0.6b": Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=True,
        **COMMON,
    ),
    "1.5b": Qwen2Config(
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        vocab_size=151936,
        tie_word_embeddings=True,
        **COMMON,
    ),
    "7b": Qwen2Config(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
        tie_word_embeddings=False,
        **COMMON,
    ),
    "32b": Qwen2Config(
        hidden_size=5120,
        intermediate_size=27648,
        num_hidden_layers=64,
        num_attention_heads=40,
        num_key_value_heads=8,
        vocab_size=152064,
        tie_word_embeddings=False,
        **COMMON,
    ),
}
PHASES = ("load", "infer", "update", "step", "steady", "sync")


def make_config(folder: str, keys: dict) -> PPOConfig:
    """GRPO with full micro-batches of 8,192 tokens; two updates a rollout, so that it infers."""
    config = PPOConfig()
    config.actor.model_name = folder
    config.actor.update_per_rollout = 2
    config.data.prompts_per_rollout = 128
    config.rollout.train_sampling_params.max_new_tokens = 7168
    for key, value in keys.items():
        setattr(config.actor, key, value)
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="+", metavar="shape | key=value")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 8, 64])
    arguments = parser.parse_args()
    keys = dict(word.split("=") for word in arguments.words if "=" in word)
    keys = {key: yaml.safe_load(value) for key, value in keys.items()}
    print(f"| model | GPUs | {' | '.join(PHASES)} | seconds |")
    for shape in [word for word in arguments.words if "=" not in word]:
        with tempfile.TemporaryDirectory() as folder:
            SHAPES[shape].save_pretrained(Path(folder))
            for num_gpus in arguments.gpus:
                start = time.perf_counter()
                plan = predict(make_config(folder, keys), num_gpus)
                seconds = time.perf_counter() - start
                sizes = {**plan.peaks, "steady": plan.steady}
                numbers = [f"{sizes[phase] / GIB:.1f}" for phase in PHASES]
                print(
                    f"| {shape} | {num_gpus} | {' | '.join(numbers)} | {seconds:.0f} |", flush=True
                )


if __name__ == "__main__":
    main()
