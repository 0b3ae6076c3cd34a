"""test_checkpoint.py runs this in several ranks: two updates with a checkpoint between them,
or the second one from the checkpoint.

    moves.py MODEL FOLDER MODE ...    each MODE is save | load | load_hybrid | load_tp
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from parity import make_batch, policy_loss, value_loss, worker_config
from transformers import AutoTokenizer

from rl2.parallel.mesh import init_distributed
from rl2.run.checkpoints import Checkpoints
from rl2.run.weights_hash import hash_states, hash_weights
from rl2.worker import Worker

LAYOUTS = {"hybrid": {"fsdp_size": 1}, "tp": {"tp_size": 2}}
LOSSES = {"actor": policy_loss, "muon": policy_loss, "lora": value_loss}


def make_workers(name, device, layout):
    """Two actors, one of them for Muon, and a critic with adapters."""
    settings = {"lr": 1e-3, "warmup_ratio": 0.5, **layout}
    torch.manual_seed(0)
    actor = worker_config(name, **settings)
    muon = worker_config(name, optimizer="muon", weight_decay=0.1, **settings)
    lora = worker_config(name, lora_rank=2, **settings)
    return {
        "actor": Worker(actor, device, False, 8),
        "muon": Worker(muon, device, False, 8),
        "lora": Worker(lora, device, True, 8),
    }


def update(workers, batch):
    """One update of each worker; what a resumed run must repeat."""
    metrics = {}
    weights = {}
    for role, worker in workers.items():
        result = worker.update(batch, LOSSES[role], with_entropy=LOSSES[role] == policy_loss)
        metrics[role] = result.to_log()
        for name, weight in worker.iter_full_weights(torch.float32):
            weights[role, name] = weight
    return {"metrics": metrics, "weights": weights, "random_numbers": torch.rand(3)}


def export_all(workers, name, folder):
    """Exports into `folder`; returns the weights that the actor's export should hold."""
    actor = workers["actor"]
    tokenizer = AutoTokenizer.from_pretrained(name)
    actor.export(f"{folder}/export", tokenizer)
    workers["lora"].export(f"{folder}/lora", tokenizer)
    actor.dtype = torch.bfloat16  # as if it had computed in it
    actor.export(f"{folder}/export_bf16", tokenizer)
    actor.dtype = torch.float32
    return dict(actor.iter_full_weights(torch.float32))


def move(device, name, folder, mode):
    """The layout behind the underscore of `mode`; fsdp over all processes without one."""
    batch = make_batch()
    workers = make_workers(name, device, LAYOUTS.get(mode.rpartition("_")[2], {}))
    checkpoints = Checkpoints(Path(folder))
    exported = None
    if mode == "save":
        update(workers, batch)
        checkpoints.save(1, workers, {"config.yaml": "config"})
        exported = export_all(workers, name, folder)
    else:
        checkpoints.load(checkpoints.path(1), workers, saved_by=2, hashes={})
    hashes = hash_weights(workers)
    states = {role: worker.state_dict() for role, worker in workers.items()}
    state_hashes = hash_states(workers, states)
    result = update(workers, batch)
    result["hashes"] = hashes  # of the checkpoint
    result["state_hashes"] = state_hashes  # the optimizer's moments among them
    result["exported"] = exported
    result["versions"] = [worker.version for worker in workers.values()]
    if dist.get_rank() == 0:
        torch.save(result, f"{folder}/{mode}_{dist.get_world_size()}")


def main(name, folder, *modes):
    device = init_distributed()
    for mode in modes:
        move(device, name, folder, mode)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
