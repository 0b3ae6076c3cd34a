"""Routers: the modules that choose the experts of each token in a mixture of experts."""

from collections.abc import Iterator
from typing import Any

from torch import nn

# Classes of transformers: Qwen3MoeTopKRouter, JetMoeTopKGating and others.
CLASS_NAMES = ("router", "topkgating")
MODULE_NAMES = ("router", "gate")  # where the class has another name (Hunyuan)


def find_routers(hf: nn.Module) -> set[nn.Module]:
    """The modules of all routers, and the modules within them."""
    routers: set[nn.Module] = set()
    for name, module in hf.named_modules():
        class_name = type(module).__name__.lower()
        is_named = name.rpartition(".")[2] in MODULE_NAMES
        if is_named or any(part in class_name for part in CLASS_NAMES):
            routers.update(module.modules())
    return routers


def find_logit_routers(hf: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """The modules that give the logits of routers, and which of their outputs these are.

    These are what transformers records as `router_logits`.
    """
    recorders: Any = (getattr(hf, "_can_record_outputs", None) or {}).get("router_logits", [])
    for recorder in recorders if isinstance(recorders, list) else [recorders]:
        for name, module in hf.named_modules():
            if isinstance(module, recorder.target_class) and (recorder.layer_name or "") in name:
                yield module, recorder.index


def freeze_routers(name: str, hf: nn.Module) -> None:
    """Freezes the routers of the model `name`. ValueError if it has none."""
    parameters = [weight for router in find_routers(hf) for weight in router.parameters()]
    if not parameters:
        raise ValueError(f"freeze_router=true: {name} has no router; leave the key out")
    for parameter in parameters:
        parameter.requires_grad_(False)
