"""The paged cache of keys and values, and the attention of a prefill and of a decoding step.

Shapes: S slots, n rows of a step (the first n slots), H query heads, G key heads, D head size,
N pages, P = PAGE_SIZE_TOKENS, L prompt tokens.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rl2.parallel.pages import PAGE_SIZE_TOKENS, attend_pages
from rl2.parallel.ring import PackedAttention

PromptKV = dict[int, list[Tensor]]  # layer -> keys and values of one prompt, [G, L, D] each


class PrefillAttention(PackedAttention):
    """Attention of a prefill, each prompt with itself. Keeps the keys and values of every layer."""

    def __init__(self, lengths: list[int], device: torch.device, exact: bool = False):
        super().__init__([[(length, 0) for length in lengths]], [], device, exact=exact)
        self.kv: PromptKV = {}  # of all prompts, one behind the other

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *options: Any,
    ) -> Tensor:
        """query [1, H, L, D], key and value [1, G, L, D] -> [1, L, H, D]."""
        if module.layer_idx in self.kv:
            raise ValueError(
                f"{type(module).__name__} attends more than once in a layer, which the embedded "
                "engine does not compute: choose another model, or rollout.engine=sglang"
            )
        self.kv[module.layer_idx] = [key[0], value[0]]
        return super().__call__(module, query, key, value, *options)

    def tokens(self, start: int, end: int) -> PromptKV:
        """Keys and values of the packed tokens `start` to `end`."""
        return {layer: [x[:, start:end] for x in kv] for layer, kv in self.kv.items()}


class PagedKVCache:
    """Keys and values of all slots, and the attention of one new token a slot over them.

    A layer has two tensors of pages: keys [N, S, G, D, P], in the layout of the fastest products,
    and values [N, S, G, P, D]. N grows with the longest request.
    """

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self.layers: dict[int, list[Tensor]] = {}  # layer -> pages of keys, pages of values

    def begin_step(self, positions: Tensor, last_position: int) -> None:
        """Prepares what all layers share: where the new tokens go, and which keys they see.

        positions [n]: of the new token of each of the first n slots; `last_position` is the largest
        of them.
        """
        device = positions.device
        self.slots = torch.arange(len(positions), device=device)
        self.page = positions // PAGE_SIZE_TOKENS
        self.offset = positions % PAGE_SIZE_TOKENS
        self.num_pages = last_position // PAGE_SIZE_TOKENS + 1
        keys = torch.arange(self.num_pages * PAGE_SIZE_TOKENS, device=device)
        self.distances = positions[:, None] - keys
        self.hidden: dict[int | None, Tensor] = {}  # by the window of the layer

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        sliding_window: int | None = None,
    ) -> Tensor:
        """Stores the new keys and values and attends.

        query [n, H, 1, D], key and value [n, G, 1, D] -> [n, 1, H, D].
        With `sliding_window` a token sees so many tokens at most, the last one of which is itself.
        """
        n, num_heads, _, _ = query.shape
        layer: int = module.layer_idx
        keys, values = self._reserve(layer, [key, value], self.num_pages)
        keys[self.page, self.slots, :, :, self.offset] = key[:, :, 0]
        values[self.page, self.slots, :, self.offset] = value[:, :, 0]
        out, _ = attend_pages(
            query.unflatten(1, (key.shape[1], -1)).transpose(2, 3),  # [n, G, 1, H / G, D]
            keys[: self.num_pages, :n],
            values[: self.num_pages, :n],
            self._hidden(sliding_window),
            scaling,
        )
        return out.to(value.dtype).reshape(n, 1, num_heads, -1)

    def _hidden(self, window: int | None) -> Tensor:
        """Which keys a slot does not see, [n, 1, N * P]."""
        if window not in self.hidden:
            hidden = self.distances < 0
            if window is not None:
                hidden |= self.distances >= window
            self.hidden[window] = hidden[:, None]
        return self.hidden[window]

    def write_prompt(self, kv: PromptKV, slots: list[int]) -> None:
        """Writes a prompt's keys and values into each of `slots`, from position 0."""
        for layer, keys_and_values in kv.items():
            length = keys_and_values[0].shape[1]
            num_pages = -(-length // PAGE_SIZE_TOKENS)
            padding = num_pages * PAGE_SIZE_TOKENS - length
            keys, values = self._reserve(layer, keys_and_values, num_pages)
            for pages, new in zip((keys.mT, values), keys_and_values, strict=True):
                padded = F.pad(new, (0, 0, 0, padding))
                new_pages = padded.unflatten(1, (num_pages, PAGE_SIZE_TOKENS))  # [G, N, P, D]
                pages[:num_pages, slots] = new_pages.transpose(0, 1)[:, None]

    def move_slot(self, source: int, target: int) -> None:
        """Copies all keys and values of slot `source` to slot `target`."""
        for layer_pages in self.layers.values():
            for pages in layer_pages:
                pages[:, target] = pages[:, source]

    def _reserve(self, layer: int, like: list[Tensor], num_pages: int) -> list[Tensor]:
        """The layer's pages of keys and of values, at least `num_pages` each.

        `like`: keys and values, [..., G, *, D].
        """
        if layer not in self.layers:
            self.layers[layer] = self._new_pages(0, *like)
        pages = self.layers[layer]
        num_missing = num_pages - len(pages[0])
        if num_missing > 0:
            missing = self._new_pages(num_missing, *like)
            pages[:] = [torch.cat(parts) for parts in zip(pages, missing, strict=True)]
        return pages

    def _new_pages(self, count: int, key: Tensor, value: Tensor) -> list[Tensor]:
        """Zeros of the two shapes.

        Masked values are multiplied by a probability of 0, so they must be finite.
        """
        shape = (count, self.num_slots, key.shape[-3])
        keys = key.new_zeros(*shape, key.shape[-1], PAGE_SIZE_TOKENS)
        return [keys, value.new_zeros(*shape, PAGE_SIZE_TOKENS, value.shape[-1])]
