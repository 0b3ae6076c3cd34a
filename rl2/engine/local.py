"""The embedded engine: continuous batching of any Hugging Face causal LM in the trainer's process.

A request waits for a slot. Then its prompt is prefilled, all but the last token, once for all
requests with the same prompt. Then every step feeds one token of every slot and samples the next
one. A slot is filled again before the next step once its request has ended. Recurrent layers have
states in the place of keys and values, see states.py.

Which bits are equal follows from the shapes of its calls, see shapes.py.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from rl2.engine.base import (
    Engine,
    EngineSettings,
    Generation,
    NamedTensors,
    SamplingParams,
    Seed,
    check_request,
    max_request_tokens,
    pair_weights,
)
from rl2.engine.cache import DenseKVCache, KVCache, PrefillAttention, PromptKV
from rl2.engine.linear import head_logits, pack_linear_layers, unpack_linear_layers
from rl2.engine.sampler import penalize_, sample_rows, uniform_noise
from rl2.engine.shapes import choose_shapes
from rl2.engine.stop import StopSearch
from rl2.model.classes import is_recurrent, language_model_class
from rl2.model.logits import LogitSettings
from rl2.model.weight_files import read_weights

if TYPE_CHECKING:  # a model without such layers does not need the files
    from rl2.engine.states import PromptStates, SlotStates
    from rl2.model.moe import Routing


@dataclass(eq=False)
class _Prompt:
    """A prompt that requests share."""

    tokens: tuple[int, ...]
    num_waiting: int = 0  # requests with this prompt that have no slot yet
    # Of all tokens but the last, while requests wait for it.
    kv: PromptKV | None = None
    states: "PromptStates" = field(default_factory=dict)
    experts: Tensor | None = None  # [all tokens but the last, R, K] once known, see `Routing`


@dataclass(eq=False)
class _Request:
    prompt: _Prompt
    params: SamplingParams
    noise: np.ndarray  # uniform, one number for each new token
    future: asyncio.Future[Generation]
    stop_search: StopSearch | None
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    candidates: list[np.ndarray] = field(default_factory=list)  # of each token, or empty
    experts: list[Tensor] = field(default_factory=list)  # [1, R, K] of each token that was fed

    def append(self, token: int, logp: float, candidates: Tensor | None) -> str | None:
        """Adds a new token. Returns the finish reason if it is the last one, else None."""
        self.tokens.append(token)
        self.logps.append(logp)
        if candidates is not None:
            self.candidates.append(candidates.cpu().numpy())
        is_stop = token in self.params.stop_token_ids
        if is_stop or (self.stop_search and self.stop_search.feed([token])):
            return "stop"
        if len(self.tokens) == self.params.max_new_tokens:
            return "length"
        return None

    def finish(self, reason: str, version: int | None) -> None:
        """Returns the answer to the caller of `generate`, who may have cancelled it."""
        if self.future.done():
            return
        experts = None  # also where it is aborted before it has a slot
        if self.params.experts_from is not None and self.prompt.experts is not None:
            of_all = torch.cat([self.prompt.experts] + self.experts)
            experts = of_all[self.params.experts_from :].numpy()
        self.future.set_result(
            Generation(
                tokens=self.tokens,
                logps=self.logps,
                finish_reason=reason,
                version=version,
                candidates=self.candidates or None,
                experts=experts,
            )
        )


class LocalEngine(Engine):
    """One engine a rank, each with a whole model. ValueError for a model that it cannot compute.

    A request runs in one of `max_running_requests` slots.
    """

    def __init__(self, settings: EngineSettings):
        self.index = settings.rank
        self.count = settings.world_size
        self.max_running_requests = settings.max_running_requests
        self.device = settings.device
        # The attention "rl2" calls what a forward is given as `attend`, see attention/kernels.py.
        config = AutoConfig.from_pretrained(settings.model_name)
        model_class = language_model_class(config)
        model, _ = read_weights(
            model_class, settings.model_name, config, settings.dtype, attn_implementation="rl2"
        )
        self.adapters = settings.adapters
        if self.adapters is not None:
            from rl2.model import lora

            lora.inject_for_engine(model, self.adapters, settings.dtype)
        self.model = model.eval().requires_grad_(False).to(self.device)
        self.states: SlotStates | None = None  # of recurrent layers
        if any(map(is_recurrent, self.model.modules())):
            from rl2.engine import states

            self.states = states.SlotStates(self.model, self.max_running_requests)
        exact = settings.exact and self.states is None  # see TokenModel
        pack_linear_layers(self.model, self.max_running_requests, exact)
        self.shapes = choose_shapes(settings, self.model, exact)
        self.routing: Routing | None = None  # if choices of experts are told
        if settings.with_experts:
            from rl2.model import moe

            self.routing = moe.Routing(settings.model_name, self.model)
        self.tokenizer: Any = None  # decodes answers to find stop strings
        if settings.stop:
            self.tokenizer = AutoTokenizer.from_pretrained(settings.model_name)
        self.logits = LogitSettings.of(self.model.config)
        self.max_length = max_request_tokens(self.model.config)
        self.loop = asyncio.new_event_loop()
        self.version: int | None = 0 if self.adapters is None else None
        self.waiting: deque[_Request] = deque()
        self.slots: list[_Request | None] = [None] * self.max_running_requests
        self.prompts: dict[tuple[int, ...], _Prompt] = {}  # of the requests that wait
        self.cache = self._new_cache()
        self._task: asyncio.Task[None] | None = None
        trial = _Prompt((0, 0))
        self._prefill([trial])  # ValueError for attention that the cache does not know
        if self.states is not None:
            self.states.example = trial.states

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, seed: Seed
    ) -> Generation:
        """Samples an answer, see Engine.generate.

        Requests with equal prompts share one prefill. Cancelling the call frees its slot.
        """
        assert asyncio.get_running_loop() is self.loop, "generate runs on engine.loop only"
        assert self.version is not None, (
            "the weights are incomplete: call load_weights, after wake if the engine sleeps"
        )
        vocabulary = self.model.get_input_embeddings().num_embeddings
        check_request(prompt, params, vocabulary, self.max_length)
        tokens = tuple(prompt)
        request = _Request(
            prompt=self.prompts.setdefault(tokens, _Prompt(tokens)),
            params=params,
            noise=uniform_noise(seed, params.max_new_tokens),
            future=self.loop.create_future(),
            stop_search=StopSearch(self.tokenizer, tokens, params) if params.stop else None,
        )
        request.prompt.num_waiting += 1
        self.waiting.append(request)
        if self._task is None or self._task.done():
            self._task = self.loop.create_task(self._run())
        return await request.future

    def abort(self) -> None:
        for request in self._unfinished():
            request.finish("abort", self.version)
        self.waiting.clear()
        self.prompts.clear()
        self.slots = [None] * self.max_running_requests

    def sleep(self) -> None:
        """Gives back the memory of keys and values, and on a GPU that of the weights.

        With adapters the weights stay, since the trainer does not send all of them again.
        """
        assert not self._unfinished(), "sleep with requests in flight"
        self.version = None
        self._forget()
        unpack_linear_layers(self.model)
        if self.device.type != "cpu" and self.adapters is None:
            for weight in self.model.parameters():
                weight.untyped_storage().resize_(0)
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Takes the memory of the weights again. Those that `sleep` gave back are lost."""
        if self.device.type != "cpu" and self.adapters is None:
            for weight in self.model.parameters():
                weight.untyped_storage().resize_(weight.nbytes)

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Copies the tensors into the model, see Engine.load_weights.

        ValueError for a name that is unknown or missing, and for a wrong shape.
        """
        assert not self._unfinished(), "load_weights with requests in flight"
        self.version = None
        for _, weight, tensor in pair_weights(self.model, named_tensors):
            weight.data.copy_(tensor)
        pack_linear_layers(self.model, self.max_running_requests, self.shapes.exact)
        self.version = version

    def verify_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Compares the tensors with the model's, see Engine.verify_weights.

        ValueError as in `load_weights`.
        """
        different = []
        for name, weight, tensor in pair_weights(self.model, named_tensors):
            if not torch.equal(weight, tensor.to(weight)):
                different.append(name)
        if different:
            raise RuntimeError(
                f"{len(different)} weights of the engine are not the trainer's: {different[:5]}"
            )
        self.version = version

    def close(self) -> None:
        """Cancels what is in flight and frees all memory."""
        for request in self._unfinished():
            request.future.cancel()
        self.model = None
        self._forget()
        if not self.loop.is_running():
            self.loop.close()

    def _unfinished(self) -> list[_Request]:
        """The requests that `generate` has not answered yet."""
        requests = list(self.waiting) + self.slots
        return [request for request in requests if request and not request.future.done()]

    async def _run(self) -> None:
        """Steps while there are requests. Other tasks on the loop run between steps."""
        try:
            while self._admit():
                self._step()
                await asyncio.sleep(0)
        except Exception as error:  # every caller of generate gets it, whatever it is
            for request in self._unfinished():
                request.future.set_exception(error)
            self.abort()
            self._forget()  # keys, values and states may be NaN

    @torch.inference_mode()
    def _admit(self) -> bool:
        """Gives free slots to waiting requests and prefills their prompts.

        Returns whether any slot is busy.
        """
        admitted: dict[_Prompt, list[int]] = {}  # the new slots of each prompt
        for slot, held in enumerate(self.slots):
            if held is None or held.future.done():  # cancelled
                request = self.slots[slot] = self._next_waiting()
                if request is not None:
                    admitted.setdefault(request.prompt, []).append(slot)
        for batch in self._prefill_batches([prompt for prompt in admitted if prompt.kv is None]):
            self._prefill(batch)
        for prompt, slots in admitted.items():
            assert prompt.kv is not None
            self.cache.write_prompt(prompt.kv, slots)
            if self.states is not None:
                self.states.write(prompt.states, slots)
            if not prompt.num_waiting:
                prompt.kv = None
                prompt.states = {}
        return any(self.slots)

    def _next_waiting(self) -> _Request | None:
        """Takes the first request that was not cancelled from those that wait."""
        while self.waiting:
            request = self.waiting.popleft()
            request.prompt.num_waiting -= 1
            if not request.prompt.num_waiting:
                self.prompts.pop(request.prompt.tokens)
            if not request.future.done():
                return request
            if not request.prompt.num_waiting:  # the last one was cancelled
                request.prompt.kv = None
                request.prompt.states = {}
        return None

    def _new_cache(self) -> KVCache:
        """An empty cache."""
        kind = KVCache if self.shapes.paged else DenseKVCache
        return kind(self.max_running_requests)

    def _forget(self) -> None:
        """Frees the memory of keys, values and states."""
        self.cache = self._new_cache()
        if self.states is not None:
            self.states.slots.clear()

    def _prefill_batches(self, prompts: list[_Prompt]) -> list[list[_Prompt]]:
        """The prompts of each forward."""
        limit = self.shapes.prefill_limit()
        batches: list[list[_Prompt]] = []
        num_tokens = 0  # of the last one
        for prompt in prompts:
            num_tokens += len(prompt.tokens)
            if not batches or num_tokens > limit:
                batches.append([])
                num_tokens = len(prompt.tokens)
            batches[-1].append(prompt)
        return batches

    @torch.inference_mode()
    def _prefill(self, prompts: list[_Prompt]) -> None:
        """Computes the keys, values and states of all tokens but the last of each prompt.

        The last one is the first to decode.
        """
        lengths: list[int] = []
        tokens: list[int] = []
        positions: list[int] = []
        for prompt in prompts:
            length = len(prompt.tokens) - 1
            lengths.append(length)
            tokens += prompt.tokens[:-1]
            positions += range(length)
        padding = [0] * (self.shapes.prefill_rows(len(tokens), len(prompts)) - len(tokens))
        attention = PrefillAttention(lengths, self.device, self.shapes.exact)
        if self.states is not None:
            self.states.begin_prefill(lengths, [prompt.states for prompt in prompts])
        if tokens or padding:
            inputs = torch.tensor([tokens + padding, positions + padding], device=self.device)
            self.model.base_model(
                inputs[:1], position_ids=inputs[1:], use_cache=False, attend=attention
            )
        experts = None if self.routing is None else self.routing.last_choices()
        end = 0
        for prompt, length in zip(prompts, lengths, strict=True):
            start, end = end, end + length
            prompt.kv = attention.prompt(start, end)
            if experts is not None:
                prompt.experts = experts[start:end]

    @torch.inference_mode()
    def _step(self) -> None:
        """Samples one token for every busy slot and ends the requests that are complete."""
        num_rows = self._num_step_rows()
        requests = self.slots[:num_rows]
        # What is fed and how the next token is drawn; free slots compute something too.
        tokens, positions, noise = [0] * num_rows, [0] * num_rows, [0.0] * num_rows
        params = [SamplingParams()] * num_rows
        for slot, request in enumerate(requests):
            if request is not None:
                num_new = len(request.tokens)
                tokens[slot] = request.tokens[-1] if request.tokens else request.prompt.tokens[-1]
                positions[slot] = len(request.prompt.tokens) + num_new - 1
                noise[slot] = request.noise[num_new]
                params[slot] = request.params
        logits = self._decode(tokens, positions)
        experts = None if self.routing is None else self.routing.last_choices()  # [n, R, K]
        for slot, request in enumerate(requests):
            if request is not None and request.params.has_penalties:
                penalize_(logits[slot], request.prompt.tokens, request.tokens, request.params)
        draws = sample_rows(logits, noise, params)
        sampled = zip(requests, draws.tokens.tolist(), draws.logps.tolist(), strict=True)
        for slot, (request, token, logp) in enumerate(sampled):
            if request is None:
                continue
            if experts is not None:
                request.experts.append(experts[slot : slot + 1])
            reason = request.append(token, logp, draws.candidates.get(slot))
            if reason is not None:
                self.slots[slot] = None
                request.finish(reason, self.version)

    def _decode(self, tokens: list[int], positions: list[int]) -> Tensor:
        """The logits [n, V] after one token of each of the first n slots."""
        inputs = torch.tensor([tokens, positions], device=self.device)
        self.cache.begin_step(inputs[1], max(positions))
        if self.states is not None:
            self.states.begin_step()
        token_ids, position_ids = inputs[:, :, None]  # [n, 1] each
        body = self.model.base_model(
            token_ids, position_ids=position_ids, use_cache=False, attend=self.cache
        )
        head = self.model.get_output_embeddings()
        return self.logits.finish(head_logits(head, body.last_hidden_state[:, -1]), slice(None))

    def _num_step_rows(self) -> int:
        """How many slots to decode, from the first one on.

        If free slots need not be decoded, busy ones move to the front.
        """
        busy = [slot for slot, request in enumerate(self.slots) if request]
        num_rows = self.shapes.step_rows(len(busy))
        free = [slot for slot in range(num_rows) if self.slots[slot] is None]
        outside = [slot for slot in reversed(busy) if slot >= num_rows]
        for source, target in zip(outside, free, strict=False):
            self.cache.move_slot(source, target)
            if self.states is not None:
                self.states.move_slot(source, target)
            self.slots[target] = self.slots[source]
            self.slots[source] = None
        return num_rows
