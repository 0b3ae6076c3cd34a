"""Checks the engine's contract on the real SGLang, with weights from sharded workers.

test_sglang.py runs this file under torchrun: contract.py MODEL TP_SIZE ACTOR_TP_SIZE
"""

import sys
import time

import psutil
import torch
import torch.distributed as dist
from engine_contract import check_contract, check_no_process_left
from parity import worker_config

from rl2.engine.base import EngineSettings
from rl2.engine.sglang import SGLangEngine
from rl2.parallel.mesh import init_distributed
from rl2.worker import Worker


def close_slowly(engine):
    """Closes the engine while SGLang's watchdog, which looks every second, sees its end."""
    wait = psutil.wait_procs

    def wait_slowly(*args, **kwargs):
        time.sleep(2.5)
        return wait(*args, **kwargs)

    psutil.wait_procs = wait_slowly
    engine.close()
    psutil.wait_procs = wait


def main(name, tp_size, actor_tp_size):
    device = init_distributed()
    others = {child.pid for child in psutil.Process().children(recursive=True)}
    config = worker_config(name, tp_size=int(actor_tp_size), lr=0.05, max_grad_norm=1.0)
    actor = Worker(config, device, num_updates=8)
    settings = EngineSettings(
        model_name=name,
        dtype=torch.float32,
        device=device,
        max_running_requests=16,
        tp_size=int(tp_size),
        gpu_memory_utilization=0.5,
        engine_args={"max_total_tokens": 4096},
        stop=["some"] if dist.get_world_size() == 1 else [],  # SGLang then loads the tokenizer
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
    )
    engine = SGLangEngine(settings)
    assert (engine.index is None) == (dist.get_rank() % int(tp_size) > 0)
    check_contract(engine, settings, actor, "SGLang")
    close_slowly(engine)
    check_no_process_left(others)
    dist.barrier()
    print(f"rank {dist.get_rank()} is done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
