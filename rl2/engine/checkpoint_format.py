"""Weights as the files of a model have them, which is what SGLang and vLLM load.

transformers holds all experts of a layer in one tensor, and has other names for the weights of some
models. Files have a matrix for each expert, and the names of the first release.
"""

from collections.abc import Iterator

from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rl2.engine.base import NamedTensors


class CheckpointFormat:
    """Converts weights of `model` as its `save_pretrained` does, but one after the other.

    `model` may be on the meta device. It has no adapters.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        weights = model.state_dict()
        in_files = revert_weight_conversion(model, weights)
        self.names = frozenset(in_files)
        # Name in the model -> name in the files, of weights that files hold as they are.
        self.renamed: dict[str, str] = {}
        # The names of the others that have to be converted together, by each of them: files may
        # join several in one tensor.
        self.groups: dict[str, set[str]] = {}
        sources: dict[str, set[str]] = {}  # of each tensor of the files
        for name, weight in weights.items():
            if in_files.get(name) is weight:
                self.renamed[name] = name
                continue
            self.groups[name] = {name}
            for file_name, tensor in revert_weight_conversion(model, {name: weight}).items():
                sources.setdefault(file_name, set()).add(name)
                if tensor is weight:
                    self.renamed[name] = file_name
        for names in sources.values():
            group: set[str] = set()
            for name in names:
                group |= self.groups[name]
            for name in group:
                self.groups[name] = group
                if len(group) > 1:
                    self.renamed.pop(name, None)

    def convert(self, named_tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights of `named_tensors` by their names in files.

        Weights that are joined wait for each other. Tensors may be views.
        """
        waiting: dict[str, Tensor] = {}
        for name, tensor in named_tensors:
            if name in self.renamed:
                yield self.renamed[name], tensor
                continue
            waiting[name] = tensor
            group = self.groups[name]
            if group <= waiting.keys():
                ready = {member: waiting.pop(member) for member in group}
                yield from revert_weight_conversion(self.model, ready).items()
