"""Mixtures of experts: their routers, replay of the engine's choices, the load-balancing loss.

Replay: two experts of nearly equal logits change places by a rounding error, and a token that
another expert computes has another log-probability, by far more than rounding. So engine and
trainer differ most in mixtures of experts, and a policy that has moved by a few updates chooses
other experts for old tokens. With the choices of the engine (R3: Ma et al. 2025, "Stabilizing MoE
Reinforcement Learning by Aligning Training and Inference Routers") both compute the same function.
The weights of the chosen experts are the trainer's own, with their gradient.

The loss keeps each expert in use. It is that of Switch Transformers (Fedus et al. 2021, equations 4
to 6), with the means of transformers' `load_balancing_loss_func`: E sum_e f_e P_e for E experts.
f_e is the number of times that a token chooses expert e, and P_e the probability that the router
gives it, both as means over tokens and layers. With k choices a token it is k where all experts are
used equally. The tokens are those that are trained; transformers takes those of prompts too. It is
no sum over tokens, so f is counted first, in a pass over the whole mini-batch without a gradient.
With f known, the gradient is a sum over tokens, which no cut of the mini-batch changes.

Shapes: L tokens, R routers, K chosen experts of the E experts a token.
"""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from rl2.attention.blocks import Layout
from rl2.batch import Pack
from rl2.config.schema import ActorConfig
from rl2.model.attachment import Attachment, ModelSettings
from rl2.model.classes import find_routers
from rl2.parallel.mesh import all_reduce_sum_

CHOICE_DTYPE = torch.int16  # of the numbers of experts, as they travel
DEFAULT_COEFFICIENT = 0.001  # of the loss, in most configs of transformers


