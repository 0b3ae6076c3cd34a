"""Which shapes the calls of the embedded engine have: that decides which bits are equal.

A kernel chooses its order of summation by shape. So the rounding of a row can depend on how many
rows and keys share its call, but not on their values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rl2.attention.pages import MIN_ROWS, queries_are_independent
from rl2.engine.base import EngineSettings
from rl2.engine.linear import head_logits, repeat_rows
from rl2.rounding import round_up

PREFILL_BATCH_TOKENS = 2048  # most prompt tokens of one forward
STEP_ROWS_MULTIPLE = 8  # of a step that leaves free slots out


@dataclass(frozen=True)
class Shapes:
    """How many rows the calls of an engine have, and how it attends."""

    num_slots: int
    exact: bool
    """log-probabilities have the bits of the trainer's: no call has fewer than MIN_ROWS rows"""
    constant: bool
    """all slots decode in every step, busy or not, and each prompt is prefilled alone"""
    paged: bool
    """attention runs page by page, which costs a GPU many kernels a layer"""

    def step_rows(self, num_busy: int) -> int:
        """How many slots to decode, from the first one on, if so many are busy."""
        if self.constant:
            return self.num_slots
        num_rows = round_up(num_busy, STEP_ROWS_MULTIPLE)
        if self.exact:
            num_rows = max(num_rows, MIN_ROWS)
        return min(num_rows, self.num_slots)

    def prefill_rows(self, num_tokens: int, num_prompts: int) -> int:
        """How many rows to compute for the tokens of some prompts; those beyond are padding."""
        if not self.exact:
            return num_tokens
        num_rows = max(MIN_ROWS, num_tokens)
        # Such numbers were tried, see rows_are_independent.
        return num_rows if num_prompts == 1 else round_up(num_rows, STEP_ROWS_MULTIPLE)

    def prefill_limit(self) -> int:
        """Most tokens of several prompts in one forward."""
        return 0 if self.constant else PREFILL_BATCH_TOKENS


def choose_shapes(settings: EngineSettings, model: PreTrainedModel, exact: bool) -> Shapes:
    """Chooses the shapes for the equal bits of `settings`. The linear layers are packed already.

    With `deterministic` every call has a constant shape: tokens and log-probabilities of a request
    are bit-equal whatever else is in flight. With `exact`, where a trial shows that the number of
    rows changes no bit, the busy slots alone decode, and several prompts are prefilled at a time.
    """
    num_slots = settings.max_running_requests
    constant = settings.deterministic
    if exact:
        constant = not rows_are_independent(model, num_slots)
    paged = settings.device.type == "cpu" or settings.deterministic
    return Shapes(num_slots, exact, constant, paged)


@torch.inference_mode()
def rows_are_independent(model: PreTrainedModel, max_rows: int) -> bool:
    """Whether a row has the same bits however many rows are computed with it.

    In a step of up to `max_rows`, all of whose sizes are tried, and in a prefill, of whose sizes
    some are. Attention and linear layers are tried, one of each shape.
    Other modules with weights in matrices, such as experts, are not tried: a model that has some is
    not independent.
    """
    head = model.get_output_embeddings()
    linear_layers = {}  # by shape
    tried = set()
    for module in model.modules():
        if type(module) in (nn.Linear, nn.Embedding):
            tried.add(id(module.weight))
        if type(module) is nn.Linear:
            linear_layers[module.weight.shape] = module
    for weight in model.parameters():
        if weight.ndim > 1 and id(weight) not in tried:
            return False
    if not queries_are_independent(model.dtype):
        return False
    steps = list(range(MIN_ROWS, max_rows, STEP_ROWS_MULTIPLE)) + [max_rows]
    sizes = list(steps)  # also of prefills: each about twice the one before
    while sizes[-1] < PREFILL_BATCH_TOKENS:
        sizes.append(min(PREFILL_BATCH_TOKENS, round_up(2 * sizes[-1], STEP_ROWS_MULTIPLE)))
    for layer in linear_layers.values():
        compute = partial(head_logits, head) if layer is head else layer
        # A prefill has no logits.
        if not _is_independent(compute, layer.weight, steps if layer is head else sizes):
            return False
    return True


def _is_independent(compute: Callable[[Tensor], Tensor], weight: Tensor, sizes: list[int]) -> bool:
    """Whether these numbers of rows, of which the last is the largest, give the same bits.

    The rows of the weight are the input.
    """
    rows = repeat_rows(weight, sizes[-1])
    expected = compute(rows)
    for num_rows in sizes[:-1]:
        if not torch.equal(compute(rows[:num_rows]), expected[:num_rows]):
            return False
    return True
