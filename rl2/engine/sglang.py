"""SGLang inside the trainer's processes.

The first rank of every `tp_size` ranks holds an engine. It starts SGLang's schedulers as processes
of its own, on the GPUs of that group of ranks. The other ranks of the group only pass their weights
on to it.

It knows two lines of releases: from 0.5.21 on updates of weights have sessions, from 0.5.17 to
0.5.20 they have none. SGLang does not raise: it answers with (success, message, ...).
"""

import asyncio
import atexit
import os
import signal
import socket
import time
from base64 import b64decode
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import current_process
from pathlib import Path
from random import SystemRandom
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig

from rl2 import cleanup
from rl2.engine.base import (
    Engine,
    EngineSettings,
    Generation,
    NamedTensors,
    SamplingParams,
    Seed,
    check_request,
    max_request_tokens,
    single_seed,
)
from rl2.engine.checkpoint_format import CheckpointFormat
from rl2.engine.stop import StopSearch
from rl2.model.classes import empty_language_model
from rl2.parallel.device import GIB
from rl2.parallel.mesh import COLLECTIVE_TIMEOUT
from rl2.parallel.worlds import Bucket, buckets
from rl2.progress import expecting, mark

BUCKET_SIZE_BYTES = 2**29  # weights that travel together
SECONDS_TO_SEND = 0.001  # in which a request leaves this process; its answer is read later
SECONDS_BETWEEN_MARKS = 5.0  # while a request is in flight
PORTS = range(10_000, 32_768)  # which Linux and macOS give to no connection by default
SECONDS_TO_RELEASE = 60.0  # in which each scheduler gives its memory back
SECONDS_BETWEEN_LOOKS = 0.01  # at the free memory meanwhile
# Of the memory that SGLang took when it started: weights, keys and values are most of it. The rest
# are CUDA's context and graphs, which it keeps.
LEAST_RELEASED_SHARE = 0.5
SECONDS_TO_START = 900.0  # kernels are compiled and graphs recorded: minutes in the first run
MOST_GRAPH_REQUESTS = 512  # larger steps compute for so long that a graph saves nothing
LIBRARY_PATH = "LD_LIBRARY_PATH"
MAPPED_FILES = Path("/proc/self/maps")  # of this process
CPU_ARGUMENTS = {  # what makes SGLang run without a GPU
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
}
# Model types whose sliding window SGLang ignores (by the source of 0.5.23).
TYPES_WITHOUT_WINDOW = {"mistral", "mixtral", "phi3", "qwen2", "qwen3", "starcoder2"}
# The memory that schedulers read, and their answer on ranks with an engine.
SentBucket = tuple[Any, asyncio.Task[None] | None]


