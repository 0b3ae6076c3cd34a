"""The embedded engine: continuous batching in plain torch around any Hugging Face causal LM, in the trainer's process.

A request waits for a slot, its prompt but for the last token is prefilled (once for all requests with that prompt), and
then every step feeds one token of every slot and samples the next. A slot that is done is refilled before the next step.

Bits: kernels choose their order of summation by shape, so a row's rounding can depend on how many rows and keys share
its call, though not on what the others hold. With `deterministic` every call has a constant shape: all slots decode in
every step, busy or not, attention goes over pages of PAGE keys, and each prompt is prefilled alone. Tokens and logps are
then bit-equal whatever else is in flight.

Shapes: S slots, n rows of a step (the first n slots), H query heads, G key heads, D head size, N pages, P keys a page,
V vocabulary.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

PAGE = 64  # keys


class _Cache:
    """Keys and values of all slots, [N, S, G, P, D] each a layer, and the attention of one new token a slot on them.

    Scores are fp32 whatever the dtype, as in flash attention: some models' (Qwen2's) are too large for bf16.
    """

    def __init__(self, num_slots: int):
        self.num_slots, self.layers = num_slots, {}

    def begin(self, positions: Tensor, last: int):
        """What all layers of a step share: where the new tokens [n] go, and which keys they see."""
        self.slots = torch.arange(len(positions), device=positions.device)
        self.page, self.offset = positions // PAGE, positions % PAGE
        self.num_pages = last // PAGE + 1
        seen = torch.arange(self.num_pages * PAGE, device=positions.device) <= positions[:, None]
        self.mask = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, -math.inf)[
            :, None
        ]  # [n, 1, N * P]

    def __call__(self, module, query, key, value, scaling):
        """query [n, H, 1, D], key and value [n, G, 1, D] -> [n, 1, H, D]."""
        (n, heads), groups = query.shape[:2], key.shape[1]
        keys, values = self._reserve(module.layer_idx, [key, value], self.num_pages)
        for pages, new in ((keys, key), (values, value)):
            pages[self.page, self.slots, :, self.offset] = new[:, :, 0]
        query = query.float().reshape(
            n * groups, heads // groups, -1
        )  # those of a key head as one matrix: no repeat
        scores = torch.cat(
            [
                query @ page[:n].flatten(0, 1).float().transpose(1, 2)
                for page in keys[: self.num_pages]
            ],
            -1,
        )
        probs = scores.mul_(scaling).view(n, heads, -1).add_(self.mask).softmax(-1).to(value.dtype)
        probs = probs.view(n * groups, heads // groups, -1).split(PAGE, -1)
        out = sum(
            (prob @ page[:n].flatten(0, 1)).float()
            for prob, page in zip(probs, values, strict=False)
        )
        return out.to(value.dtype).view(n, 1, heads, -1)

    def write(self, kv: dict, slots: list[int]):
        """A prompt's keys and values [G, L, D] a layer into each of these slots, from the start."""
        for layer, new in kv.items():
            length = new[0].shape[1]
            num_pages = -(-length // PAGE)
            for pages, x in zip(self._reserve(layer, new, num_pages), new, strict=True):
                padded = F.pad(x, (0, 0, 0, num_pages * PAGE - length)).unflatten(
                    1, (num_pages, PAGE)
                )
                pages[:num_pages, slots] = padded.transpose(0, 1)[:, None]

    def move(self, source: int, target: int):
        for pages in (x for layer in self.layers.values() for x in layer):
            pages[:, target] = pages[:, source]

    def _reserve(self, layer: int, like: list[Tensor], num_pages: int) -> list[Tensor]:
        """The layer's pages, at least so many. New ones are zero: what is masked is multiplied by 0, and must be finite."""
        held = self.layers.setdefault(
            layer, [x.new_zeros(0, self.num_slots, x.shape[-3], PAGE, x.shape[-1]) for x in like]
        )
        if (more := num_pages - len(held[0])) > 0:
            held[:] = [torch.cat([x, x.new_zeros(more, *x.shape[1:])]) for x in held]
        return held
