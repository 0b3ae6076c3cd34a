"""Layers that save nothing for the backward pass but their inputs: they run again in it (Chen et
al., 2016, arXiv:1604.06174).

It is the non-reentrant form of torch.utils.checkpoint, for layers that do not contain each other
and one backward pass. torch's own keeps account of more, and takes 2,000 calls of Python a layer
where this takes some hundreds.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

Context = AbstractContextManager[Any]


def recompute(
    forward: Callable[..., Any],
    contexts: Callable[[], tuple[Context, Context]],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`forward(*args, **kwargs)`, which runs again in the backward pass.

    `contexts` makes a context for each of the two runs. Random numbers would not be the same again.
    """
    run = partial(forward, *args, **kwargs)
    if not torch.is_grad_enabled():
        return run()
    first, again = contexts()
    saved = _SavedTensors(run, again)
    with first, saved_tensors_hooks(saved.drop, saved.take):
        return run()


class _Complete(Exception):
    """The second run has made all that was saved in the first one: it need not go on."""


class _SavedTensors:
    """What `run` saves for the backward pass, which is made when the first tensor is needed."""

    def __init__(self, run: Callable[[], Any], context: Context):
        self.run: Callable[[], Any] | None = run  # until it has run again
        self.context = context
        self.count = 0
        self.tensors: list[Tensor | None] = []

    def drop(self, tensor: Tensor) -> int:
        """The number of this tensor, in the first run."""
        self.count += 1
        return self.count - 1

    def take(self, number: int) -> Tensor:
        """The tensor, once: the backward pass frees it then."""
        if self.run is not None:
            self._run_again(self.run)
        tensor, self.tensors[number] = self.tensors[number], None
        assert tensor is not None, "a layer's saved tensor is read twice"
        return tensor

    def _run_again(self, run: Callable[[], Any]) -> None:
        self.run = None  # it holds the inputs
        with (
            suppress(_Complete),
            torch.enable_grad(),
            self.context,
            saved_tensors_hooks(self._keep, lambda packed: packed),
        ):
            run()
        assert len(self.tensors) == self.count, "a layer does not run in the same way again"

    def _keep(self, tensor: Tensor) -> None:
        self.tensors.append(tensor.detach())
        if len(self.tensors) == self.count:
            raise _Complete
