"""test_full_kl.py runs this in several ranks: `full_kl_layouts.py POLICY TEACHER OUT` makes two SGD
updates towards a teacher in every layout of this world size and saves the results to the file OUT.
"""

import sys
from dataclasses import replace

import torch
import torch.distributed as dist
from parity import LARGE_BUDGET, LAYOUTS, SMALL_BUDGET, make_batch, use_sgd, worker_config

from rl2.parallel.mesh import init_distributed
from rl2.worker import Worker


def teacher_loss(batch, scores):
    """Policy gradient and the KL, so that both reach the same weights."""
    kl = (scores.teacher_kl * batch.token_weights).sum()
    loss = kl - (scores.logps * batch.advantages * batch.token_weights).sum()
    return loss, {"teacher_kl": kl.detach()}


def two_steps(policy, teacher, device, **changes):
    """What two updates report, and the weights after them."""
    config = worker_config(policy, **changes)
    worker = Worker(config, device, num_updates=10)
    use_sgd(worker)
    frozen = Worker(replace(config, model_name=teacher), device)
    batch = make_batch()
    updates = [worker.update(batch, teacher_loss, 0.9, teacher=frozen) for _ in range(2)]
    return [update.to_log() for update in updates], dict(worker.iter_full_weights(torch.float32))


def main(policy, teacher, out):
    device = init_distributed()
    results = {}
    for fsdp, sp, tp in LAYOUTS[dist.get_world_size()]:
        for budget in (SMALL_BUDGET, LARGE_BUDGET):
            results[fsdp, sp, tp, budget] = two_steps(
                policy,
                teacher,
                device,
                fsdp_size=fsdp,
                sp_size=sp,
                tp_size=tp,
                max_length_per_device=budget,
                gradient_checkpointing=1 if budget == SMALL_BUDGET else False,
            )
    if dist.get_rank() == 0:
        torch.save(results, out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