class SGLangEngine(Engine):
    """`tp_size` ranks of one node share an engine.

    `engine_args` are further arguments of SGLang's ServerArgs.
    """

    def __init__(self, settings: EngineSettings):
        rank, tp_size = settings.rank, settings.tp_size
        self.group, _ = dist.new_subgroups(tp_size, None, COLLECTIVE_TIMEOUT, backend="gloo")
        self.tp_size = tp_size
        self.index = rank // tp_size if rank % tp_size == 0 else None
        self.count = settings.world_size // tp_size
        self.device = settings.device
        self.max_running_requests = settings.max_running_requests
        self.version: int | None = 0
        self.asleep = False
        self.num_aborts = 0
        self.num_requests = 0  # in flight
        config = AutoConfig.from_pretrained(settings.model_name)
        model = empty_language_model(config)
        self.files = CheckpointFormat(model)
        self.tokenizer: Any = None
        if settings.stop:
            self.tokenizer = AutoTokenizer.from_pretrained(settings.model_name)
        text = config.get_text_config()
        self.vocabulary = text.vocab_size
        # The layer of each router, in the trainer's order. SGLang tells the choices of all layers.
        self.router_layers: list[int] = []
        if settings.with_experts:
            from rl2.model.moe import find_router_layers

            self.router_layers = find_router_layers(settings.model_name, model)
            self.choices_shape = (-1, text.num_hidden_layers, text.num_experts_per_tok)
        self.max_length = max_request_tokens(config)
        _check_window(config, self.max_length)
        # With these arguments SGLang stores other weights than it is sent.
        self.converts_weights = bool({"quantization", "load_format"} & set(settings.engine_args))
        self.engine: Any = None  # sglang.Engine, on ranks with an index
        self.has_sessions = False  # of updates, without which it refuses them
        self.children: list[Any] = []  # its processes
        self._share_key()
        nccl_port, http_port = _free_ports(2)
        self._free_cached_memory()
        free = self._free_bytes()
        if self.index is None:
            self.loop = asyncio.new_event_loop()
        else:
            self._start(_server_arguments(settings, nccl_port, http_port))
        dist.barrier(self.group)  # the first rank has started the schedulers of all
        self.taken = free - self._free_bytes()  # by SGLang, on this rank's GPU

    def _start(self, arguments: dict[str, object]) -> None:
        # With this variable SGLang's own store would connect to torchrun's store as a client.
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        if self.device.type == "cpu":
            os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        import psutil
        import sglang

        this_process = psutil.Process()
        others = set(this_process.children(recursive=True))
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        cleanup.register(self.close)
        try:
            with expecting(SECONDS_TO_START), _environment_of_schedulers(self.device):
                self.engine = sglang.Engine(**arguments)
        except (RuntimeError, EOFError, TypeError, ValueError, AssertionError) as error:
            raise RuntimeError(
                f"SGLang did not start ({error}); its own message is above. What most often helps: "
                "a smaller rollout.gpu_memory_utilization, or rollout.engine_args.NAME=VALUE for "
                "any argument of its server."
            ) from error
        finally:
            children = this_process.children(recursive=True)
            self.children = [child for child in children if child not in others]
        self.has_sessions = hasattr(self.engine, "begin_weight_update")
        self.loop = self.engine.loop
        self.manager = self.engine.tokenizer_manager
        # SGLang's shutdown would kill every child process of ours, and its signal handlers would
        # replace ours.
        atexit.unregister(self.engine.shutdown)
        self.loop.run_until_complete(self._begin())
        for number in (signal.SIGTERM, signal.SIGQUIT):
            self.loop.remove_signal_handler(number)
        signal.signal(signal.SIGQUIT, _raise_child_failed)
        for number, handler in handlers.items():
            signal.signal(number, handler)

    async def _begin(self) -> None:
        """Starts the manager's tasks and signal handlers, which otherwise come with a request."""
        self.manager.auto_create_handle_loop()

    async def generate(
        self, prompt: Sequence[int], params: SamplingParams, seed: Seed
    ) -> Generation:
        """Samples an answer, see Engine.generate.

        SGLang uses the seed only if it is deterministic.
        """
        check_request(prompt, params, self.vocabulary, self.max_length)
        sampling_params = {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "frequency_penalty": params.frequency_penalty,
            "presence_penalty": params.presence_penalty,
            "max_new_tokens": params.max_new_tokens,
            "stop_token_ids": list(params.stop_token_ids),
            "stop": list(params.stop),
            # With stop tokens SGLang stops at the model's own too; without, the answer has its full
            # length.
            "ignore_eos": not params.stop_token_ids,
            "sampling_seed": single_seed(seed),
        }
        num_aborts = self.num_aborts
        if not self.num_requests:
            self._mark()
        self.num_requests += 1
        try:
            answer = await self.engine.async_generate(
                input_ids=list(prompt),
                sampling_params=sampling_params,
                return_logprob=True,
                return_routed_experts=params.experts_from is not None,
                routed_experts_start_len=params.experts_from or 0,
            )
        finally:
            self.num_requests -= 1
            if not self.num_requests:
                self.next_mark.cancel()
        meta = answer["meta_info"]
        logps = [entry[0] for entry in meta["output_token_logprobs"]]
        tokens = [entry[1] for entry in meta["output_token_logprobs"]]
        reason = meta["finish_reason"]["type"]
        if reason == "abort":
            if num_aborts == self.num_aborts:
                message = meta["finish_reason"].get("message")
                raise RuntimeError(f"SGLang gave up a request: {message}")
            reason = _finish_reason(tokens, params)
        if params.stop:
            # SGLang searches the newest tokens only, as many as its tokenizer makes of the string,
            # and none of an earlier request: it may continue where the answer has ended.
            end = StopSearch(self.tokenizer, prompt, params).feed(tokens)
            if end is not None:
                tokens, logps, reason = tokens[:end], logps[:end], "stop"
        experts = None
        if params.experts_from is not None and (told := meta.get("routed_experts")):
            num_tokens = len(prompt) + len(tokens) - 1 - params.experts_from
            experts = self._read_experts(told)[:num_tokens]
        return Generation(tokens, logps, reason, self.version, experts=experts)

    def _mark(self) -> None:
        """Marks while requests are in flight: SGLang's own watchdog ends a scheduler that hangs."""
        mark()
        self.next_mark = self.loop.call_later(SECONDS_BETWEEN_MARKS, self._mark)

    def _read_experts(self, told: str) -> np.ndarray:
        """[tokens, routers, choices] from SGLang's [tokens, layers, choices] int32 in base64."""
        choices = np.frombuffer(b64decode(told), np.int32).reshape(self.choices_shape)
        return choices[:, self.router_layers].astype(np.int16)

    def abort(self) -> None:
        self.num_aborts += 1
        if self.engine is not None:
            self.manager.abort_request(abort_all=True)

    def sleep(self) -> None:
        """Gives back the memory of weights, keys and values.

        `wake` and `load_weights` must follow.
        """
        self.asleep = True
        if self.engine is not None:
            # SGLang dies when its memory is taken away before its last batch has ended.
            answer = self.loop.run_until_complete(self.manager.flush_cache(timeout_s=60.0))
            _require((answer.success, "to sleep: a request is still running"))
        if self.device.type != "cpu":
            self._release_memory()

    def _release_memory(self) -> None:
        """Returns when this rank's GPU has its memory back. All ranks of the group call.

        SGLang answers when its first scheduler has released its memory, but the others may be late.
        RuntimeError if the one of this GPU keeps most of it.
        """
        before = self._free_bytes()
        dist.barrier(self.group)  # all have measured
        if self.engine is not None:
            self.engine.release_memory_occupation(["weights", "kv_cache"])
        deadline = time.monotonic() + SECONDS_TO_RELEASE
        while (released := self._free_bytes() - before) < LEAST_RELEASED_SHARE * self.taken:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"SGLang took {self.taken / GIB:.1f} GiB of {self.device} when it started and "
                    f"gave back {released / GIB:.1f} GiB to the trainer. Either its memory saver "
                    "does not work (pip install -U torch-memory-saver; rollout.engine_args must "
                    "leave enable_memory_saver on), or another program has taken the memory "
                    "(nvidia-smi)."
                )
            mark()
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def _free_bytes(self) -> int:
        """Of this rank's GPU; 0 on a CPU."""
        return 0 if self.device.type == "cpu" else torch.cuda.mem_get_info(self.device)[0]

    def wake(self) -> None:
        """Takes the memory of the weights again.

        That of keys and values follows in `load_weights`, when the trainer has freed its own copy
        of the weights.
        """
        self._free_cached_memory()
        if self.engine is not None and self.device.type != "cpu":
            self.engine.resume_memory_occupation(["weights"])

    def load_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Sends the tensors to SGLang's processes, see Engine.load_weights.

        RuntimeError with SGLang's message if it refuses them.
        """
        self.version = None
        if self.has_sessions:
            _require(self.engine.begin_weight_update())
        sent = None
        # A bucket is gathered while SGLang loads the one before.
        for bucket in buckets(self.files.convert(named_tensors), BUCKET_SIZE_BYTES):
            self._wait_until_loaded(sent)
            sent = None  # its memory is free for this one
            sent = self._send(bucket)
            del bucket  # before the next one is gathered
        self._wait_until_loaded(sent)
        del sent
        if self.has_sessions:
            _require(self.engine.end_weight_update())
        self._free_cached_memory()
        if self.engine is not None:
            if self.device.type != "cpu" and self.asleep:
                self.engine.resume_memory_occupation(["kv_cache"])
            self.engine.flush_cache()
        self.version = version
        self.asleep = False

    def verify_weights(self, named_tensors: NamedTensors, version: int) -> None:
        """Compares SGLang's weights with these, see Engine.verify_weights.

        SGLang stores them under other names and in other shapes. So its weights are overwritten
        with noise, these are loaded in their place, and the checksums of all its tensors are
        compared with those from before. With arguments that make SGLang convert weights, and where
        noise would fill tensors that nothing replaces, the weights are only loaded.
        """
        if self.engine is None or self.converts_weights:
            self.load_weights(named_tensors, version)
            return
        before = self._check_weights("checksum")
        kept = _names_without_source(before, self.files.names)
        if kept and not self.has_sessions:  # these releases cannot leave tensors out
            self.load_weights(named_tensors, version)
            return
        self._check_weights("reset_tensors", kept)
        self.load_weights(named_tensors, version)
        different = _different_names(before, self._check_weights("checksum"))
        if different:
            raise RuntimeError(
                f"{len(different)} weights of SGLang are not the trainer's: {different[:5]}"
            )

    def _check_weights(self, action: str, kept: Sequence[str] = ()) -> list[dict[str, Any]]:
        """The answer of each scheduler.

        The action reset_tensors fills all tensors but those in `kept` with noise.
        """
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        request: Any = CheckWeightsReqInput(action=action)
        if kept:
            request.skip_tensor_list = list(kept)
        answer = self.loop.run_until_complete(self.manager.check_weights(request))
        _require(answer)
        return answer[2] or []

    def close(self) -> None:
        """Ends SGLang's processes, and no other child processes of this one."""
        cleanup.unregister(self.close)
        children, self.children = self.children, []
        self.engine = None
        if not children:
            return
        import psutil

        # SGLang's watchdog would take the processes that end here for crashed ones.
        signal.signal(signal.SIGQUIT, signal.SIG_IGN)
        for child in children:
            try:
                child.kill()
            except psutil.NoSuchProcess:
                pass
        psutil.wait_procs(children, timeout=30)

    def _free_cached_memory(self) -> None:
        """Gives the memory that torch caches back to the GPUs, where SGLang's processes need it."""
        if self.device.type != "cpu":
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()
            dist.barrier(self.group)

    def _share_key(self) -> None:
        """Lets the schedulers, children of the group's first rank, open memory of all its ranks.

        That holds for the shared memory of a CPU; handles to the memory of a GPU need no key.
        """
        keys = [bytes(current_process().authkey)]
        dist.broadcast_object_list(keys, group=self.group, group_src=0)
        current_process().authkey = keys[0]

    def _send(self, bucket: Bucket) -> SentBucket:
        """Hands a bucket to the schedulers of this group. All its ranks call.

        The schedulers read the memory of what is returned until `_wait_until_loaded`.
        """
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        flat = FlattenedTensorBucket(named_tensors=bucket)
        handles = self._gather_handles(flat)
        if self.engine is None:
            return flat, None
        loading = self.loop.create_task(_update(self.manager, handles))
        self.loop.run_until_complete(asyncio.sleep(SECONDS_TO_SEND))
        return flat, loading

    def _wait_until_loaded(self, sent: SentBucket | None) -> None:
        """Waits until all schedulers have read the bucket. All ranks of the group call."""
        if sent is None:
            return
        _, loading = sent
        if loading is not None:
            self.loop.run_until_complete(loading)
        dist.barrier(self.group)

    def _gather_handles(self, flat: Any) -> list[bytes]:
        """For each scheduler of this rank's engine, a handle to the bucket on the scheduler's GPU.

        The ranks of the group have the same GPUs as the schedulers, one each. On a CPU a handle is
        of shared memory.
        """
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        payload = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
        if self.device.type != "cpu":
            monkey_patch_torch_reductions()  # handles name a GPU by its UUID, not by its number
            torch.cuda.synchronize()
        handle = MultiprocessingSerializer.serialize(payload)
        handles: list[bytes] | None = [b""] * self.tp_size if self.engine is not None else None
        dist.gather_object(handle, handles, group=self.group, group_dst=0)
        return handles or []


