"""How a model is written: whole weights as a Hugging Face folder."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rl2.model.token_model import TokenModel


def save_model(
    folder: str,
    model: TokenModel,
    weights: Iterable[tuple[str, Tensor]],
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
) -> None:
    """Writes the folder of `model` with these whole weights by their Hugging Face names.

    `dtype` is that of the weights, for the config; the model's parameters may have another one.

    All processes must call, since making the weights may communicate. Rank 0 writes.
    """
    full = {}
    for name, weight in weights:
        if dist.get_rank() == 0:
            full[name] = weight.cpu()
    if dist.get_rank() > 0:
        return
    hf = model.hf
    if model.is_critic:
        # transformers reads the value at the last token that is not this one.
        hf.config.pad_token_id = tokenizer.pad_token_id
    hf.save_pretrained(folder, state_dict=full)
    hf.config.dtype = dtype  # save_pretrained wrote that of our parameters
    hf.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
