"""The memory that a job is predicted to need. tools/plan.py makes the prediction; a job on GPUs
has it made by a process of its own.
"""

import json
import os
import pickle
import subprocess
import sys
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig

from rl2.parallel.device import GIB
from rl2.parallel.mesh import broadcast_object
from rl2.parallel.rank import is_first_rank
from rl2.progress import expecting

# The rest of a GPU is for CUDA's contexts, NCCL, an engine that sleeps, and fragmentation.
USABLE_SHARE = 0.85
SECONDS_TO_PLAN = 600.0  # half a minute for a 7B model on an idle machine


@dataclass
class Plan:
    """Bytes of tensors on rank 0's GPU, the fullest one. An engine's own memory is not counted."""

    # The most in each phase: load, infer, update, step, sync or save.
    peaks: dict[str, int] = field(default_factory=dict)
    loaded: int = 0  # after loading, when an engine starts
    steady: int = 0  # between steps, while an engine generates
    engine_weights: int = 0  # of the engine's own weights, on each of its GPUs

    @property
    def peak(self) -> int:
        """The most in any phase."""
        return max(self.peaks.values())

    @property
    def sync(self) -> int:
        """The most while weights are sent to the engine."""
        return self.peaks.get("sync", 0)


class Prediction:
    """The plan of this job, which another process makes meanwhile on the CPU.

    It takes half a minute for a 7B model. Only the first rank of a job on GPUs starts the process;
    elsewhere there is no plan. `config` is that of the trainer. An evaluation has no trainer's
    tensors, so its plan is 0.
    """

    def __init__(self, config: Any, world_size: int):
        self.process: subprocess.Popen[bytes] | None = None
        self.made: Plan | None = None
        if config.trainer.eval_only:
            self.made = Plan({"rollout": 0})
        elif torch.cuda.is_available() and is_first_rank():
            self.process = start_process(config, world_size)

    def plan(self, wait: bool = False) -> Plan | None:
        """Returns the plan; None while it is being made, and where it could not be made."""
        if self.process is not None and (wait or self.process.poll() is not None):
            self.made = read_plan(self.process)
            self.process = None
        return self.made


def start_process(config: Any, num_gpus: int) -> "subprocess.Popen[bytes]":
    """Starts a process that makes the plan, without GPUs and without our process group."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rl2.tools.plan"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        start_new_session=True,  # Ctrl-C is for the trainer
    )
    assert process.stdin is not None
    process.stdin.write(pickle.dumps((config, num_gpus)))
    process.stdin.close()
    process.stdin = None
    return process


def read_plan(process: "subprocess.Popen[bytes]") -> Plan | None:
    """Waits for the process. None if it failed, after printing its last line."""
    with expecting(SECONDS_TO_PLAN):
        output, errors = process.communicate()
    if process.returncode:
        reason = (errors.decode().strip() or "it was killed").splitlines()[-1]
        print(f"the memory plan could not be made: {reason}", flush=True)
        return None
    return Plan(**json.loads(output.decode().splitlines()[-1]))


def write_plan(plan: Plan) -> None:
    """Prints the plan for `read_plan`."""
    print(json.dumps(asdict(plan)), flush=True)


def choose_checkpointing(config: Any) -> Any:
    """Returns the trainer's config with a number of layers for each gradient_checkpointing=auto.

    Rank 0 predicts, and all processes must call. Without a GPU the config stays as it is.
    """
    if not torch.cuda.is_available() or not automatic_sections(config):
        return config
    number = None
    if is_first_rank():
        gpu_bytes = torch.cuda.mem_get_info()[1]
        number = recomputed_layers(config, dist.get_world_size(), gpu_bytes)
    return with_checkpointing(config, broadcast_object(number))


def recomputed_layers(config: Any, num_gpus: int, gpu_bytes: int) -> int | bool:
    """Returns how many layers must be recomputed so that an update fits; True if there is no plan.

    Two plans are made, in which all layers and none are recomputed. The peak is convex in the
    number of layers, so the line between the two is not below it.
    """
    name = next(section.model_name for section in automatic_sections(config))
    num_layers = AutoConfig.from_pretrained(name).get_text_config().num_hidden_layers
    processes = [start_process(with_checkpointing(config, x), num_gpus) for x in (True, False)]
    plans = [plan for plan in map(read_plan, processes) if plan is not None]
    if len(plans) < len(processes):
        return True
    least, most = (plan.peaks["update"] for plan in plans)
    usable = USABLE_SHARE * gpu_bytes
    kept = int(num_layers * min(1.0, max(0.0, (usable - least) / max(1, most - least))))
    print(
        f"gradient_checkpointing=auto: {num_layers - kept} of {num_layers} layers are recomputed; "
        f"an update is predicted to need {least / GIB:.1f} GiB if all are and {most / GIB:.1f} if "
        f"none is, and {usable / GIB:.1f} are usable",
        flush=True,
    )
    return num_layers - kept


def automatic_sections(config: Any) -> list[Any]:
    """Returns the sections of workers whose gradient_checkpointing is auto."""
    return [
        section
        for section in vars(config).values()
        if getattr(section, "gradient_checkpointing", None) == "auto"
    ]


def with_checkpointing(config: Any, value: bool | int) -> Any:
    """Returns a copy of the config with this value instead of auto."""
    config = deepcopy(config)
    for section in automatic_sections(config):
        section.gradient_checkpointing = value
    return config
