"""Predicts the GiB on each GPU by phase, of GRPO with Qwen's shapes: measured.md, docs/gpus.md.

    python benchmarks/lab/memory_table.py 0.6b 1.5b 7b 32b --gpus 1 2 8 64 [key=value ...]

It needs no GPU and no network: a shape becomes a config.json. The keys are those of the actor.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import yaml

from rl2.config.schema import PPOConfig
from rl2.parallel.device import GIB
from rl2.tools.plan import predict

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
import shapes  # noqa: E402

MODELS = {
    "0.6b": "qwen3-0.6b",
    "1.5b": "qwen2.5-1.5b",
    "7b": "qwen2.5-7b",
    "32b": "qwen2.5-32b",
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
            shapes.make_config(MODELS[shape]).save_pretrained(folder)
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
