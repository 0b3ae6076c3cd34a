"""Checks the engine's contract on the real vLLM, with weights from sharded workers.

test_vllm.py runs this file under torchrun: contract.py MODEL
"""

import sys

import torch
import torch.distributed as dist
from engine_contract import check_contract
from parity import worker_config

from rl2.engine.base import EngineSettings
from rl2.engine.vllm import VLLMEngine
from rl2.parallel.mesh import init_distributed
from rl2.worker import Worker


def main(name):
    device = init_distributed()
    actor = Worker(worker_config(name, lr=0.05, max_grad_norm=1.0), device, num_updates=8)
    settings = EngineSettings(
        model_name=name,
        dtype=torch.float32,
        device=device,
        max_running_requests=16,
        stop=["some"],
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
    )
    engine = VLLMEngine(settings)
    assert (engine.index, engine.count) == (dist.get_rank(), dist.get_world_size())
    check_contract(engine, settings, actor, "vLLM")
    engine.close()
    dist.barrier()  # the trainer's group is still there
    print(f"rank {dist.get_rank()} is done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