async def _update(manager: Any, handles: list[bytes]) -> None:
    """Loads one bucket; `handles` has one for each scheduler."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

    request = UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=handles,
        flush_cache=False,
        load_format="flattened_bucket",
    )
    _require(await manager.update_weights_from_tensor(request, None))


def _server_arguments(
    settings: EngineSettings, nccl_port: int, http_port: int
) -> dict[str, object]:
    arguments: dict[str, object] = {
        "model_path": settings.model_name,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "enable_fp32_lm_head": True,
        "tp_size": settings.tp_size,
        "nccl_port": nccl_port,
        "port": http_port,
        "max_running_requests": settings.max_running_requests,
        "mem_fraction_static": settings.gpu_memory_utilization,
        "random_seed": settings.seed + settings.rank,
        "skip_tokenizer_init": not settings.stop,
        "skip_server_warmup": True,
        "log_level": "error",
        "custom_sigquit_handler": _raise_child_failed,
    }
    if settings.with_experts:
        arguments["enable_return_routed_experts"] = True
    if settings.device.type == "cpu":
        arguments |= CPU_ARGUMENTS
    else:
        arguments |= {
            "base_gpu_id": settings.device.index,
            "enable_memory_saver": True,
            "sleep_on_idle": True,  # otherwise a scheduler takes a core while the trainer works
            "cuda_graph_max_bs_decode": min(settings.max_running_requests, MOST_GRAPH_REQUESTS),
            # Recording them takes tens of seconds, and most of a rollout is decoding.
            "disable_prefill_cuda_graph": True,
            "enable_deterministic_inference": settings.deterministic,
        }
    return arguments | settings.engine_args


def _require(answer: Sequence[Any]) -> None:
    """RuntimeError unless the answer, (success, message, ...), says that SGLang has obeyed."""
    if not answer[0]:
        raise RuntimeError(f"SGLang refused: {answer[1]}")


def _finish_reason(tokens: list[int], params: SamplingParams) -> str:
    """Of an answer that was aborted: its last token may have been the last one anyway."""
    if tokens and tokens[-1] in params.stop_token_ids:
        return "stop"
    return "length" if len(tokens) == params.max_new_tokens else "abort"


def _names_without_source(answers: list[dict[str, Any]], sent: Iterable[str]) -> list[str]:
    """The tensors of SGLang's model that the trainer does not send, by schedulers' checksums.

    `sent` are the names that it does send.

    SGLang's models have buffers of their own, which no checkpoint holds. It joins weights and gives
    them other names, but what follows the last dot stays, or is the end of a longer word
    (w13_weight): weight and bias, and in some models A_log, sinks and others.
    """
    kinds = {name.rpartition(".")[2] for name in sent}
    endings = tuple(f"_{kind}" for kind in kinds)
    names = set()
    for answer in answers:
        for name in answer["checksums"]:
            kind = name.rpartition(".")[2]
            if kind not in kinds and not kind.endswith(endings):
                names.add(name)
    return sorted(names)


def _different_names(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[str]:
    """Names of tensors whose checksums differ in any scheduler, sorted, by schedulers' answers."""
    names = set()
    for old, new in zip(before, after, strict=True):
        items = old["checksums"].items() - new["checksums"].items()
        names |= {name for name, _ in items}
    return sorted(names)


