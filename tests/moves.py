"""Run under torchrun by test_checkpoint.py: two AdamW steps with a checkpoint between them, or the
second one from it."""

import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from parity import SECTION, make_batch, policy_loss, value_loss
from transformers import AutoTokenizer

from rl2.parallel.mesh import init_distributed
from rl2.run_folder import Checkpoints
from rl2.worker import Worker

LAYOUTS = {"hybrid": {"fsdp_size": 1}, "sp": {"sp_size": 2}, "tp": {"tp_size": 2}}


def main(mode, name, folder):
    """`mode` is save or load, with a layout after an underscore if it is not fsdp over all."""
    device, batch = init_distributed(), make_batch()
    layout = LAYOUTS.get(mode.rpartition("_")[2], {})
    changes = {"model_name": name, "lr": 1e-3, "warmup_ratio": 0.5, **layout}
    section = SimpleNamespace(**{**SECTION, **changes})
    torch.manual_seed(0)
    workers = {
        "actor": Worker(section, device, False, 8),
        "critic": Worker(section, device, True, 8),
    }
    if "tp_size" not in layout:
        workers["lora"] = Worker(
            SimpleNamespace(**vars(section) | {"lora_rank": 2}), device, True, 8
        )
    losses = {"actor": policy_loss, "critic": value_loss, "lora": value_loss}
    checkpoints = Checkpoints(folder)

    def step():
        metrics, weights = {}, {}
        for key, worker in workers.items():
            result = worker.update(batch, losses[key], with_entropy=key == "actor")
            metrics[key] = result.to_log()
        for key, worker in workers.items():
            for name, weight in worker.iter_full_weights(torch.float32):
                weights[key, name] = weight
        return {"metrics": metrics, "weights": weights, "random_numbers": torch.rand(3)}

    if mode.startswith("save"):
        step()
        checkpoints.save(1, workers, "config")
        workers["actor"].export(f"{folder}/export", AutoTokenizer.from_pretrained(name))
        workers["lora"].export(f"{folder}/lora", AutoTokenizer.from_pretrained(name))
        workers["actor"].model.export_dtype = torch.bfloat16  # as if the source had been
        workers["actor"].export(f"{folder}/export_bf16", AutoTokenizer.from_pretrained(name))
        exported = dict(workers["actor"].iter_full_weights(torch.float32))
    else:
        assert checkpoints.load(checkpoints.path(1), workers) == 1
        exported = None
    result = {**step(), "exported": exported, "versions": [w.version for w in workers.values()]}
    if dist.get_rank() == 0:
        torch.save(result, f"{folder}/{mode}_{dist.get_world_size()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
