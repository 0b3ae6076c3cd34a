"""The embedded engine: continuous batching in plain torch around any Hugging Face causal LM, in the trainer's process.

A request waits for a slot, its prompt but for the last token is prefilled (once for all requests with that prompt), and
then every step feeds one token of every slot and samples the next. A slot that is done is refilled before the next step.

Bits: kernels choose their order of summation by shape, so a row's rounding can depend on how many rows and keys share
its call, though not on what the others hold. With `deterministic` every call has a constant shape: all slots decode in
every step, busy or not, attention goes over pages of PAGE keys, and each prompt is prefilled alone. Tokens and logps are
then bit-equal whatever else is in flight.

Shapes: S slots, n rows of a step (the first n slots), H query heads, G key heads, D head size, N pages, P keys a page,
V vocabulary.
"""

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rl2.engine.base import (
    Engine,
    EngineSettings,
    Generation,
    SamplingParams,
    check_request,
    max_request_tokens,
)
from rl2.engine.cache import _Cache
from rl2.engine.sampler import sample
from rl2.parallel.ring import PackedAttention

ROWS = 8  # without `deterministic`, a step has a multiple of this many rows


PREFILL = 2048  # tokens of prompts that are prefilled in one forward, without `deterministic`


@dataclass(eq=False)
class _Prompt:
    tokens: tuple[int, ...]
    waiting: int = 0  # requests with this prompt that have no slot yet
    kv: dict | None = None  # layer -> keys and values [G, L - 1, D], while requests wait for it


@dataclass(eq=False)
class _Request:
    prompt: _Prompt
    params: SamplingParams
    noise: np.ndarray  # uniform, one for each new token
    future: asyncio.Future
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)

    def next_input(self) -> tuple[int, int, float]:
        """The token to feed, its position, and the noise that draws the one after it."""
        token = self.tokens[-1] if self.tokens else self.prompt.tokens[-1]
        return token, len(self.prompt.tokens) + len(self.tokens) - 1, self.noise[len(self.tokens)]

    def append(self, token: int, logp: float) -> str | None:
        """Returns why this was the last token, or None."""
        self.tokens.append(token)
        self.logps.append(logp)
        if token in self.params.stop_token_ids:
            return "stop"
        return "length" if len(self.tokens) == self.params.max_new_tokens else None