@contextmanager
def _environment_of_schedulers(device: torch.device) -> Iterator[None]:
    """A context in which child processes find libcudart, which the memory saver needs.

    Afterwards the variables of NCCL and of the dynamic linker are as before. SGLang sets some of
    NCCL's for its own processes. Kept here, they would differ from those of ranks without an
    engine, with which this one makes communicators.
    """
    before = _watched_variables()
    folder = None if device.type == "cpu" else cudart_folder()
    if folder is not None:
        folders = [*filter(None, [before.get(LIBRARY_PATH)]), folder]
        os.environ[LIBRARY_PATH] = os.pathsep.join(folders)
    try:
        yield
    finally:
        for name in _watched_variables().keys() - before:
            del os.environ[name]
        os.environ.update(before)


def cudart_folder() -> str | None:
    """The folder of the CUDA runtime that torch has loaded; None if there is none.

    pip installs it below site-packages, where only libraries with a path to it find it. The memory
    saver has none.
    """
    major = (torch.version.cuda or "").partition(".")[0]
    if major and MAPPED_FILES.exists():
        for line in MAPPED_FILES.read_text().splitlines():
            mapped = Path(line.split(maxsplit=5)[-1])
            if mapped.name.startswith(f"libcudart.so.{major}"):
                return str(mapped.parent)
    return None


def _watched_variables() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith("NCCL_") or name == LIBRARY_PATH
    }


def _free_ports(count: int) -> list[int]:
    """Free ports, different on every rank: sockets stay bound until every rank has its ports.

    SGLang binds them many seconds later. They are below the ports that the system gives to
    connections in the meantime.
    """
    ports: list[int] = []
    with ExitStack() as stack:
        for port in SystemRandom().sample(PORTS, len(PORTS)):
            candidate = stack.enter_context(socket.socket())
            with suppress(OSError):  # it is in use
                candidate.bind(("", port))
                ports.append(port)
            if len(ports) == count:
                break
        dist.barrier()
    return ports


def _raise_child_failed(number: int, frame: object) -> None:
    raise RuntimeError("a process of SGLang failed; its message is above")


def _check_window(config: PreTrainedConfig, max_length: float) -> None:
    """ValueError if SGLang would compute requests of `max_length` tokens without their window."""
    window = getattr(config, "sliding_window", None)
    if config.model_type in TYPES_WITHOUT_WINDOW and window is not None and max_length > window:
        raise ValueError(
            f"SGLang ignores the sliding window of {config.model_type}, {window} tokens, and a "
            f"request may have {max_length}: use rollout.engine=local"
        )
