"""What every rollout engine promises: the protocol, and the types of its settings and answers."""

import asyncio
import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from rl2.config.schema import WorkerConfig
from rl2.engine.sampling_params import SamplingParams as SamplingParams  # a part of the protocol
from rl2.model.classes import is_adapter

NamedTensors = Iterable[tuple[str, Tensor]]  # full weights by their Hugging Face names
Seed = tuple[int, ...]  # of one answer; each number may be of any size
# Which part of a GPU's free memory SGLang or vLLM takes by default. The rest is for it to compute,
# and beside a trainer for the weights that it sends.
SHARE_BESIDE_TRAINER = 0.6
SHARE_OF_OWN_GPU = 0.85
# Sequences that an engine decodes at a time by default. A step of SGLang or vLLM on a GPU hardly
# takes longer with four times as many, and those that have no room for their keys and values wait.
# The embedded engine has that room for all of them from the start.
MAX_RUNNING = 64
MAX_RUNNING_ON_GPU = 256


@dataclass
class Generation:
    """One answer: the new tokens only. What stops it is part of it."""

    tokens: list[int]
    logps: list[float]
    """log-probability of each token in softmax(logits / temperature), after penalties and before
    top_p, top_k and min_p; with `candidates` among these alone"""
    finish_reason: str
    """stop (a stop token or text), length (max_new_tokens), or abort (by `Engine.abort`)"""
    version: int | None
    """the engine's version when the answer ended"""
    candidates: list[np.ndarray] | None = None
    """for each token the ids int32 that top_p, top_k and min_p left to draw from, if the request
    asks for them and the engine can tell"""
    experts: np.ndarray | None = None
    """[tokens, routers, choices] int16: the experts of the tokens from `experts_from` of the
    request to the last but one, if it asks for them"""


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is built from. An engine ignores the fields that it has no use for."""

    model_name: str
    """folder or hub name of the Hugging Face causal LM that all engines start from"""
    dtype: torch.dtype
    """of weights, keys and values"""
    device: torch.device
    """of this rank"""
    max_running_requests: int = MAX_RUNNING
    """requests that one engine decodes at a time; the others wait"""
    deterministic: bool = True
    """an answer depends on prompt, params and seed only, not on the other requests"""
    exact: bool = False
    """log-probabilities have the bits of the trainer's; needs `deterministic`"""
    tp_size: int = 1
    """ranks of one node that share an engine"""
    with_experts: bool = False
    """requests may have `experts_from`. ValueError for a model or an engine that cannot tell them
    """
    adapters: WorkerConfig | None = None
    """the actor whose adapters the engine puts beside the weights of `model_name`, and applies;
    None: the trainer sends merged weights. Values of adapters have to be loaded before the first
    `generate`"""
    stop: Sequence[str] = ()
    """texts that `SamplingParams.stop` of any request may have"""
    gpu_memory_utilization: float = SHARE_BESIDE_TRAINER
    """share of the memory that is free on its GPU when it starts that SGLang or vLLM takes"""
    engine_args: dict[str, object] = field(default_factory=dict)
    """further arguments of the engine's own library"""
    server_urls: Sequence[str] = ()
    """where engines run, with the engine "server\""""
    shared_dir: str = ""
    """folder through which their weights go"""
    seed: int = 0
    """of the run; an engine with randomness of its own adds `rank` to it"""
    rank: int = 0
    """of this process, among `world_size` processes of the job"""
    world_size: int = 1


def default_max_running(kind: str, device: torch.device) -> int:
    """Sequences that an engine of this kind decodes at a time, where no key says it."""
    return MAX_RUNNING if kind == "local" or device.type == "cpu" else MAX_RUNNING_ON_GPU


class Engine(Protocol):
    """Generates answers with the weights that the trainer sends. Every rank that samples has one.

    The constructor takes one `EngineSettings`; all ranks call it. All ranks also call every verb
    but `generate` and `abort`, in the same order, from the main thread, while `loop` does not run
    and no request is in flight. An engine may communicate between ranks in these verbs.

    An engine is awake with weights after construction, asleep after `sleep`, and awake again after
    `wake`; it may have lost its weights then. A training step calls `generate` many times, then
    `sleep`, `wake` and `load_weights`.
    """

    index: int | None
    """number of this rank's engine, 0 to count - 1; None: this rank serves another rank's engine"""
    count: int
    """engines of the whole job"""
    max_running_requests: int
    """requests that this engine decodes at a time"""
    version: int | None
    """of the weights, 0 at the start; None: weights have to be loaded first, since a load failed,
    adapters have no values yet, or a sleep may have lost the weights"""
    loop: asyncio.AbstractEventLoop
    """runs `generate`; the caller runs it, one rollout at a time"""

    @abstractmethod
    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, seed: Seed
    ) -> Generation:
        """Samples an answer to the token ids `prompt`.

        Only ranks with an `index` call it, on `loop`, while the engine is awake and `version` is
        not None. Any number of calls may be in flight; those beyond `max_running_requests` wait.
        In a deterministic engine the noise of new token i is a function of `seed` and i alone.
        ValueError for a request that can never be answered, see `check_request`; RuntimeError if
        the model or the engine fails.
        """

    @abstractmethod
    def abort(self) -> None:
        """Ends all requests in flight: `generate` returns the tokens so far, with reason abort.

        Any rank calls it alone, also from a task on `loop`. A request that is on its way to another
        process may be missed, so the caller repeats the call until none is in flight. Without any
        it does nothing.
        """

    @abstractmethod
    def sleep(self) -> None:
        """Gives the memory of keys, values and weights to the trainer, as far as it is able to."""

    @abstractmethod
    def wake(self) -> None:
        """Ends the sleep. `load_weights` has to follow before the next `generate`."""

    @abstractmethod
    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Replaces all weights by full tensors with Hugging Face names, and sets `version`.

        Every rank passes all tensors, since making them may communicate. A tied head may be left
        out. An engine with adapters takes all of these alone too: then the other weights stay.
        ValueError or RuntimeError if the weights do not fit the model; `version` is None then.
        """

    @abstractmethod
    def verify_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Compares all weights with the tensors, bit by bit, and sets `version`.

        The arguments are those of `load_weights`. RuntimeError names the weights that differ. An
        engine that cannot compare loads the tensors instead.
        """

    @abstractmethod
    def close(self) -> None:
        """Cancels what is in flight and frees memory and processes. Nothing else may follow."""


