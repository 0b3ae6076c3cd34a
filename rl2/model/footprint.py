"""How much of a GPU a model takes while it rests and while it is trained.

Weights, gradients and moments follow from shapes. What tokens leave behind in a layer is counted:
the layers run once on a device without memory, in this process and in about a second. So there is
no formula for each architecture. `rl2 plan` counts all of a job, which takes longer; this estimate
is on the safe side of it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from rl2.attention.ring import Ring, keep_attention
from rl2.batch import Sample, collate
from rl2.model.attachment import Attachment, ModelSettings
from rl2.model.classes import idle_parts
from rl2.model.head import LOGITS_PER_CHUNK
from rl2.model.load import empty_model, read_config
from rl2.model.token_model import TokenModel
from rl2.optimizer import hidden_matrices
from rl2.packing import pack, zigzag
from rl2.parallel.device import PLANNED_DEVICE, columns_to_device
from rl2.parallel.fsdp import find_layers
from rl2.parallel.planned_device import PlannedDevice
from rl2.rounding import ceil_div

COUNTED_TOKENS = 1024
# The head's backward pass holds up to 3.5 chunks of logits in fp32, with an entropy.
HEAD_BYTES = int(3.5 * 4 * LOGITS_PER_CHUNK["cuda"])
# What a layer's backward pass takes beside what its forward pass has kept, as a share of that.
SHARE_OF_BACKWARD = 0.5


@dataclass
class Part:
    """A layer, or all that is in no layer."""

    copy: int  # bytes of the whole weights, in the dtype of the computation
    cast: int  # those of weights that are kept in another dtype
    trained: int  # weights with a gradient
    kept: float = 0.0  # bytes that a token leaves from the forward to the backward pass
    kept_again: float = 0.0  # the same, if the layer runs again


class Footprint:
    """The bytes of a model on the fullest of `num_processes` processes.

    With tensor parallelism tokens count as though each process ran whole layers.
    """

    def __init__(self, settings: ModelSettings, num_processes: int):
        config: Any = settings.config
        if settings.trainable:  # neither changes what a run holds, and both take time
            config = replace(config, compile=False, dither_weights=False)
        self.settings = replace(settings, config=config)
        self.is_alone = num_processes == 1
        self.num_shards = config.fsdp_size or num_processes // config.tp_size
        hf, attachments = empty_model(self.settings, *read_config(settings))
        layers = find_layers(hf, idle_parts(hf))
        self.layers = [self._gather(layer.parameters()) for layer in layers]
        inside = {weight for layer in layers for weight in layer.parameters()}
        self.outside = self._gather(weight for weight in hf.parameters() if weight not in inside)
        self.weights = self.gradients = self.moments = 0
        is_muon = settings.trainable and config.optimizer == "muon"
        matrices = hidden_matrices(hf) if is_muon else set()
        for name, weight in hf.named_parameters():
            size = self._shard(weight)
            self.weights += size * weight.itemsize
            if settings.trainable and weight.requires_grad:
                self.gradients += 4 * size
                if not config.offload_optimizer:
                    self.moments += (4 if name in matrices else 8) * size
        if settings.trainable:
            self._count_tokens(hf, layers, attachments)

    def _shard(self, weight: nn.Parameter) -> int:
        """Elements of the largest part of a weight, which FSDP cuts along its first dimension."""
        rows = weight.shape[0] if weight.ndim else 1
        row = weight.numel() // max(1, rows)
        return ceil_div(ceil_div(rows, self.num_shards) * row, self.settings.config.tp_size)

    def _gather(self, weights: Iterable[nn.Parameter]) -> Part:
        part = Part(0, 0, 0)
        for weight in weights:
            dtype = self.settings.dtype if weight.is_floating_point() else weight.dtype
            size = weight.numel() // self.settings.config.tp_size
            part.copy += size * dtype.itemsize
            part.cast += size * dtype.itemsize * (weight.dtype != dtype)
            part.trained += size * weight.requires_grad
        return part

    @property
    def resting(self) -> int:
        """Bytes while other models work."""
        return self.moments + (0 if self.settings.config.offload_model else self.weights)

    @property
    def copies(self) -> int:
        """Bytes of whole weights in a pass: those in no layer, of this layer and of the next."""
        return self.outside.copy + 2 * max((layer.copy for layer in self.layers), default=0)

    def updating(self, tokens: int, num_again: int, keep_gathered: bool = False) -> int:
        """Bytes at the peak of an update with micro-batches of `tokens` tokens a process.

        The first `num_again` layers run again in the backward pass. With `keep_gathered` the whole
        weights stay on all processes from one micro-batch to the next, and whole gradients in fp32;
        a process that is alone has these anyway, and copies only what is in another dtype.
        """
        again, others = self.layers[:num_again], self.layers[num_again:]
        parts = [self.outside, *self.layers]
        if keep_gathered and self.is_alone:
            whole = sum(part.cast for part in parts)
        elif keep_gathered:
            whole = sum(part.copy + 4 * part.trained for part in parts)
        else:
            whole = self.copies
            if self.num_shards == 1:  # FSDP drops the copies of layers that run again alone
                whole += sum(layer.copy for layer in others)
        largest = max((layer.kept for layer in self.layers), default=0.0)
        kept = self.outside.kept + sum(layer.kept_again for layer in again)
        kept += max(sum(layer.kept for layer in others), largest)
        # The head runs backward, then each layer, then the embedding. A gradient is in the dtype of
        # the copy, and in fp32 while it travels.
        in_layer = SHARE_OF_BACKWARD * largest * tokens
        in_layer += (2 if keep_gathered else 6) * max(
            (layer.trained for layer in self.layers), default=0
        )
        passing = max(kept * tokens + max(HEAD_BYTES, in_layer), 4 * self.outside.trained)
        resting = self.weights + self.moments + self.gradients
        return resting + whole + 2 * self.outside.trained + int(passing)

    def _count_tokens(
        self, hf: PreTrainedModel, layers: list[nn.Module], attachments: list[Attachment]
    ) -> None:
        """Fills in what a token leaves in each part, by a forward pass without memory."""
        model = TokenModel(hf, Ring(), attachments=attachments).to(self.settings.dtype)
        mask = [0] + [1] * COUNTED_TOKENS
        zeros = [0.0] * len(mask)
        batch = collate([Sample([0] * len(mask), mask, zeros, zeros, 0, 0)])
        with PlannedDevice() as memory:
            model.to_empty(device=PLANNED_DEVICE)

            def run(part: Part, forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
                before = memory.bytes
                context, _ = keep_attention()
                with context:
                    output = forward(*args, **options)
                kept = tree_leaves((output, list(context.results)))
                again = sum(tensor.nbytes for tensor in kept if isinstance(tensor, Tensor))
                part.kept = (memory.bytes - before) / COUNTED_TOKENS
                part.kept_again = again / COUNTED_TOKENS
                return output

            for part, layer in zip(self.layers, layers, strict=True):
                layer.forward = partial(run, part, layer.forward)
            pack_on_device = columns_to_device(zigzag(pack(batch), 1, 0), PLANNED_DEVICE)
            before = memory.bytes
            scores = model(pack_on_device)
            total = (memory.bytes - before) / COUNTED_TOKENS
            del scores
        self.outside.kept = max(0.0, total - sum(layer.kept for layer in self.layers))