class LocalEngine(Engine):
    """`max_running_requests` are its slots."""

    def __init__(self, settings: EngineSettings):
        self.index = settings.rank
        self.count = settings.world_size
        self.model = AutoModelForCausalLM.from_pretrained(
            settings.model_name, dtype=settings.dtype, attn_implementation="rl2"
        )
        self.model.to(settings.device).eval().requires_grad_(False)
        self.device = torch.device(settings.device)
        self.max_running_requests = settings.max_running_requests
        self.deterministic = settings.deterministic
        self.max_length = max_request_tokens(settings, self.model.config)
        self.loop = asyncio.new_event_loop()
        self.version: int | None = 0  # None: a load failed half way
        self.waiting: deque[_Request] = deque()
        self.slots: list[_Request | None] = [None] * self.max_running_requests
        self.prompts: dict[tuple, _Prompt] = {}  # those that requests wait with
        self.cache: _Cache | None = _Cache(self.max_running_requests)  # None: asleep
        self._task = None
        self._prepack()

    async def generate(
        self, prompt: list[int], params: SamplingParams, seed: tuple[int, ...]
    ) -> Generation:
        """Samples an answer to the token ids `prompt`.
        The noise of new token i is a function of `seed` and i alone. ValueError for what can never be answered."""
        assert asyncio.get_running_loop() is self.loop, "generate runs on engine.loop only"
        assert self.cache is not None, "generate on a sleeping engine: call wake first"
        assert self.version is not None, "the weights are incomplete: the last load failed"
        vocabulary = self.model.get_input_embeddings().num_embeddings
        check_request(prompt, params, vocabulary, self.max_length)
        noise = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed))).random(
            params.max_new_tokens
        )
        key = tuple(prompt)
        request = _Request(
            self.prompts.setdefault(key, _Prompt(key)), params, noise, self.loop.create_future()
        )
        request.prompt.waiting += 1
        self.waiting.append(request)
        if self._task is None or self._task.done():
            self._task = self.loop.create_task(self._run())
        return await request.future

    def abort(self):
        """Every request returns what it has got, with finish_reason abort."""
        for request in (*self.waiting, *filter(None, self.slots)):
            if not request.future.done():
                request.future.set_result(
                    Generation(request.tokens, request.logps, "abort", self.version)
                )
        self.waiting.clear()
        self.prompts.clear()
        self.slots = [None] * self.max_running_requests

    def sleep(self):
        """Gives back the memory of keys and values, and on a GPU that of the weights."""
        assert not self.in_flight, f"sleep with {self.in_flight} requests in flight"
        self.cache = None
        self._unpack()
        if self.device.type != "cpu":
            self.model.to("cpu")
            torch.cuda.empty_cache()

    def wake(self):
        """Ready again, with the weights it slept with."""
        self.model.to(self.device)
        self.cache = _Cache(self.max_running_requests)
        self._prepack()

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int):
        """Copies full tensors with Hugging Face names into the model. ValueError for an unknown or missing name or a
        wrong shape, after which only a complete load makes the engine usable. A tied head may be left out."""
        assert not self.in_flight, f"load with {self.in_flight} requests in flight"
        self.version = None
        targets = self.model.state_dict(keep_vars=True)
        missing = {id(tensor): name for name, tensor in targets.items()}
        for name, tensor in named_tensors:
            if name not in targets:
                raise ValueError(f"weight {name} is unknown to {type(self.model).__name__}")
            if tensor.shape != targets[name].shape:
                raise ValueError(
                    f"weight {name} is {list(tensor.shape)}, expected {list(targets[name].shape)}"
                )
            targets[name].data.copy_(tensor)
            missing.pop(id(targets[name]), None)
        if missing:
            raise ValueError(
                f"{len(missing)} weights did not arrive: {sorted(missing.values())[:5]}"
            )
        self.version = version
        if self.cache is not None:
            self._prepack()

    def verify_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int):
        """The weights must be these already, bit by bit: RuntimeError names those that are not."""
        held = self.model.state_dict()
        wrong = [
            name
            for name, tensor in named_tensors
            if not torch.equal(held[name], tensor.to(held[name]))
        ]
        if wrong:
            raise RuntimeError(
                f"{len(wrong)} weights of the engine are not the trainer's: {wrong[:5]}"
            )
        self.version = version

    def close(self):
        """Cancels what is in flight and lets go of all memory."""
        for request in (*self.waiting, *filter(None, self.slots)):
            request.future.cancel()
        self.model = self.cache = None
        if not self.loop.is_running():
            self.loop.close()

    @property
    def in_flight(self) -> int:
        return sum(
            not request.future.done() for request in (*self.waiting, *filter(None, self.slots))
        )

    async def _run(self):
        """Steps while there are requests. Others on the loop run between steps."""
        try:
            while self._admit():
                self._step()
                await asyncio.sleep(0)
        except Exception as error:  # whatever it is, those who wait must hear of it
            for request in (*self.waiting, *filter(None, self.slots)):
                if not request.future.done():
                    request.future.set_exception(error)
            self.abort()
            self.cache = _Cache(self.max_running_requests)  # it may hold NaN

    @torch.inference_mode()
    def _admit(self) -> bool:
        """Fills free slots, first come first served. Returns whether any slot is busy."""
        self.slots = [
            None if request is None or request.future.done() else request for request in self.slots
        ]
        free = deque(slot for slot, request in enumerate(self.slots) if request is None)
        admitted: dict[_Prompt, list[int]] = {}
        while self.waiting and free:
            request = self.waiting.popleft()
            request.prompt.waiting -= 1
            if not request.future.done():  # else it was cancelled
                admitted.setdefault(request.prompt, []).append(free[0])
                self.slots[free.popleft()] = request
            elif not request.prompt.waiting:
                self.prompts.pop(request.prompt.tokens, None)
        new = [prompt for prompt in admitted if prompt.kv is None]
        for batch in [[prompt] for prompt in new] if self.deterministic else _batches(new):
            self._prefill(batch)
        for prompt, slots in admitted.items():
            self.cache.write(prompt.kv, slots)
            if not prompt.waiting:
                prompt.kv = None
                self.prompts.pop(prompt.tokens)
        return any(self.slots)

    def _prefill(self, prompts: list[_Prompt]):
        """The keys and values of all but the last token of each prompt: that one is the first to be decoded."""
        ends = np.cumsum([0, *(len(prompt.tokens) - 1 for prompt in prompts)]).tolist()
        recorder = _Recorder([[(b - a, 0) for a, b in pairwise(ends)]], [], self.device)
        if ends[-1]:
            tokens = [token for prompt in prompts for token in prompt.tokens[:-1]]
            positions = [
                position for prompt in prompts for position in range(len(prompt.tokens) - 1)
            ]
            inputs = torch.tensor([tokens, positions], device=self.device)
            self.model.base_model(
                inputs[:1], position_ids=inputs[1:], use_cache=False, attend=recorder
            )
        for prompt, start, end in zip(prompts, ends, ends[1:], strict=False):
            prompt.kv = {layer: [x[:, start:end] for x in kv] for layer, kv in recorder.kv.items()}

    @torch.inference_mode()
    def _step(self):
        """One token for every busy slot."""
        requests = self.slots[: self._num_rows()]
        tokens, positions, noise = zip(
            *(r.next_input() if r else (0, 0, 0.0) for r in requests), strict=True
        )
        self.cache.begin(torch.tensor(positions, device=self.device), max(positions))
        inputs = torch.tensor([tokens, positions], device=self.device)[:, :, None]  # [2, n, 1]
        logits = self.model(
            inputs[0], position_ids=inputs[1], use_cache=False, attend=self.cache
        ).logits[:, -1]
        idle = SamplingParams()
        settings = [
            torch.tensor(
                [getattr(r.params if r else idle, key) for r in requests], device=self.device
            )
            for key in ("temperature", "top_p", "top_k")
        ]
        drawn = sample(
            logits, torch.tensor(noise, dtype=torch.float64, device=self.device), *settings
        )
        for slot, (request, *new) in enumerate(
            zip(requests, *(x.tolist() for x in drawn), strict=True)
        ):
            if request is not None and (reason := request.append(*new)):
                self.slots[slot] = None
                if not request.future.done():
                    request.future.set_result(
                        Generation(request.tokens, request.logps, reason, self.version)
                    )

    def _num_rows(self) -> int:
        """How many of the slots to decode. Without `deterministic` the busy ones move to the front."""
        if self.deterministic:
            return self.max_running_requests
        busy = [slot for slot, request in enumerate(self.slots) if request]
        num = min(-(-len(busy) // ROWS) * ROWS, self.max_running_requests)
        free = (slot for slot in range(num) if self.slots[slot] is None)
        for slot in reversed(busy):
            if slot >= num:
                to = next(free)
                self.cache.move(slot, to)
                self.slots[to], self.slots[slot] = self.slots[slot], None
        return num

    def _prepack(self):
        """Gives linear layers weights in the layout that oneDNN's kernels want, which it otherwise makes in each call:
        at 64 rows 1.25 times as fast, at 8 rows twice."""
        ops = torch.ops.mkldnn
        if self.device.type != "cpu" or not hasattr(ops, "_linear_pointwise"):
            return
        for module in self.model.modules():
            if type(module) is nn.Linear and _can_pack(module.weight.dtype):
                packed = ops._reorder_linear_weight(module.weight, self.max_running_requests)
                module.forward = partial(_packed_linear, packed, module.bias)

    def _unpack(self):
        for module in self.model.modules():
            if type(module) is nn.Linear:
                module.__dict__.pop("forward", None)


class _Recorder(PackedAttention):
    """Attention of a prefill that keeps the keys and values: layer -> [G, L, D] each."""

    def __init__(self, *args):
        super().__init__(*args)
        self.kv = {}

    def __call__(self, module, query, key, value, scaling):
        self.kv[module.layer_idx] = [key[0], value[0]]
        return super().__call__(module, query, key, value, scaling)


def _batches(prompts: list[_Prompt]) -> list[list[_Prompt]]:
    """Cut where PREFILL tokens are reached."""
    batches, size = [], PREFILL
    for prompt in prompts:
        if size + len(prompt.tokens) > PREFILL:
            batches.append([])
            size = 0
        batches[-1].append(prompt)
        size += len(prompt.tokens)
    return batches


def _can_pack(dtype: torch.dtype) -> bool:
    supported = {
        torch.bfloat16: "_is_mkldnn_bf16_supported",
        torch.float16: "_is_mkldnn_fp16_supported",
    }
    return dtype == torch.float32 or (
        dtype in supported and getattr(torch.ops.mkldnn, supported[dtype])()
    )


def _packed_linear(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
