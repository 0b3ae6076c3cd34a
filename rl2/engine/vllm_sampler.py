"""Our sampler in vLLM, which calls it as a logits processor.

The noise of a token is a function of seed and position alone, and log-probabilities are those of
softmax(logits / temperature), which vLLM itself does not give where top_p or top_k is set. vLLM
takes the most likely token, and that is the one that was drawn.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl2.engine.base import Generation, SamplingParams
from rl2.engine.sampler import sample_rows
from rl2.engine.stop import StopSearch

NUMBER_KEY = "rl2_number"  # of a request's number in vLLM's SamplingParams.extra_args


@dataclass(eq=False)
class Request:
    params: SamplingParams
    noise: np.ndarray  # uniform, one number for each new token
    future: asyncio.Future[Generation]  # awaited on the first rank of the engine
    stop_search: StopSearch | None
    id: str  # vLLM's
    tokens: list[int] = field(default_factory=list)
    # Of the tokens, and of one more while the prompt is not yet computed: that draw is repeated.
    logps: list[float] = field(default_factory=list)
    candidates: list[np.ndarray] = field(default_factory=list)  # empty without any

    def finish(self, reason: str, version: int | None) -> None:
        """Returns the answer to the caller of `generate`, who may have cancelled it."""
        if self.future.done():
            return
        num = len(self.tokens)
        candidates = self.candidates[:num] or None
        self.future.set_result(
            Generation(self.tokens, self.logps[:num], reason, version, candidates)
        )


class Sampler:
    """Draws the tokens of a batch. `sampler_class` makes it a logits processor of vLLM.

    A row of the batch belongs to a request. vLLM says which rows it has removed, added and moved.
    """

    requests: dict[int, Request]  # those in flight, by number
    errors: list[Exception]  # what went wrong: raised here, it would leave vLLM without a batch

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool):
        self.rows: dict[int, tuple[int, list[int]]] = {}  # row -> (number, tokens so far)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None:
            return
        for row in batch_update.removed:
            self.rows.pop(row, None)
        for row, params, _, tokens in batch_update.added:
            self.rows.pop(row, None)
            if params.extra_args and NUMBER_KEY in params.extra_args:  # not in a warm-up
                self.rows[row] = params.extra_args[NUMBER_KEY], tokens
        for source, target, direction in batch_update.moved:
            moved, replaced = self.rows.pop(source, None), self.rows.pop(target, None)
            if moved is not None:
                self.rows[target] = moved
            if replaced is not None and direction.name == "SWAP":
                self.rows[source] = replaced

    def apply(self, logits: Tensor) -> Tensor:
        """logits [rows, V] float32 -> the same, where the drawn token of each row is the most
        likely one.
        """
        drawn = []  # (row, request, index of the token)
        for row, (number, tokens) in sorted(self.rows.items()):
            request = self.requests.get(number)
            if request is not None and row < len(logits) and len(tokens) < len(request.noise):
                drawn.append((row, request, len(tokens)))
        if not drawn or self.errors:
            return logits
        rows = torch.tensor([row for row, _, _ in drawn], device=logits.device)
        try:
            draws = sample_rows(
                logits[rows],
                noise=[request.noise[index] for _, request, index in drawn],
                params=[request.params for _, request, _ in drawn],
            )
        except RuntimeError as error:  # the model has diverged, or there is no memory
            self.errors.append(error)
            return logits
        logps = draws.logps.tolist()
        for place, (_, request, index) in enumerate(drawn):
            request.logps[index:] = [logps[place]]
            if place in draws.candidates:
                request.candidates[index:] = [draws.candidates[place].cpu().numpy()]
        logits[rows, draws.tokens] = torch.inf
        return logits


def sampler_class(requests: dict[int, Request], errors: list[Exception]) -> type:
    """A logits processor for the requests of an engine: vLLM makes its objects itself."""
    from vllm.v1.sample.logits_processor import LogitsProcessor

    attributes = {"requests": requests, "errors": errors}
    return type("Sampler", (Sampler, LogitsProcessor), attributes)


def vllm_params(params: SamplingParams, number: int) -> Any:
    """How vLLM itself samples: it takes what our sampler has drawn, and ends at stop tokens."""
    from vllm import SamplingParams as VLLMParams
    from vllm.sampling_params import RequestOutputKind

    return VLLMParams(
        temperature=0.0,
        max_tokens=params.max_new_tokens,
        stop_token_ids=list(params.stop_token_ids),
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={NUMBER_KEY: number},
    )