def find_logit_routers(hf: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """The modules that give the logits of routers, and which of their outputs these are.

    These are what transformers records as `router_logits`.
    """
    recorders = (getattr(hf, "_can_record_outputs", None) or {}).get("router_logits", [])
    for recorder in recorders if isinstance(recorders, list) else [recorders]:
        for name, module in hf.named_modules():
            if isinstance(module, recorder.target_class) and (recorder.layer_name or "") in name:
                yield module, recorder.index


class FrozenRouters(Attachment):
    """The routers of a model with freeze_router=true."""

    @classmethod
    def attach(cls, settings: ModelSettings, hf: nn.Module) -> "FrozenRouters | None":
        """Freezes the routers. ValueError if the model has none."""
        if not (settings.trainable and settings.config.freeze_router):
            return None
        parameters = [weight for router in find_routers(hf) for weight in router.parameters()]
        if not parameters:
            name = settings.config.model_name
            raise ValueError(f"freeze_router=true: {name} has no router; leave the key out")
        for parameter in parameters:
            parameter.requires_grad_(False)
        return cls()


class Routing(Attachment):
    """What the routers of the model `hf` choose: told, or replaced by what another model chose.

    ValueError for a model, which is called `name`, without a router.
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
        self.name = name
        self.num_calls: dict[int, int] = {}  # of torch.topk, in a forward pass of each router
        self._chosen: list[Tensor | None] = [None] * len(routers)
        for index, router in enumerate(routers):
            router.forward = partial(self._route, index, router.forward)

    @classmethod
    def attach(cls, settings: ModelSettings, hf: PreTrainedModel) -> "Routing | None":
        config = settings.config
        replays = isinstance(config, ActorConfig) and config.routing_replay
        return cls(config.model_name, hf) if settings.trainable and replays else None

    def before_forward(self, pack: Pack, layout: Layout, num_tokens: int) -> None:
        self.replayed = pack.experts
        if pack.experts is not None:
            missing = num_tokens - len(pack.experts)
            self.replayed = F.pad(pack.experts, (0, 0, 0, 0, 0, missing))

    def last_choices(self) -> Tensor:
        """The choices [L, R, K] of the last forward pass, in host memory."""
        chosen = [tensor for tensor in self._chosen if tensor is not None]
        assert len(chosen) == len(self._chosen), "a router has not run"
        return torch.stack(chosen, 1).to("cpu", CHOICE_DTYPE)

    def _route(
        self, index: int, forward: Callable[..., object], *args: object, **kwargs: object
    ) -> object:
        """The forward pass of router `index`.

        Some choose groups of experts first (DeepSeek-V3), so the first pass of a router runs twice,
        to see how often it calls torch.topk. ValueError if it never does.
        """
        if index not in self.num_calls:
            with torch.no_grad(), _TopK() as topk:
                forward(*args, **kwargs)
            if not topk.calls:
                raise ValueError(
                    f"routing_replay=true: the routers of {self.name} do not choose by torch.topk, "
                    "so their choices cannot be replayed; leave the key out"
                )
            self.num_calls[index] = topk.calls
        replayed = None if self.replayed is None else self.replayed[:, index].long()
        with _TopK(self.num_calls[index], replayed) as topk:
            output = forward(*args, **kwargs)
        self._chosen[index] = topk.chosen
        return output


class _TopK(TorchFunctionMode):
    """Within it the last of `num_calls` calls of torch.topk, the choice of experts, is known.

    With `replayed` [L, K] it gives these in the place of the largest values.
    """

    def __init__(self, num_calls: int = 0, replayed: Tensor | None = None):
        super().__init__()
        self.num_calls = num_calls
        self.replayed = replayed
        self.calls = 0
        self.chosen: Tensor | None = None  # [L, K]

    def __torch_function__(self, func, types, args=(), kwargs=None):
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


class LoadBalance(Attachment):
    """The loss on the routers of the model `hf`.

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
        self.name = name
        self.coefficient = coefficient
        self.trained: Tensor | None = None  # [L] how often each token is trained
        text = hf.config.get_text_config()
        self.num_choices: int = getattr(hf, "num_experts_per_tok", 0) or text.num_experts_per_tok
        self._counts: Tensor | None = None  # [2, E], sums over tokens: choices and probabilities
        self._is_counting = False
        self._slope: Tensor | None = None  # [E], of the loss in the sum of the probabilities
        for router, index in routers:
            router.register_forward_hook(partial(self._after_router, index))

    @classmethod
    def attach(cls, settings: ModelSettings, hf: PreTrainedModel) -> "LoadBalance | None":
        """ValueError for a model or a layout that cannot have the loss."""
        config = settings.config
        if not settings.trainable or settings.critic:
            return None
        coefficient = config.router_aux_loss_coef
        if coefficient is None and not config.freeze_router:
            text = hf.config.get_text_config()  # some models ask for the loss
            if getattr(text, "output_router_logits", False):
                coefficient = getattr(text, "router_aux_loss_coef", DEFAULT_COEFFICIENT)
        if not coefficient:
            return None
        if config.tp_size > 1:
            raise ValueError(
                f"router_aux_loss_coef={coefficient:g} does not work with tp_size={config.tp_size}"
                ": set router_aux_loss_coef=0 or tp_size=1"
            )
        return cls(config.model_name, hf, coefficient)

    def after_read(self, hf: PreTrainedModel) -> None:
        print(f"{self.name}: load-balancing loss of the routers, times {self.coefficient:g}")

    def before_forward(self, pack: Pack, layout: Layout, num_tokens: int) -> None:
        device = pack.tokens.device
        ones = torch.ones(len(pack.hidden_index), device=device)
        self.trained = torch.zeros(num_tokens, device=device)
        self.trained.index_add_(0, pack.hidden_index, ones)

    @contextmanager
    def in_update(
        self, run_forward: Callable[[], None], scale: float
    ) -> Iterator[dict[str, float]]:
        """A context whose backward passes add the gradient of the loss.

        It reports E / k sum_e f_e P_e: 1 if the experts are used equally, E / k if k of them do it
        all.
        """
        self._counts = None
        self._is_counting = True
        run_forward()
        self._is_counting = False
        assert self._counts is not None, "no router has run"
        choices, probabilities = all_reduce_sum_(self._counts)
        num_rows = (choices.sum() / self.num_choices).clamp(min=1)  # tokens x routers
        slope = len(choices) * choices / num_rows**2  # of E sum_e f_e P_e
        self._slope = self.coefficient * scale * slope
        try:
            yield {"load_balance": (slope @ probabilities / self.num_choices).item()}
        finally:
            self._slope = None

    def _after_router(
        self, index: int, router: nn.Module, inputs: object, output: Tensor | tuple[Tensor, ...]
    ) -> Tensor | tuple[Tensor, ...] | None:
        """The forward hook of a router, whose logits [.., E] are the output `index`."""
        slope = self._slope if torch.is_grad_enabled() else None
        if slope is None and not self._is_counting:
            return None
        assert self.trained is not None
        outputs = list(output) if isinstance(output, tuple) else [output]
        logits = outputs[index].flatten(0, -2)
        probabilities = logits.softmax(-1, dtype=torch.float32)
        summed = self.trained @ probabilities
        if slope is None:
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
        outputs[place] = _WithLoss.apply(outputs[place], summed @ slope)
        return tuple(outputs) if isinstance(output, tuple) else outputs[0]


class _WithLoss(torch.autograd.Function):
    """Gives `x`. Its backward pass is also that of `loss`, a scalar in fp32."""

    @staticmethod
    def forward(ctx, x, loss):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, gradient.new_ones((), dtype=torch.float32)
