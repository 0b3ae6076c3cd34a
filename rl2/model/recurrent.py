"""Recurrent layers: gated delta rules, state spaces and short convolutions, which carry a state
from token to token (Qwen3.5, Nemotron-H, LFM2).

Attention goes through transformers' table of functions; these layers have no such table, and know
one sequence a row. So their forward passes are replaced, and see rows: one for each document of a
pack, or one for each slot of the embedded engine.

Shapes: L packed tokens, n rows, W tokens of a row, E hidden size, S slots.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from rl2.attention.blocks import Layout
from rl2.batch import Pack
from rl2.model.attachment import Attachment, ModelSettings
from rl2.model.classes import is_recurrent
from rl2.parallel.device import copy_to_device

CACHES = ("cache_params", "past_key_values")  # names of the argument
MASKS = ("attention_mask", "conv_mask")
# Documents share a call if the longest one is at most this many times as long as the others.
MAX_LENGTH_RATIO = 2

Inputs = dict[str, Tensor]  # hidden states and the like, [n, W, ...] each
Outputs = Tensor | tuple[Tensor, ...]  # [n, W, ...] each
Compute = Callable[[Inputs, object], Outputs]  # (inputs, cache or None) -> outputs


class RecurrentLayers(Attachment):
    """The recurrent layers of `hf`, whose forward passes go through `run`.

    `run` is set before each forward pass of the model. It stays for the backward pass, in which
    layers may run again.
    """

    repeats_prompts = True
    inexact = (
        "has recurrent layers, which add in another order in the engine's decoding steps than in "
        "the trainer"
    )

    def __init__(self, hf: nn.Module):
        self.modules = [module for module in hf.modules() if is_recurrent(module)]
        self.run: Callable[[Compute, Inputs], Outputs] | None = None
        for module in self.modules:
            signature = inspect.signature(module.forward)
            [cache_name] = [name for name in CACHES if name in signature.parameters]
            module.forward = partial(self._forward, module.forward, signature, cache_name)

    @classmethod
    def attach(cls, settings: ModelSettings, hf: nn.Module) -> "RecurrentLayers | None":
        config = settings.config
        layer = next(filter(is_recurrent, hf.modules()), None)
        if layer is None:
            return None
        for key, size in (("sp_size", config.sp_size), ("tp_size", config.tp_size)):
            if size > 1:
                raise ValueError(
                    f"{key}={size}: {config.model_name} has layers that carry a state from token "
                    f"to token ({type(layer).__name__}), which rl2 does not cut over processes: "
                    f"set {key}=1"
                )
        if config.compile:  # it takes minutes, and fails for Qwen3.5
            raise ValueError(
                f"compile=true: {config.model_name} has layers that carry a state from token to "
                f"token ({type(layer).__name__}), whose code would be compiled again for each "
                "number of documents in a pack: set compile=false"
            )
        return cls(hf)

    def before_forward(self, pack: Pack, layout: Layout, num_tokens: int) -> None:
        self.run = PackedRows(layout)

    def _forward(
        self,
        forward: Callable[..., Outputs],
        signature: inspect.Signature,
        cache_name: str,
        *args: object,
        **options: object,
    ) -> Outputs:
        """Masks and further options of the model's forward are dropped: rows have no padding in
        front, and none of other documents.
        """
        assert self.run is not None, "the forward pass of a recurrent layer needs `run`"
        given = signature.bind(*args, **options).arguments
        inputs = {}
        for name, value in given.items():
            if isinstance(value, Tensor) and name not in MASKS:
                inputs[name] = value
        return self.run(lambda rows, cache: forward(**rows, **{cache_name: cache}), inputs)


class PackedRows:
    """Runs a layer on each document of a pack by itself, from an empty state.

    The document of an answer begins with its prompt: a shared prompt runs again for each answer.
    Documents of similar length are the rows of one call. The shorter ones are padded at the end
    with the pack's first token, which no token before it sees.
    """

    def __init__(self, layout: Layout):
        # [n, W] of each call: the place in the pack of each token.
        self.calls: list[Tensor] = []
        # [L]: the place of each token of the pack in the outputs of all calls, one after the other.
        # A token of a shared prompt is in several documents, and has its place in the last of them.
        [starts] = layout.starts
        output_places = torch.zeros(starts[-1], dtype=torch.int64)
        num_outputs = 0
        waiting = _longest_first(layout)
        while waiting:
            width = len(waiting[0])
            together = [places for places in waiting if len(places) * MAX_LENGTH_RATIO >= width]
            del waiting[: len(together)]
            call = pad_sequence(together, batch_first=True)
            self.calls.append(copy_to_device(call, layout.device))
            for places in together:
                output_places[places] = torch.arange(num_outputs, num_outputs + len(places))
                num_outputs += width
        self.output_places = copy_to_device(output_places, layout.device)

    def __call__(self, compute: Compute, inputs: Inputs) -> Outputs:
        """inputs [1, L, ...] -> outputs [1, L, ...]."""
        outputs = []
        for call in self.calls:
            rows = {name: tokens[0, call] for name, tokens in inputs.items()}
            outputs.append(compute(rows, None))
        return join_outputs(outputs, self._gather)

    def _gather(self, parts: list[Tensor]) -> Tensor:
        """Outputs [n, W, ...] of each call -> outputs [1, L, ...]."""
        return torch.cat([part.flatten(0, 1) for part in parts])[None, self.output_places]


def _longest_first(layout: Layout) -> list[Tensor]:
    """The places in the pack of each document's tokens, but for prompts that answers share.

    The documents of these answers contain the prompt.
    """
    shared_prompts = {prompt for _, _, prompt in layout.prefixes}
    answers = []
    for segment, (places, _, _) in enumerate(layout.documents()):
        if segment not in shared_prompts:
            answers.append(places)
    return sorted(answers, key=len, reverse=True)


def join_outputs(outputs: list[Any], join: Callable[[list[Tensor]], Tensor]) -> Outputs:
    """Joins what several calls of a layer returned: tensors, or tuples of tensors one by one."""
    if isinstance(outputs[0], tuple):
        return tuple(join(list(parts)) for parts in zip(*outputs, strict=True))
    return join(outputs)
