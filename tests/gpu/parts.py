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
    "worker": Part("training.py", 100, ("device",)),
    "resume": Part("training.py", 80, ("device",)),
    "head": Part("operators.py", 40, ("device",)),
    "sglang_facts": Part("machine.py", 30, ("facts",)),
    "sglang_contract": Part(
        "engines.py", 300, ("device", "sglang_facts"), "contract", ("sglang", 64)
    ),
    "sglang": Part("engines.py", 300, ("sglang_contract",)),
    "sglang_7b": Part("runs.py", 550, ("sglang_contract", "resume")),
    "sglang_resume": Part("runs.py", 500, ("sglang_contract",)),
    "gsm8k": Part("runs.py", 500, ("device",)),
    "plan": Part("memory.py", 300, ("device",)),
    "local_contract": Part("engines.py", 60, ("device",), "contract", ("local", 16)),
    "local_grpo": Part("runs.py", 90, ("local_contract",)),
    "vllm_contract": Part("engines.py", 300, ("device",), "contract", ("vllm", 64)),
    "ring": Part("runs.py", 90, ("worker",), "two_gpus", ("ring",)),
    "fsdp": Part("runs.py", 90, ("worker",), "two_gpus", ("fsdp",)),
    "hybrid": Part("runs.py", 90, ("worker",), "two_gpus", ("hybrid",)),
    "tensor": Part("runs.py", 90, ("worker",), "two_gpus", ("tensor",)),
    "sglang_two": Part("runs.py", 300, ("sglang_contract", "fsdp")),
}
