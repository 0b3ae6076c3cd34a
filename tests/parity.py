"""Run under torchrun by test_worker.py: two SGD steps of every layout of this world size, saved to
a file."""

import sys
from itertools import product
from types import SimpleNamespace

import torch
import torch.distributed as dist
from common import make_samples

from rl2.batch import collate
from rl2.parallel.mesh import init_distributed
from rl2.worker import Worker

SECTION = {
    "fsdp_size": 0,
    "sp_size": 1,
    "tp_size": 1,
    "dtype": "float32",
    "gradient_checkpointing": False,
    "max_length_per_device": 4096,
    "max_inference_length_per_device": None,
    "share_prompts": True,
    "lr": 0.1,
    "weight_decay": 0.0,
    "max_grad_norm": 0.05,
    "warmup_ratio": 0.0,
    "scheduler": "constant",
    "offload_model": False,
    "offload_optimizer": False,
    "optimizer_dir": None,
    "lora_rank": 0,
    "lora_alpha": None,
    "lora_targets": [],
}
# World size -> (fsdp_size, sp_size, tp_size): every pure layout, the hybrid one, and mixes.
LAYOUTS = {
    1: [(0, 1, 1)],
    2: [(0, 1, 1), (1, 1, 1), (0, 2, 1), (1, 2, 1), (0, 1, 2)],
    3: [(0, 1, 1), (0, 3, 1)],
    4: [
        (0, 1, 1),
        (2, 1, 1),
        (0, 4, 1),
        (0, 2, 1),
        (2, 2, 1),
        (1, 4, 1),
        (0, 1, 2),
        (0, 2, 2),
        (1, 2, 2),
        (1, 1, 2),
    ],
}
# The same with adapters: (fsdp_size, sp_size). Over 3 processes the rows of rank 3 are one each,
# over 4 one has none.
ADAPTED = {1: [(0, 1)], 2: [(0, 1), (1, 1), (0, 2), (1, 2)], 3: [(0, 1)], 4: [(0, 1), (2, 2)]}


def make_batch():
    batch = collate(make_samples(seed=1, num_groups=3, group_size=3))
    torch.manual_seed(0)
    batch.advantages = torch.randn(batch.mask.shape) * batch.mask
    batch.token_weights = batch.mask / batch.mask.sum()
    return batch


def policy_loss(batch, scores):
    loss = -((scores.logps * batch.advantages + 0.1 * scores.entropy) * batch.token_weights).sum()
    return loss, {"entropy": (scores.entropy * batch.token_weights).sum().detach()}


def value_loss(batch, scores):
    return ((scores.values - batch.advantages).square() * batch.token_weights).sum(), {}


def two_steps(name, critic, device, batch, **changes):
    """The weights in the result are named as Hugging Face does, what is `drawn` at the start as
    peft does."""
    section = SimpleNamespace(
        **{**SECTION, "model_name": f"{name}-critic" if critic else name, **changes}
    )
    torch.manual_seed(0)
    worker = Worker(section, device, critic, num_updates=10)
    worker.optimizer = torch.optim.SGD(
        [{"params": [p]} for p in worker.model.parameters()], lr=section.lr
    )
    drawn = {
        key: p.detach().full_tensor().clone()
        for key, p in worker.trained_parameters.items()
        if section.lora_rank
    }
    before = worker.infer(batch, 0.9, with_entropy=not critic)
    loss = value_loss if critic else policy_loss
    metrics = [worker.update(batch, loss, 0.9, with_entropy=not critic).to_log() for _ in range(2)]
    weights = dict(worker.iter_full_weights(torch.float32))
    return {
        "scores": vars(before),
        "metrics": metrics,
        "weights": weights,
        "version": worker.version,
        "drawn": drawn,
    }


def main(name, out):
    device = init_distributed()
    batch, results = make_batch(), {}
    layouts = LAYOUTS[dist.get_world_size()]
    budgets = [60, 4096] if dist.get_world_size() < 4 else [60]
    for critic, share, budget, layout in product([False, True], [True, False], budgets, layouts):
        fsdp, sp, tp = layout
        results[critic, share, budget, layout] = two_steps(
            name,
            critic,
            device,
            batch,
            share_prompts=share,
            max_length_per_device=budget,
            fsdp_size=fsdp,
            sp_size=sp,
            tp_size=tp,
            gradient_checkpointing=budget < 100,
        )
    for critic, (fsdp, sp) in product([False, True], ADAPTED[dist.get_world_size()]):
        results[critic, "lora", (fsdp, sp)] = two_steps(
            name,
            critic,
            device,
            batch,
            max_length_per_device=60,
            fsdp_size=fsdp,
            sp_size=sp,
            gradient_checkpointing=True,
            lora_rank=3,
            lora_alpha=5.0,
        )
    if dist.get_rank() == 0:
        torch.save(results, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
