"""What the host does in an update: calls of Python and kernels, per layer and micro-batch.

    [torchrun --nproc_per_node=2] python benchmarks/host_work.py [key=value ...]

The keys are those of an actor, such as gradient_checkpointing=false. The model is a random Llama of
30 narrow layers in bf16. Calls are those that cProfile counts, kernels the operators of torch that
are no views. Attention is one operator forward and one backward, as on a GPU. Counts repeat
exactly; they do not depend on the processor. With compile=true the kernels are still those of eager
mode, in which they are counted.
"""

import collections
import cProfile
import pstats
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig

from rl2.attention import ring
from rl2.batch import Sample, collate
from rl2.config.schema import WorkerConfig
from rl2.parallel.mesh import broadcast_object, init_distributed
from rl2.worker import Worker

LAYERS, MICRO_BATCHES, ROWS, LENGTH = 30, 4, 4, 17
WITHOUT_KERNELS = set(
    "alias as_strided chunk detach empty empty_like empty_strided expand is_pinned lift_fresh "
    "narrow new_empty permute reshape resize_ select slice split split_with_sizes squeeze t "
    "transpose unbind unfold unsqueeze view view_as _local_scalar_dense _reshape_alias "
    "_unsafe_view".split()
)
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Kernels(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.counts[name] += name not in WITHOUT_KERNELS
        return func(*args, **(kwargs or {}))


def heads_first(tensor):
    return tensor.transpose(0, 1)[None]


def forward_block(q, k, v, block, scale):
    out, lse = flash(*map(heads_first, (q, k, v)), 0.0, True, scale=scale)
    return out[0].transpose(0, 1), lse[0].T


def backward_block(d_out, q, k, v, out, lse, block, scale):
    tensors = [*map(heads_first, (d_out, q, k, v, out)), lse.T.contiguous()[None]]
    gradients = flash_backward(*tensors, 0.0, True, scale=scale)
    return tuple(gradient[0].transpose(0, 1) for gradient in gradients)


def weighted_logps(batch, scores):
    return (scores.logps * batch.token_weights).sum(), {}


def main() -> None:
    torch.set_num_threads(1)
    device = init_distributed()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    settings = {"dtype": "bfloat16", "max_length_per_device": ROWS * (LENGTH - 1)}
    settings["gradient_checkpointing"] = True
    settings |= OmegaConf.to_container(OmegaConf.from_dotlist(sys.argv[1:]))
    with tempfile.TemporaryDirectory() as folder:
        folder = broadcast_object(folder)
        config = LlamaConfig(num_hidden_layers=LAYERS, **sizes, **heads)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)  # on the first rank
        dist.barrier()
        worker = Worker(WorkerConfig(model_name=folder, **settings), device, num_updates=100)
    ring.forward_block, ring.backward_block = forward_block, backward_block
    tokens, zeros = list(range(LENGTH)), [0.0] * LENGTH
    num_rows = ROWS * MICRO_BATCHES * dist.get_world_size()
    rows = [
        Sample(tokens, [0, 0] + [1] * (LENGTH - 2), zeros, zeros, i, i) for i in range(num_rows)
    ]
    batch = collate(rows)
    batch.token_weights = batch.mask / batch.mask.sum()
    seconds = []
    for _ in range(8):
        start = time.process_time()
        worker.update(batch, weighted_logps)
        seconds.append(time.process_time() - start)
    with Kernels() as kernels:
        worker.update(batch, weighted_logps)
    with cProfile.Profile() as profile:
        worker.update(batch, weighted_logps)
    if dist.get_rank() == 0:
        per = LAYERS * MICRO_BATCHES
        num_calls, num_kernels = pstats.Stats(profile).total_calls, sum(kernels.counts.values())
        print(
            f"{' '.join(sys.argv[1:]) or 'defaults'}: {num_calls / per:.0f} calls and "
            f"{num_kernels / per:.0f} kernels a layer and micro-batch; {min(seconds):.2f} s of CPU"
        )


if __name__ == "__main__":
    main()
