"""The load-balancing loss of a mixture of experts, which keeps each expert in use.

It is that of Switch Transformers (Fedus et al. 2021, equations 4 to 6), with the means of
transformers' `load_balancing_loss_func`: E sum_e f_e P_e for E experts. f_e is the number of times
that a token chooses expert e, and P_e the probability that the router gives it, both as means over
tokens and layers. With k choices a token it is k where all experts are used equally.

The tokens are those that are trained; transformers takes those of prompts too. It is no sum over
tokens, so f is counted first, in a pass over the whole mini-batch without a gradient. With f known,
the gradient is a sum over tokens, which no cut of the mini-batch changes.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from rl2.model.routers import find_logit_routers

DEFAULT_COEFFICIENT = 0.001  # of most configs in transformers


def choose_coefficient(
    config: PreTrainedConfig, coefficient: float | None, freeze_router: bool
) -> float:
    """The coefficient of the loss: the key's, or else that of a config that asks for the loss.

    Routers that are frozen have none unless the key says so.
    """
    if coefficient is not None:
        return coefficient
    text: Any = config.get_text_config()
    if freeze_router or not getattr(text, "output_router_logits", False):
        return 0.0
    return getattr(text, "router_aux_loss_coef", DEFAULT_COEFFICIENT)


class LoadBalance:
    """The loss on the routers of the model `hf`.

    `trained` [L] must be set before each forward pass of L tokens: how often each is trained.
    ValueError for a model to which transformers adds no such loss.
    """

    def __init__(self, name: str, hf: PreTrainedModel, coefficient: float):
        routers = list(find_logit_routers(hf))
        module = sys.modules[type(hf).__module__]
        if not routers or not hasattr(module, "load_balancing_loss_func"):
            raise ValueError(
                f"router_aux_loss_coef={coefficient:g}: transformers has no load-balancing loss "
                f"for {name} ({hf.config.model_type}); leave the key out"
            )
        self.coefficient = coefficient
        self.trained: Tensor | None = None
        text: Any = hf.config.get_text_config()
        self.num_choices: int = getattr(hf, "num_experts_per_tok", 0) or text.num_experts_per_tok
        self._counts: Tensor | None = None  # [2, E], sums over tokens: choices and probabilities
        self._is_counting = False
        self._slope: Tensor | None = None  # [E], of the loss in the sum of the probabilities
        for router, index in routers:
            router.register_forward_hook(partial(self._after_router, index))

    @contextmanager
    def in_update(
        self, run: Callable[[], None], sum_: Callable[[Tensor], Tensor], scale: float
    ) -> Iterator[float]:
        """A context whose backward passes add the gradient of the loss.

        Gives E / k sum_e f_e P_e: 1 if the experts are used equally, E / k if k of them do it all.

        `run` makes the forward passes of the mini-batch that are counted. `sum_` sums over all
        processes, which must enter together. The gradient is multiplied by `scale`.
        """
        self._counts = None
        self._is_counting = True
        run()
        self._is_counting = False
        assert self._counts is not None, "no router has run"
        choices, probabilities = sum_(self._counts)
        num_rows = (choices.sum() / self.num_choices).clamp(min=1)  # tokens x routers
        slope = len(choices) * choices / num_rows**2  # of E sum_e f_e P_e
        self._slope = self.coefficient * scale * slope
        try:
            yield (slope @ probabilities / self.num_choices).item()
        finally:
            self._slope = None

    def _after_router(self, index: int, router: nn.Module, inputs: Any, output: Any) -> Any:
        """The forward hook of a router, whose logits [.., E] are the output `index`."""
        adds = self._slope is not None and torch.is_grad_enabled()
        if not (self._is_counting or adds):
            return None
        assert self.trained is not None
        outputs = list(output) if isinstance(output, tuple) else [output]
        logits = outputs[index].flatten(0, -2)
        probabilities = logits.softmax(-1, dtype=torch.float32)
        summed = self.trained @ probabilities
        if self._is_counting:
            chosen = probabilities.topk(self.num_choices).indices
            choices = self.trained @ torch.zeros_like(probabilities).scatter_(1, chosen, 1.0)
            counts = torch.stack([choices, summed])
            self._counts = counts if self._counts is None else self._counts + counts
            return None
        # The model goes on with an output that carries the gradient: mostly not with the logits.
        place = index
        for i, value in enumerate(outputs):
            if i != index and value.is_floating_point():
                place = i
                break
        outputs[place] = _WithLoss.apply(outputs[place], summed @ self._slope)
        return tuple(outputs) if isinstance(output, tuple) else outputs[0]


class _WithLoss(torch.autograd.Function):
    """Gives `x`. Its backward pass is also that of `loss`, a scalar in fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        [gradient] = gradients
        return gradient, gradient.new_ones((), dtype=torch.float32)
