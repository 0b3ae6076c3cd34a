"""Tensor parallelism from the plan that a transformers model carries (Megatron: Shoeybi et al.,
2019, arXiv:1909.08053).

Matrices are cut by columns or rows as the plan says; the embedding and the head are cut by the
vocabulary.
"""

import logging
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import PreTrainedConfig, PreTrainedModel

STYLES = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
# Every process has the whole weight, but its gradient comes from the heads of this process only.
PARTIAL_GRADIENT = "replicated_with_grad_allreduce"
# transformers 5.15 to 5.20 add this for the embedding of models with tied embeddings. `parallelize`
# cuts the embedding of every model.
EMBEDDING = "embedding_rowwise"
# Sizes in the model's config that the number of processes must divide.
DIVISIBLE = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")


def check_tp_size(name: str, config: PreTrainedConfig, size: int) -> None:
    """ValueError if the model `name` cannot be cut into `size` parts."""
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan:
        raise ValueError(
            f"{name} ({config.model_type}) carries no tensor-parallel plan: set tp_size=1"
        )
    unknown = set(plan.values()) - STYLES.keys() - {PARTIAL_GRADIENT, EMBEDDING}
    if unknown:
        raise ValueError(
            f"the tensor-parallel plan of {name} has {sorted(unknown)}, which rl2 cannot do: "
            "set tp_size=1"
        )
    for key in DIVISIBLE:
        if getattr(config, key) % size:
            raise ValueError(
                f"tp_size={size} does not divide {key}={getattr(config, key)} of {name}"
            )


def parallelize(hf: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Cuts the parameters of a Hugging Face model, perhaps on the meta device, over a mesh [tp]."""
    # It warns on every process of the two gathers of a weight that FSDP and tp both cut.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    plan: dict[str, str] = hf.config.base_model_tp_plan or {}
    for name, module in list(hf.base_model.named_modules()):
        style = next((plan[pattern] for pattern in plan if fnmatchcase(name, pattern)), None)
        if style in STYLES:
            cut(module, style, mesh)
    parallelize_module(hf.get_input_embeddings(), mesh, RowwiseParallel(input_layouts=Replicate()))
    head = hf.get_output_embeddings()
    if head is not None and hf.config.tie_word_embeddings:
        head.weight = hf.get_input_embeddings().weight  # the cut made a new parameter of it
    elif head is not None:
        parallelize_module(head, mesh, ColwiseParallel())


def cut(layer: Any, style: str, mesh: DeviceMesh) -> None:
    """Cuts a linear layer over a mesh [tp], and its adapter if it has one (see lora.py).

    Of W x + scale B A x, a cut of the columns is one of the rows of W and B: every process computes
    A x. A cut of the rows is one of the columns of W and A, and the parts of both sums are added
    before B and the scale.
    """
    matrices = [layer]
    if hasattr(layer, "base_layer"):
        adapters = layer.lora_B if style == "colwise" else layer.lora_A
        matrices = [layer.base_layer] + list(adapters.values())
    for matrix in matrices:
        parallelize_module(matrix, mesh, STYLES[style]())


def all_reduce_partial_gradients(hf: PreTrainedModel, group: dist.ProcessGroup) -> None:
    """Sums over `group` the gradients that each process has of its own heads only.

    These are the norms of queries and keys.
    """
    plan: dict[str, str] = hf.config.base_model_tp_plan or {}
    # `layers.*.self_attn.q_norm` means every module whose name ends in `.self_attn.q_norm`.
    endings = [name.rpartition("*")[2] for name, style in plan.items() if style == PARTIAL_GRADIENT]
    for name, parameter in hf.named_parameters():
        module_name = name.rpartition(".")[0]
        if parameter.requires_grad and module_name.endswith(tuple(endings)):
            gradient: Any = parameter.grad
            dist.all_reduce(gradient.to_local(), group=group)


def sum_softmax(
    lse: Tensor, target: Tensor, mean: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax statistics of our part of the vocabulary -> those of the whole vocabulary, all [P].

    `lse` is the log-sum-exp of the logits; `target` is the target's logit, 0 where the target is in
    another part; `mean` is the mean of the logits under the softmax. With part i holding the share
    s_i = exp(lse_i - top) of the sum, lse = top + log sum_i s_i and mean = sum_i s_i mean_i / sum_i
    s_i.
    """
    top = lse.clone()
    dist.all_reduce(top, dist.ReduceOp.MAX, group)
    share = (lse - top).exp()
    sums = torch.stack([share, target, share * mean])  # [3, P]
    dist.all_reduce(sums, group=group)
    return top + sums[0].log(), sums[1], sums[2] / sums[0]
