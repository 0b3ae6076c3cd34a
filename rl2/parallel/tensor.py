"""Tensor parallelism from the plan that a transformers model carries (Megatron: Shoeybi et al., 2019, arXiv:1909.08053).

Matrices are cut by columns or rows as the plan says; the embedding and the head by the vocabulary.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
# Every process has the whole weight and the gradient of its own heads only: `partial_gradients` lists these.
PARTIAL = "replicated_with_grad_allreduce"


def check(name: str, config, size: int) -> None:
    """ValueError if the model `name` cannot be cut into `size` parts."""
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan:
        raise ValueError(
            f"{name} ({config.model_type}) carries no tensor-parallel plan: set tp_size=1"
        )
    if unknown := set(plan.values()) - {*STYLES, PARTIAL}:
        raise ValueError(
            f"the tensor-parallel plan of {name} has {sorted(unknown)}, which rl2 cannot do: set tp_size=1"
        )
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        if getattr(config, key) % size:
            raise ValueError(
                f"tp_size={size} does not divide {key}={getattr(config, key)} of {name}"
            )


def parallelize(hf: nn.Module, mesh: DeviceMesh) -> None:
    """Cuts the parameters of a Hugging Face model, which may be on the meta device, over a mesh of one axis."""
    plan = {
        name: STYLES[style]()
        for name, style in hf.config.base_model_tp_plan.items()
        if style != PARTIAL
    }
    parallelize_module(hf.base_model, mesh, plan)
    parallelize_module(hf.get_input_embeddings(), mesh, RowwiseParallel(input_layouts=Replicate()))
    head = hf.get_output_embeddings()
    if head is not None and hf.config.tie_word_embeddings:
        head.weight = hf.get_input_embeddings().weight  # cutting made another parameter of it
    elif head is not None:
        parallelize_module(head, mesh, ColwiseParallel())


def partial_gradients(hf: nn.Module) -> list[nn.Parameter]:
    """The parameters whose gradients have to be summed over the processes that share each matrix."""
    ends = [
        name.rpartition("*")[2]
        for name, style in hf.config.base_model_tp_plan.items()
        if style == PARTIAL
    ]
    return [
        p
        for name, p in hf.named_parameters()
        if any(name.rpartition(".")[0].endswith(end) for end in ends)
    ]


def sum_softmax(
    lse: Tensor, target: Tensor, mean: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax statistics over parts of the vocabulary -> over all of it. lse [P]: log-sum-exp of our logits; target [P]:
    the target's logit, 0 where it is not ours; mean [P]: the mean of our logits under our own softmax."""
    top = lse.clone()
    dist.all_reduce(top, dist.ReduceOp.MAX, group)
    share = (lse - top).exp()
    sums = torch.stack([share, target, share * mean])
    dist.all_reduce(sums, group=group)
    return top + sums[0].log(), sums[1], sums[2] / sums[0]
