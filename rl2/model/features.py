"""Which features models have: a file and a row each."""

from transformers import PreTrainedModel

from rl2.model.attachment import Attachment, ModelSettings
from rl2.model.compiled import CompiledLayers
from rl2.model.dither import Dither
from rl2.model.lora import Adapters
from rl2.model.moe import FrozenRouters, LoadBalance, Routing
from rl2.model.recurrent import RecurrentLayers
from rl2.model.towers import Towers

# In the order in which they attach.
FEATURES: list[type[Attachment]] = [
    Towers,
    Adapters,
    RecurrentLayers,
    FrozenRouters,
    LoadBalance,
    Routing,
    CompiledLayers,
    Dither,
]


def attach_all(settings: ModelSettings, hf: PreTrainedModel) -> list[Attachment]:
    """Attaches to `hf`, which has no memory yet, what the settings ask for and what it needs.

    ValueError for a feature that the model cannot have.
    """
    attached = []
    for kind in FEATURES:
        part = kind.attach(settings, hf)
        if part is not None:
            attached.append(part)
    return attached
