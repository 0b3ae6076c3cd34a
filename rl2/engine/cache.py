"""The cache of keys and values, and the attention of a prefill and of a decoding step.

Shapes: S slots, n rows of a step (the first n slots), H query heads, G key heads, D head size,
N pages, P = PAGE_SIZE_TOKENS, L prompt tokens.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rl2.attention.pages import PAGE_SIZE_TOKENS, attend_pages
from rl2.attention.ring import PackedAttention
from rl2.progress import mark
from rl2.rounding import ceil_div, round_up

GROWTH_TOKENS = 256  # by which a dense cache grows, since all of it is copied then
PromptKV = dict[int, tuple[Tensor, Tensor]]  # layer -> keys and values of a prompt, [G, L, D] each


class PrefillAttention(PackedAttention):
    """Attention of a prefill, each prompt with itself. Keeps the keys and values of every layer."""

    def __init__(self, lengths: list[int], device: torch.device, exact: bool = False):
        super().__init__([[(length, 0) for length in lengths]], [], device, exact=exact)
        self.kv: PromptKV = {}  # of all tokens

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        sliding_window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """query [1, H, L, D], key and value [1, G, L, D] -> [1, L, H, D]."""
        if module.layer_idx in self.kv:
            raise ValueError(
                f"{type(module).__name__} attends more than once in a layer, which the embedded "
                "engine does not compute: choose another model, or rollout.engine=sglang"
            )
        self.kv[module.layer_idx] = key[0], value[0]
        return super().__call__(module, query, key, value, scaling, sliding_window, sinks)

    def prompt(self, start: int, end: int) -> PromptKV:
        """Keys and values of the prompt that is the tokens `start` to `end`."""
        prompt = {}
        for layer, (keys, values) in self.kv.items():
            prompt[layer] = keys[:, start:end], values[:, start:end]
        return prompt


class KVCache:
    """Keys and values of all slots, and the attention of one new token a slot over them.

    A slot has the same bits, however long the other slots are. A layer has two tensors of pages:
    keys [N, S, G, D, P], in the layout of the fastest products, and values [N, S, G, P, D]. N grows
    with the longest request.
    """

    slot_dim = 1  # of the tensors of a layer: which slot
    key_dim = 0  # which page, or which key
    growth = 1  # by how many of them it grows at a time

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self.layers: dict[int, list[Tensor]] = {}  # layer -> keys, values

    def begin_step(self, positions: Tensor, last_position: int) -> None:
        """Prepares what all layers share: where the new tokens go, and which keys they see.

        positions [n]: of the new token of each of the first n slots; `last_position` is the largest
        of them.
        """
        device = positions.device
        self.positions = positions
        self.slots = torch.arange(len(positions), device=device)
        self.page = positions // PAGE_SIZE_TOKENS
        self.offset = positions % PAGE_SIZE_TOKENS
        self.num_pages = last_position // PAGE_SIZE_TOKENS + 1
        keys = torch.arange(self.num_pages * PAGE_SIZE_TOKENS, device=device)
        self.distances = positions[:, None] - keys
        self.masks: dict[int | None, Tensor] = {}  # of this step, by the window of the layer

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        sliding_window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Stores the new keys and values and attends, with the options of PackedAttention.

        query [n, H, 1, D], key and value [n, G, 1, D] -> [n, 1, H, D].
        """
        mark()
        n, num_heads, _, _ = query.shape
        if sliding_window not in self.masks:
            hidden = self.distances < 0
            if sliding_window is not None:
                hidden |= self.distances >= sliding_window
            self.masks[sliding_window] = self._mask(hidden, query.dtype)
        keys, values = self._store(module.layer_idx, key[:, :, 0], value[:, :, 0])
        out = self._attend(
            query[:, :, 0].unflatten(1, (key.shape[1], -1)),
            keys,
            values,
            self.masks[sliding_window],
            scaling,
            sinks,
        )
        return out.reshape(n, 1, num_heads, -1)

    def _store(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Writes the new keys and values [n, G, D]. Returns all that the n slots may see."""
        keys, values = self._reserve(layer, (key[:, :, None], value[:, :, None]), self.num_pages)
        keys[self.page, self.slots, :, :, self.offset] = key
        values[self.page, self.slots, :, self.offset] = value
        pages = slice(self.num_pages), slice(len(key))
        return keys[pages], values[pages]

    def _attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor,
        scaling: float,
        sinks: Tensor | None,
    ) -> Tensor:
        """query [n, G, H / G, D], results of `_store` and `_mask` -> n * H * D numbers.

        The query heads of one key head are rows of one matrix, so no key is repeated.
        """
        out, _ = attend_pages(query[:, :, None], keys, values, mask, scaling, sinks)
        return out.to(values.dtype)

    def _mask(self, hidden: Tensor, dtype: torch.dtype) -> Tensor:
        """The mask of the kernel. `hidden` [n, N * P]: which keys a slot does not see."""
        return hidden[:, None]  # for one query a slot

    def write_prompt(self, kv: PromptKV, slots: list[int]) -> None:
        """Writes a prompt's keys and values into each of `slots`, from position 0."""
        for layer, keys_and_values in kv.items():
            length = keys_and_values[0].shape[1]
            num_pages = ceil_div(length, PAGE_SIZE_TOKENS)
            padding = num_pages * PAGE_SIZE_TOKENS - length
            keys, values = self._reserve(layer, keys_and_values, num_pages)
            for pages, new in zip((keys.mT, values), keys_and_values, strict=True):
                padded = F.pad(new, (0, 0, 0, padding))
                new_pages = padded.unflatten(1, (num_pages, PAGE_SIZE_TOKENS))  # [G, N, P, D]
                pages[:num_pages, slots] = new_pages.transpose(0, 1)[:, None]

    def _zeros(self, like: tuple[Tensor, Tensor], count: int) -> list[Tensor]:
        """New keys and values of all slots. `like`: keys and values, [..., G, *, D].

        Masked values are multiplied by a probability of 0, so they must be finite.
        """
        key, value = like
        shape = (count, self.num_slots, key.shape[-3])
        keys = key.new_zeros(*shape, key.shape[-1], PAGE_SIZE_TOKENS)
        return [keys, value.new_zeros(*shape, PAGE_SIZE_TOKENS, value.shape[-1])]

    def move_slot(self, source: int, target: int) -> None:
        """Copies all keys and values of slot `source` to slot `target`."""
        for keys_and_values in self.layers.values():
            for tensor in keys_and_values:
                tensor.select(self.slot_dim, target).copy_(tensor.select(self.slot_dim, source))

    def _reserve(self, layer: int, like: tuple[Tensor, Tensor], count: int) -> list[Tensor]:
        """The layer's keys and values, with room for at least `count` keys, or pages, of a slot."""
        if layer not in self.layers:
            self.layers[layer] = self._zeros(like, 0)
        held = self.layers[layer]
        missing = count - held[0].shape[self.key_dim]
        if missing > 0:
            new = self._zeros(like, round_up(missing, self.growth))
            held[:] = [torch.cat(parts, self.key_dim) for parts in zip(held, new, strict=True)]
        return held


class DenseKVCache(KVCache):
    """A cache for GPUs: one kernel attends in a layer.

    A layer has keys and values [S, G, K, D]. K grows with the longest request, so the bits of a
    slot may depend on the other slots.
    """

    slot_dim, key_dim, growth = 0, 2, GROWTH_TOKENS

    def _store(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values [n, G, K, D], see KVCache."""
        n, num_keys = len(key), self.num_pages * PAGE_SIZE_TOKENS
        keys, values = self._reserve(layer, (key[:, :, None], value[:, :, None]), num_keys)
        keys[self.slots, :, self.positions] = key
        values[self.slots, :, self.positions] = value
        return keys[:n, :, :num_keys], values[:n, :, :num_keys]

    def _attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor,
        scaling: float,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attends with one kernel, see KVCache. It needs no support of grouped heads.

        Kernels have no sinks: models with these take plain products, with all keys as one page.
        """
        if sinks is not None:
            hidden = mask[:, 0].isinf()
            return super()._attend(query, keys[None].mT, values[None], hidden, scaling, sinks)
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scaling)

    def _mask(self, hidden: Tensor, dtype: torch.dtype) -> Tensor:
        """What is added to the scores, [n, 1, 1, K]: -inf where a slot does not see a key."""
        mask = torch.zeros_like(hidden, dtype=dtype)
        return mask.masked_fill_(hidden, -math.inf)[:, None, None]

    def write_prompt(self, kv: PromptKV, slots: list[int]) -> None:
        """See KVCache."""
        for layer, keys_and_values in kv.items():
            length = keys_and_values[0].shape[1]
            reserved = self._reserve(layer, keys_and_values, length)
            for old, new in zip(reserved, keys_and_values, strict=True):
                old[slots, :, :length] = new

    def _zeros(self, like: tuple[Tensor, Tensor], count: int) -> list[Tensor]:
        """See KVCache."""
        return [x.new_zeros(self.num_slots, x.shape[-3], count, x.shape[-1]) for x in like]
