"""Routing replay: the trainer sends each token to the experts that the engine chose.

Two experts of nearly equal logits change places by a rounding error, and a token that another
expert computes has another log-probability, by far more than rounding. So engine and trainer differ
most in mixtures of experts, and a policy that has moved by a few updates chooses other experts for
old tokens. With the choices of the engine (R3: Ma et al. 2025, "Stabilizing MoE Reinforcement
Learning by Aligning Training and Inference Routers") both compute the same function. The weights of
the chosen experts are the trainer's own, with their gradient.

Shapes: L tokens, R routers, K experts a token.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel

from rl2.model.routers import find_logit_routers
from rl2.model.shrink import FIRST_PLAIN_TOKEN, shrink
from rl2.model.towers import language_model_class

CHOICE_DTYPE = torch.int16  # of the numbers of experts, as they travel


class Routing:
    """What the routers of the model `hf` choose: told, or replaced by what another model chose.

    ValueError for a model, which is called `name`, whose choices cannot be replayed.
    """

    def __init__(self, name: str, hf: PreTrainedModel):
        self.replayed: Tensor | None = None
        """[L, R, K] for the next forward passes, also those that are computed again in a backward
        pass; None: the routers choose"""
        routers = [router for router, _ in find_logit_routers(hf)]
        if not routers:
            raise ValueError(
                f"routing_replay=true: {name} ({hf.config.model_type}) has no router; leave the "
                "key out"
            )
        self.num_calls = _count_calls(name, hf.config)
        self._chosen: list[Tensor | None] = [None] * len(routers)
        for index, router in enumerate(routers):
            router.forward = partial(self._route, index, router.forward)

    def last_choices(self) -> Tensor:
        """The choices [L, R, K] of the last forward pass, in host memory."""
        chosen = [tensor for tensor in self._chosen if tensor is not None]
        assert len(chosen) == len(self._chosen), "a router has not run"
        return torch.stack(chosen, 1).to("cpu", CHOICE_DTYPE)

    def _route(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The forward pass of router `index`."""
        replayed = None if self.replayed is None else self.replayed[:, index].long()
        with _TopK(self.num_calls, replayed) as topk:
            output = forward(*args, **kwargs)
        self._chosen[index] = topk.chosen
        return output


class _TopK(TorchFunctionMode):
    """Within it the last of `num_calls` calls of torch.topk, the choice of experts, is known.

    With `replayed` [L, K] it gives these in the place of the largest values.
    """

    def __init__(self, num_calls: int, replayed: Tensor | None = None):
        super().__init__()
        self.num_calls = num_calls
        self.replayed = replayed
        self.calls = 0
        self.chosen: Tensor | None = None  # [L, K]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.topk, Tensor.topk):
            return func(*args, **(kwargs or {}))
        self.calls += 1
        values = args[0]
        if self.calls == self.num_calls and self.replayed is not None:
            indices = self.replayed.view(*values.shape[:-1], -1)
            result = torch.return_types.topk((values.gather(-1, indices), indices))
        else:
            result = func(*args, **(kwargs or {}))
        self.chosen = result.indices.detach().flatten(0, -2)
        return result


def find_router_layers(name: str, hf: PreTrainedModel) -> list[int]:
    """The number of the layer of each router of the model `name`, in the order of `Routing`.

    ValueError if its layers have no numbers or several routers.
    """
    names = {module: module_name for module_name, module in hf.named_modules()}
    layers = []
    for router, _ in find_logit_routers(hf):
        found = re.search(r"layers\.(\d+)\.", names[router])
        layers.append(int(found[1]) if found else -1)
    if -1 in layers or len(set(layers)) < len(layers):
        raise ValueError(
            f"routing_replay=true: the routers of {name} ({hf.config.model_type}) are not one a "
            "layer, as SGLang tells their choices; use rollout.engine=local"
        )
    return layers


def _count_calls(name: str, config: PreTrainedConfig) -> int:
    """How often each router calls torch.topk, seen in a small copy of the model.

    Some choose groups of experts first (DeepSeek-V3). ValueError if a router never does, or if they
    differ.
    """
    model_class = language_model_class(config)
    with torch.random.fork_rng(devices=[]):
        small = model_class.from_config(
            shrink(model_class, config), attn_implementation="eager", dtype=torch.float32
        )
    counts = set()

    def count(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with _TopK(num_calls=0) as topk:
            output = forward(*args, **kwargs)
        counts.add(topk.calls)
        return output

    for router, _ in find_logit_routers(small):
        router.forward = partial(count, router.forward)
    with torch.no_grad():
        small.base_model(torch.full((1, 4), FIRST_PLAIN_TOKEN), use_cache=False)
    if len(counts) != 1 or 0 in counts:
        raise ValueError(
            f"routing_replay=true: the routers of {name} ({config.model_type}) do not choose by "
            "torch.topk, so their choices cannot be replayed; leave the key out"
        )
    return counts.pop()
