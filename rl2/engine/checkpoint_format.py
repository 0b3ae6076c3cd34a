"""Weights as the files of a model have them, which is what SGLang and vLLM load.

transformers holds all experts of a layer in one tensor, and has other names for the weights of some
models. Files have a matrix for each expert, and the names of the first release.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator

from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rl2.engine.base import NamedTensors

LAYER = re.compile(r".*?\.\d+\.")  # what the names of a layer's weights begin with


class CheckpointFormat:
    """Converts weights of `model` as its `save_pretrained` does, but one after the other.

    `model` may be on the meta device. It has no adapters.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        weights = model.state_dict()
        in_files = revert_weight_conversion(model, weights)
        self.names = frozenset(in_files)
        self.renamed: dict[str, str] = {}  # name in the model -> name in the files
        # Names of weights that are joined with others, by layer.
        self.joined: dict[str, set[str]] = defaultdict(set)
        # What a weight becomes, by names in the files, when it is converted without the others.
        converted: dict[str, dict[str, Tensor]] = {}
        for name, weight in weights.items():
            if in_files.get(name) is weight:
                self.renamed[name] = name
            else:
                converted[name] = revert_weight_conversion(model, {name: weight})
        # Several weights that become one tensor of the files are joined there.
        num_sources = Counter(file_name for parts in converted.values() for file_name in parts)
        for name, parts in converted.items():
            if any(num_sources[file_name] > 1 for file_name in parts):
                self.joined[_layer(name)].add(name)
            elif len(parts) == 1:
                [(file_name, tensor)] = parts.items()
                if tensor is weights[name]:
                    self.renamed[name] = file_name

    def convert(self, named_tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights of `named_tensors` by their names in files.

        Weights that are joined wait for the others of their layer. Tensors may be views.
        """
        waiting: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, tensor in named_tensors:
            if name in self.renamed:
                yield self.renamed[name], tensor
                continue
            group = {name: tensor}
            layer = _layer(name)
            if name in self.joined.get(layer, ()):
                waiting[layer][name] = tensor
                if len(waiting[layer]) < len(self.joined[layer]):
                    continue
                group = waiting.pop(layer)
            yield from revert_weight_conversion(self.model, group).items()


def _layer(name: str) -> str:
    match = LAYER.match(name)
    return match.group() if match else name
