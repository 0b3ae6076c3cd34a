"""The states of recurrent layers: what a prompt leaves behind, and one for each slot.

A layer is given these in place of transformers' cache, of which it calls the methods below.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers.cache_utils import Cache

from rl2.model.recurrent import Compute, Inputs, RecurrentLayers, join_outputs

StateKey = tuple[str, int, int]  # conv or recurrent, the layer, the number of the state in it
PromptStates = dict[StateKey, Tensor]  # [1, ...] each; empty after no token
NO_LIMITS = (0.0, math.inf)


def _bound_time_steps(layers: RecurrentLayers) -> None:
    """Makes single tokens bound the time steps of state spaces, as whole sequences do.

    transformers applies the `time_step_limit` of Mamba2's layers to softplus(dt + dt_bias) of
    sequences only. Here their projections give no dt beyond it.
    """
    layer: Any
    for layer in layers.modules:
        limits = getattr(layer, "time_step_limit", NO_LIMITS)
        if tuple(limits) != NO_LIMITS:
            low, high = torch.tensor(limits).expm1().log().tolist()  # the inverse of softplus
            layer.in_proj.register_forward_hook(partial(_bound_dt, layer.dt_bias, low, high))


def _bound_dt(
    bias: Tensor, low: float, high: float, layer: nn.Module, inputs: object, projected: Tensor
) -> Tensor:
    """Bounds dt + bias. projected [.., gate, x, B, C, dt], dt of as many channels as `bias`."""
    rest, dt = projected.split([projected.shape[-1] - len(bias), len(bias)], -1)
    return torch.cat([rest, dt.clamp((low - bias).to(dt), (high - bias).to(dt))], -1)


class PromptRecorder:
    """A cache that starts empty and keeps the states that one prompt leaves behind.

    A layer sees the whole prompt in one call.
    """

    def __init__(self, states: PromptStates):
        self.states = states

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> Tensor:
        """Keeps the last inputs [1, C, size] of a convolution. Returns all of them, [1, C, W]."""
        missing = (conv_kernel_size or conv_states.shape[-1]) - conv_states.shape[-1]
        # Below 0 it cuts the first inputs off.
        self.states["conv", layer_idx, state_idx] = F.pad(conv_states, (missing, 0))
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0
    ) -> Tensor:
        self.states["recurrent", layer_idx, state_idx] = recurrent_states
        return recurrent_states


def _run_prompts(
    lengths: list[int], recorders: Sequence[PromptRecorder], compute: Compute, inputs: Inputs
) -> Any:
    """Runs a layer on several prompts, each alone, so that its bits do not depend on the others.

    inputs [1, L, ...] of all prompts, of these lengths -> outputs [1, L, ...].
    """
    parts = {name: tokens.split(lengths, 1) for name, tokens in inputs.items()}
    outputs = []
    for i, recorder in enumerate(recorders):
        if lengths[i]:
            prompt = {name: tokens[i] for name, tokens in parts.items()}
            outputs.append(compute(prompt, recorder))
    return join_outputs(outputs, lambda tensors: torch.cat(tensors, 1))


class SlotStates:
    """The states of all slots, of which a decoding step changes those of the first slots.

    A slot keeps its states until `write` gives it those of another prompt. ValueError for a model
    with layers that expect the cache of an older transformers.
    """

    def __init__(self, model: nn.Module, num_slots: int):
        self.layers = RecurrentLayers(model)
        if not hasattr(Cache, "get_conv_state"):
            raise ValueError(
                f"{type(self.layers.modules[0]).__name__} of transformers "
                f"{transformers.__version__} keeps its states in a way that the embedded engine "
                "does not know: update transformers, or set rollout.engine"
            )
        _bound_time_steps(self.layers)
        self.num_slots = num_slots
        self.example: PromptStates = {}  # of any prompt: their shapes are those of every prompt
        self.slots: dict[StateKey, Tensor] = {}  # [S, ...], reserved when the first one is written
        self.num_rows = 0  # of the step

    def begin_prefill(self, lengths: list[int], states: Sequence[PromptStates]) -> None:
        """The next forward pass is of prompts of these lengths, and fills their states in."""
        recorders = [PromptRecorder(of_prompt) for of_prompt in states]
        self.layers.run = partial(_run_prompts, lengths, recorders)

    def begin_step(self) -> None:
        """The next forward pass is of one token of each of the first slots."""
        self.layers.run = self._run_slots

    def write(self, states: PromptStates, slots: list[int]) -> None:
        """Writes a prompt's states into each of `slots`; zeros if the prompt had no token."""
        for key, like in self.example.items():
            if key not in self.slots:
                self.slots[key] = like.new_zeros(self.num_slots, *like.shape[1:])
            self.slots[key][slots] = states[key] if states else torch.zeros_like(like)

    def move_slot(self, source: int, target: int) -> None:
        """Copies the states of slot `source` to slot `target`."""
        for tensor in self.slots.values():
            tensor[target] = tensor[source]

    def _run_slots(self, compute: Compute, inputs: Inputs) -> Any:
        """inputs [n, 1, ...] -> outputs [n, 1, ...]."""
        self.num_rows = len(next(iter(inputs.values())))
        return compute(inputs, self)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        """A view [n, C, size]: layers change it in place."""
        return self.slots["conv", layer_idx, state_idx][: self.num_rows]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """A view [n, ...]: layers change it in place. None if the layer has convolutions only."""
        states = self.slots.get(("recurrent", layer_idx, state_idx))
        return None if states is None else states[: self.num_rows]

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> Tensor:
        """Appends inputs [n, C, 1] of a convolution. Returns them after those before."""
        before = self.get_conv_state(layer_idx, state_idx)
        inputs = torch.cat([before, conv_states], -1)
        before.copy_(inputs[..., -before.shape[-1] :])
        return inputs

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0
    ) -> Tensor:
        states = self.slots["recurrent", layer_idx, state_idx][: self.num_rows]
        return states.copy_(recurrent_states)