def single_seed(seed: Seed) -> int:
    """One number of 31 bits, for engines that take one."""
    return int(np.random.SeedSequence(seed).generate_state(1)[0] >> 1)


def max_request_tokens(model_config: PreTrainedConfig) -> float:
    """Most tokens of prompt and answer: the model's positions, or infinity."""
    text = model_config.get_text_config()
    return getattr(text, "max_position_embeddings", None) or math.inf


def check_request(
    prompt: Sequence[int], params: SamplingParams, vocabulary: int, max_length: float
) -> None:
    """ValueError for a request that can never be answered.

    `vocabulary` is the model's number of tokens, `max_length` the most tokens of a request.
    """
    new = params.max_new_tokens
    if not isinstance(new, int) or new < 1:
        raise ValueError(f"max_new_tokens={new}: expected at least 1")
    if not params.temperature >= 0:
        raise ValueError(f"temperature={params.temperature}: expected at least 0 (0 is greedy)")
    if not 0 < params.top_p <= 1:
        raise ValueError(f"top_p={params.top_p}: expected more than 0 and at most 1")
    if params.top_k != -1 and params.top_k < 1:
        raise ValueError(f"top_k={params.top_k}: expected at least 1, or -1 for all tokens")
    if not 0 <= params.min_p < 1:
        raise ValueError(f"min_p={params.min_p}: expected at least 0 (off) and less than 1")
    if not 0 < params.repetition_penalty <= 2:
        raise ValueError(f"repetition_penalty={params.repetition_penalty}: expected above 0, to 2")
    if not (-2 <= params.frequency_penalty <= 2 and -2 <= params.presence_penalty <= 2):
        values = f"{params.frequency_penalty} and {params.presence_penalty}"
        raise ValueError(f"frequency and presence penalty {values}: expected -2 to 2 (0 is off)")
    if isinstance(params.stop, str) or not all(isinstance(x, str) and x for x in params.stop):
        raise ValueError(f"stop={params.stop!r}: expected a list of texts that are not empty")
    if not prompt:
        raise ValueError("the prompt has no tokens")
    if not 0 <= min(prompt) <= max(prompt) < vocabulary:
        ids = f"prompt token ids {min(prompt)} to {max(prompt)}"
        raise ValueError(f"{ids}: the vocabulary is 0 to {vocabulary - 1}")
    if len(prompt) + new > max_length:
        raise ValueError(
            f"prompt of {len(prompt)} + max_new_tokens={new} exceeds {max_length} tokens"
        )


def pair_weights(
    model: nn.Module, named_tensors: NamedTensors
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yields (name, the model's weight, the tensor for it) of each tensor.

    A buffer that is saved with the model is a weight too. Adapters may come alone, see
    `Engine.load_weights`. ValueError for a name that is unknown or missing, and for a wrong shape.
    """
    weights = model.state_dict(keep_vars=True)
    missing = {id(weight): name for name, weight in weights.items()}  # tied weights once
    arrived = []
    for name, tensor in named_tensors:
        arrived.append(name)
        if name not in weights:
            raise ValueError(f"weight {name} is unknown to {type(model).__name__}")
        weight = weights[name]
        if tensor.shape != weight.shape:
            shapes = f"{list(tensor.shape)}, expected {list(weight.shape)}"
            raise ValueError(f"weight {name} is {shapes}")
        missing.pop(id(weight), None)
        yield name, weight, tensor
    adapters_came_alone = bool(arrived) and all(map(is_adapter, arrived))
    lacking = [name for name in missing.values() if is_adapter(name) or not adapters_came_alone]
    if lacking:
        raise ValueError(f"{len(lacking)} weights did not arrive: {sorted(lacking)[:5]}")
