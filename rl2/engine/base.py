"""What every rollout engine promises: the protocol, and the types of its settings, requests and answers."""

import asyncio
import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingParams:
    """How one answer is sampled. The defaults here are the only declaration of them."""

    temperature: float = 1.0
    """divides the logits; 0 is greedy"""
    top_p: float = 1.0
    """sample from the most likely tokens that hold this share of the probability"""
    top_k: int = -1
    """sample from this many most likely tokens; -1 is all"""
    max_new_tokens: int = 512
    stop_token_ids: tuple[int, ...] = ()
    """tokens that end the answer; without any, the answer has max_new_tokens tokens"""


@dataclass
class Generation:
    """One answer: new tokens only, a sampled stop token included."""

    tokens: list[int]
    logps: list[float]
    """log-probability of each token in softmax(logits / temperature), before top_p and top_k"""
    finish_reason: str
    """stop (a stop token), length (max_new_tokens), or abort (cut short by `Engine.abort`)"""
    version: int | None
    """the engine's version when the answer ended"""


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is built from. An engine ignores the fields that it has no use for."""

    model_name: str
    """folder or hub name of the Hugging Face causal LM that all engines start from"""
    dtype: torch.dtype
    """of weights, keys and values"""
    device: torch.device
    """of this rank"""
    max_running_requests: int = 64
    """requests that one engine decodes at a time; the others wait"""
    deterministic: bool = True
    """an answer depends on prompt, params and seed only, not on the other requests"""
    max_length: int | None = None
    """most tokens of prompt and answer together; None: the model's positions"""
    tp_size: int = 1
    """ranks of one node that share an engine"""
    gpu_memory_utilization: float = 0.6
    """share of a GPU's memory that an engine in other processes may take"""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """further arguments of the engine's own library"""
    seed: int = 0
    """of the run; an engine with randomness of its own mixes it with `rank`"""
    rank: int = 0
    world_size: int = 1


class Engine(Protocol):
    """Generates answers with the weights that the trainer sends. One object on every rank of the job.

    The constructor takes one `EngineSettings`. All ranks call every verb but `generate`, in the same order, from the
    main thread, while no `generate` is in flight; `abort` is the exception to both. An engine that spans ranks or
    processes may communicate in any verb.

    States: awake with weights (after construction), asleep (after `sleep`), and awake without weights (after `wake`,
    in engines that free their weights). A training step calls `generate`..., `sleep`, `wake`, `load_weights`.
    """

    index: int | None
    """number of this rank's engine, 0 to count - 1; None: this rank only serves the engine of another rank"""
    count: int
    """engines of the whole job"""
    max_running_requests: int
    """requests that this engine decodes at a time"""
    version: int | None
    """of the loaded weights, 0 at the start; None: a load failed half way, and only a complete load mends that"""
    loop: asyncio.AbstractEventLoop
    """the event loop that `generate` runs on; the caller runs it, and it does not run between rollouts"""

    @abstractmethod
    async def generate(
        self, prompt: list[int], params: SamplingParams, seed: tuple[int, ...]
    ) -> Generation:
        """Samples an answer to the token ids `prompt`.

        For ranks with an `index`, on `loop`, awake, with weights. Any number of calls may be in flight; those beyond
        `max_running_requests` wait. Cancelling the call frees its place. The noise of new token i is a function of
        `seed` and i alone, where the engine is deterministic. ValueError for a request that can never be answered
        (see `check_request`); RuntimeError if the model or the engine fails.
        """

    @abstractmethod
    def abort(self) -> None:
        """Ends every request in flight: its `generate` returns the tokens it has, with finish_reason abort.

        Called on `loop`, or while it does not run; on any rank, without the others. A request that is still on its way
        to another process may be missed, so the caller repeats it until no request is in flight. Harmless when idle.
        """

    @abstractmethod
    def sleep(self) -> None:
        """Gives the memory of keys, values and weights back to the trainer, as far as the engine can."""

    @abstractmethod
    def wake(self) -> None:
        """Prepares a sleeping engine for `load_weights`, which must follow before the next `generate`."""

    @abstractmethod
    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replaces all weights by full tensors with Hugging Face names, and sets `version`.

        Every rank must exhaust `named_tensors`, since making them may communicate. A tied head may be left out.
        ValueError or RuntimeError if the weights do not fit the model; `version` is None then.
        """

    @abstractmethod
    def verify_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Compares all weights with these, bit by bit, and sets `version`. RuntimeError names those that differ.

        The arguments are those of `load_weights`. An engine that cannot compare loads them instead.
        """

    @abstractmethod
    def close(self) -> None:
        """Cancels what is in flight and ends the engine's processes. Nothing may be called after it but `close`."""


def max_request_tokens(settings: EngineSettings, model_config: Any) -> float:
    """Most tokens of prompt and answer together: the smaller of the setting and the model's positions, or infinity."""
    positions = getattr(model_config, "max_position_embeddings", None)
    return min(settings.max_length or math.inf, positions or math.inf)


def check_request(
    prompt: list[int], params: SamplingParams, vocabulary: int, max_length: float
) -> None:
    """ValueError for a request that can never be answered by a model of `vocabulary` tokens and `max_length` positions."""
    new = params.max_new_tokens
    if not isinstance(new, int) or new < 1:
        raise ValueError(f"max_new_tokens={new}: expected at least 1")
    if not params.temperature >= 0:
        raise ValueError(f"temperature={params.temperature}: expected at least 0 (0 is greedy)")
    if not 0 < params.top_p <= 1:
        raise ValueError(f"top_p={params.top_p}: expected more than 0 and at most 1")
    if params.top_k != -1 and params.top_k < 1:
        raise ValueError(f"top_k={params.top_k}: expected at least 1, or -1 for all tokens")
    if not prompt:
        raise ValueError("the prompt has no tokens")
    if not 0 <= min(prompt) <= max(prompt) < vocabulary:
        raise ValueError(
            f"prompt token ids {min(prompt)} to {max(prompt)}: the vocabulary is 0 to {vocabulary - 1}"
        )
    if len(prompt) + new > max_length:
        raise ValueError(
            f"prompt of {len(prompt)} + max_new_tokens={new} exceeds {max_length} tokens"
        )
