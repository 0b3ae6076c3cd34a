"""Plans the memory of full training, LoRA and QLoRA on one GPU, for docs/gpus.md.

    python tests/memory_fits.py [MODEL ...]      (such as qwen3-8b; all of them take some minutes)

It writes tests/memory_fits.json, from which `python docs/generate.py` makes the page.
test_memory_plan.py compares the file with the plan of today.
"""

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import shapes

from rl2.config.schema import PPOConfig
from rl2.tools.memory import Plan, predict

FILE = Path(__file__).with_name("memory_fits.json")
MODELS = [f"qwen3-{size}" for size in ("0.6b", "1.7b", "4b", "8b", "14b", "32b")]
LENGTH = 4096  # tokens of the longest row, and of a micro-batch
METHODS: dict[str, dict[str, Any]] = {
    "full": {"keep_gathered": False},  # as auto chooses where memory is short
    "lora": {"lora_rank": 32},
    "qlora": {"lora_rank": 32, "quantize_base": "nf4"},
}


def make_plan(model: str, method: str) -> Plan:
    """The plan of GRPO on one GPU with the shape of `model`."""
    config = PPOConfig()
    config.actor.max_length_per_device = LENGTH
    config.actor.gradient_checkpointing = True
    config.data.max_length = LENGTH // 4
    config.rollout.train_sampling_params.max_new_tokens = LENGTH - LENGTH // 4
    for key, value in METHODS[method].items():
        setattr(config.actor, key, value)
    with tempfile.TemporaryDirectory() as folder:
        shapes.make_config(model).save_pretrained(folder)
        config.actor.model_name = folder
        return predict(config, num_gpus=1)


def main(models: list[str]) -> None:
    plans = json.loads(FILE.read_text()) if FILE.exists() else {}
    for model in models:
        for method in METHODS:
            plan = make_plan(model, method)
            plans[f"{model} {method}"] = asdict(plan)
            print(f"{model} {method}: {max(plan.peaks.values()) / 2**30:.1f} GiB", flush=True)
            FILE.write_text(json.dumps(plans, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:] or MODELS)
