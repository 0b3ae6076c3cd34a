"""The parts of tests/gpu: where each one is, how long it may take, and which ones it needs.

They run in this order, so that what a short loan of a machine should tell comes first.
"""

from dataclasses import dataclass
from typing import Any


@dataclass
class Part:
    file: str  # in the folder of this file
    limit: int  # seconds
    needs: tuple[str, ...] = ()  # parts without which this one tells nothing
    function: str = ""  # in the file; "": of the name of the part
    arguments: tuple[Any, ...] = ()  # of the function, as JSON has them


PARTS = {
    "facts": Part("machine.py", 60),
    "device": Part("machine.py", 40, ("facts",)),
    "attention": Part("operators.py", 60, ("device",)),
    "worker": Part("training.py", 40, ("device",)),
    "offload": Part("training.py", 50, ("device",)),
    "resume": Part("training.py", 80, ("device",)),
    "head": Part("operators.py", 40, ("device",)),
    "utilisation_8k": Part("training.py", 80, ("device",), "utilisation", (8192, 4)),
    "sglang_facts": Part("machine.py", 30, ("facts",)),
    "sglang_contract": Part("engines.py", 250, ("device", "sglang_facts")),
    "sglang": Part("engines.py", 250, ("sglang_contract",)),
    "sglang_7b": Part("runs.py", 340, ("sglang_contract", "offload")),
    "sglang_grpo": Part("runs.py", 180, ("sglang_contract",)),
    "sglang_resume": Part("runs.py", 180, ("sglang_contract",)),
    "sglang_cycles": Part("engines.py", 110, ("sglang_contract",)),
    "variants_8k": Part("training.py", 140, ("utilisation_8k",)),
    "plan": Part("memory.py", 90, ("utilisation_8k",)),
    "local_contract": Part("engines.py", 60, ("device",)),
    "local_grpo": Part("runs.py", 90, ("local_contract",)),
    "vllm_contract": Part("engines.py", 250, ("device",)),
    "ring": Part("runs.py", 90, ("worker",), "two_gpus", ("ring",)),
    "fsdp": Part("runs.py", 90, ("worker",), "two_gpus", ("fsdp",)),
    "hybrid": Part("runs.py", 90, ("worker",), "two_gpus", ("hybrid",)),
    "tensor": Part("runs.py", 90, ("worker",), "two_gpus", ("tensor",)),
    "sglang_two": Part("runs.py", 160, ("sglang_contract", "fsdp")),
}
