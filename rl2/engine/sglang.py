"""SGLang in the trainer's own processes: the first rank of every `tp_size` holds an engine, which starts its schedulers on
the GPUs of that group; the others serve it their tensors.

Run with sglang 0.5.15, 0.5.17, 0.5.20 and 0.5.23 on a CPU; what differs between them is in `_Adapter`. The paths of a GPU
(memory handles, memory saver) are written from its source and have not been run.
"""

import asyncio
import atexit
import os
import signal
import socket
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig

from rl2.engine.base import (
    Engine,
    EngineSettings,
    Generation,
    SamplingParams,
    check_request,
    max_request_tokens,
)

BUCKET = 2**29  # bytes of weights that travel at a time
CPU = {  # what makes SGLang run without a GPU
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
}


class SGLangEngine(Engine):
    """`tp_size` ranks of one node share an engine; `engine_args` are further ones of SGLang's ServerArgs."""

    def __init__(self, settings: EngineSettings):
        rank, world, tp_size = settings.rank, settings.world_size, settings.tp_size
        groups = [
            dist.new_group(range(i, i + tp_size), backend="gloo") for i in range(0, world, tp_size)
        ]
        self.tp_size = tp_size
        self.group = groups[rank // tp_size]
        self.device = torch.device(settings.device)
        self.index = rank // tp_size if rank % tp_size == 0 else None
        self.count = world // tp_size
        self.max_running_requests = settings.max_running_requests
        self.version, self.asleep, self.num_aborts = 0, False, 0
        config = AutoConfig.from_pretrained(settings.model_name)
        self.vocabulary = config.vocab_size
        self.max_length = max_request_tokens(settings, config)
        ports = _free_ports(2)
        self.engine, self.children = None, []
        self._free()
        if self.index is None:
            self.loop = asyncio.new_event_loop()
            return
        given = {
            "model_path": settings.model_name,
            "dtype": str(settings.dtype).removeprefix("torch."),
            "tp_size": tp_size,
            "nccl_port": ports[0],
            "port": ports[1],
            "max_running_requests": settings.max_running_requests,
            "mem_fraction_static": settings.gpu_memory_utilization,
            "random_seed": settings.seed + rank,
            "skip_tokenizer_init": True,
            "skip_server_warmup": True,
            "log_level": "error",
            "custom_sigquit_handler": _child_failed,
        }
        if self.device.type == "cpu":
            os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
            given |= CPU
        else:
            given |= {"base_gpu_id": self.device.index, "enable_memory_saver": True}
            given["enable_deterministic_inference"] = settings.deterministic
        self.comparable = not {"quantization", "load_format"} & set(settings.engine_args)
        self._start({**given, **settings.engine_args})

    def _start(self, arguments):
        # With it, a store that SGLang opens would believe to be a client of torchrun's.
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        import psutil
        import sglang

        before = set(psutil.Process().children(recursive=True))
        handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        atexit.register(self.close)
        try:
            self.engine = sglang.Engine(**arguments)
        except (RuntimeError, EOFError, TypeError, ValueError, AssertionError) as error:
            raise RuntimeError(
                f"SGLang did not start ({error}); its own message is above. What most often helps: a smaller"
                " rollout.gpu_memory_utilization, or rollout.engine_args.NAME=VALUE for any argument of its server."
            ) from error
        finally:
            self.children = [
                child for child in psutil.Process().children(recursive=True) if child not in before
            ]
        self.loop, self.adapter = self.engine.loop, _Adapter(self.engine)
        # Its own end would kill every child process of ours, and its signal handlers would take the place of ours.
        atexit.unregister(self.engine.shutdown)
        self.loop.run_until_complete(self.adapter.begin())
        for number in (signal.SIGTERM, signal.SIGQUIT):
            self.loop.remove_signal_handler(number)
        signal.signal(signal.SIGQUIT, _child_failed)
        for number, handler in handlers.items():
            signal.signal(number, handler)

    async def generate(
        self, prompt: list[int], params: SamplingParams, seed: tuple[int, ...]
    ) -> Generation:
        """Samples an answer to the token ids `prompt`. The seed counts in SGLang's deterministic mode only."""
        check_request(prompt, params, self.vocabulary, self.max_length)
        stops = list(params.stop_token_ids)
        # Without stop tokens an answer has its full length; with them SGLang adds the model's own.
        sampling = {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "max_new_tokens": params.max_new_tokens,
            "stop_token_ids": stops,
            "ignore_eos": not stops,
            "sampling_seed": _mix(seed),
        }
        num_aborts = self.num_aborts
        out = await self.engine.async_generate(
            input_ids=list(prompt), sampling_params=sampling, return_logprob=True
        )
        meta = out["meta_info"]
        logps, tokens = (
            [x[0] for x in meta["output_token_logprobs"]],
            [x[1] for x in meta["output_token_logprobs"]],
        )
        reason = meta["finish_reason"]["type"]
        if reason == "abort" and num_aborts == self.num_aborts:
            raise RuntimeError(f"SGLang gave up a request: {meta['finish_reason'].get('message')}")
        if reason == "abort" and tokens:  # its last token may have been the last one anyway
            reason = (
                "stop"
                if tokens[-1] in stops
                else "length"
                if len(tokens) == params.max_new_tokens
                else reason
            )
        return Generation(tokens, logps, reason, int(meta["weight_version"]))

    def abort(self):
        """Every request returns what it has got, with finish_reason abort; call it again for those on their way."""
        self.num_aborts += 1
        if self.engine is not None:
            self.adapter.manager.abort_request(abort_all=True)

    def sleep(self):
        """Gives back the memory of the weights and of keys and values; `load` must follow `wake`."""
        self.asleep = True
        if self.engine is not None:
            self.adapter.wait()
        if self.device.type != "cpu":
            if self.engine is not None:
                self.engine.release_memory_occupation(["weights", "kv_cache"])
            dist.barrier(self.group)  # the GPUs of the others have it back only then

    def wake(self):
        """Takes the memory of the weights again; that of keys and values comes with `load`, when the trainer's copy of
        the weights is gone."""
        self._free()
        if self.engine is not None and self.device.type != "cpu":
            self.engine.resume_memory_occupation(["weights"])

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int):
        """Full tensors with Hugging Face names, which all ranks must iterate, into the engines. RuntimeError with
        SGLang's words when it refuses."""
        if self.engine is not None:
            self.adapter.open()
        for bucket in _buckets(named_tensors):
            self._send(bucket, version)
            del bucket
        if self.engine is not None:
            self.adapter.close()
        self._free()
        if self.engine is not None:
            if self.device.type != "cpu" and self.asleep:
                self.engine.resume_memory_occupation(["kv_cache"])
            self.engine.flush_cache()
        self.version, self.asleep = version, False

    def verify_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int):
        """The weights must be these already, bit by bit: RuntimeError names those that are not. SGLang keeps them under
        other names and in other shapes, so its own are overwritten with noise, these loaded in their place, and the
        checksums of all its tensors compared with those of before. Where arguments make weights of its own, and in
        releases that have no checksums, they are only loaded."""
        able = self.engine is not None and self.comparable and self.adapter.can_check
        before = self.adapter.check("checksum") if able else []
        if able:
            self.adapter.check("reset_tensors")
        self.load_weights(named_tensors, version)
        after = self.adapter.check("checksum") if able else []
        wrong = sorted(
            {
                name
                for a, b in zip(before, after, strict=True)
                for name in a
                if a[name] != b.get(name)
            }
        )
        if wrong:
            raise RuntimeError(f"{len(wrong)} weights of SGLang are not the trainer's: {wrong[:5]}")

    def _free(self):
        """What torch keeps for later goes back to the GPUs of the group, where SGLang is another process."""
        if self.device.type != "cpu":
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()
            dist.barrier(self.group)

    def _send(self, bucket, version):
        payloads, _shared = self._payloads(bucket)
        if self.engine is not None:
            self.adapter.update(payloads, version, flattened=self.device.type != "cpu")
        dist.barrier(self.group)  # what is shared is read until then

    def _payloads(self, bucket) -> tuple[list | None, Tensor | None]:
        """What each scheduler of our engine reads, and the memory it is in: on GPUs a handle to that of the rank that
        shares its GPU, on a CPU shared memory of the first rank."""
        from sglang.srt.utils import MultiprocessingSerializer
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        if self.device.type == "cpu":
            alike = (
                [MultiprocessingSerializer.serialize(bucket) for _ in range(self.tp_size)]
                if self.engine
                else None
            )
            return alike, None
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()  # handles name the GPU by what it is, not by its number
        flat = FlattenedTensorBucket(named_tensors=bucket)
        payload = {"flattened_tensor": flat.get_flattened_tensor(), "metadata": flat.get_metadata()}
        torch.cuda.synchronize()
        gathered = [None] * self.tp_size if self.engine is not None else None
        dist.gather_object(
            MultiprocessingSerializer.serialize(payload), gathered, group=self.group, group_dst=0
        )
        return gathered, payload["flattened_tensor"]

    def close(self):
        """Ends the engine's processes, and no others of ours."""
        atexit.unregister(self.close)
        children, self.children, self.engine = self.children, [], None
        if children:
            import psutil

            for child in children:
                try:
                    child.kill()
                except psutil.NoSuchProcess:
                    pass
            psutil.wait_procs(children, timeout=30)


class _Adapter:
    """The calls that differ between releases: sessions of weight updates are there since 0.5.21, and required."""

    def __init__(self, engine):
        self.engine, self.manager = engine, engine.tokenizer_manager

    async def begin(self):
        self.manager.auto_create_handle_loop()

    def wait(self):
        """Until nothing runs: SGLang dies when its memory is taken away while its last batch is on the way."""
        answer = self.engine.loop.run_until_complete(self.manager.flush_cache(timeout_s=60.0))
        self._told((answer.success, "to sleep: a request is still running"))

    def open(self):
        if hasattr(self.engine, "begin_weight_update"):
            self._told(self.engine.begin_weight_update())

    def update(self, payloads, version, flattened):
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads,
            flush_cache=False,
            weight_version=str(version),
            load_format="flattened_bucket" if flattened else None,
        )
        call = self.manager.update_weights_from_tensor(request, None)
        self._told(self.engine.loop.run_until_complete(call))

    def close(self):
        if hasattr(self.engine, "end_weight_update"):
            self._told(self.engine.end_weight_update())

    @property
    def can_check(self) -> bool:
        return hasattr(self.manager, "check_weights")

    def check(self, action: str) -> list[dict[str, str]]:
        """Of each scheduler, the checksums of its tensors by SGLang's names, if `action` is checksum."""
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        call = self.manager.check_weights(CheckWeightsReqInput(action=action))
        answer = self.engine.loop.run_until_complete(call)
        self._told(answer)
        return [rank["checksums"] for rank in answer[2] or []]

    def _told(self, answer):
        """SGLang answers (success, message, ...) where others raise."""
        success, message = answer[:2]
        if not success:
            raise RuntimeError(f"SGLang refused: {message}")


def _buckets(named_tensors):
    bucket, size = [], 0
    for name, tensor in named_tensors:
        if bucket and size + tensor.nbytes > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor.contiguous()))
        size += tensor.nbytes
    if bucket:
        yield bucket


def _free_ports(count: int) -> list[int]:
    """Ports that no other rank of this node is given: all are held until everyone has theirs."""
    held = [socket.socket() for _ in range(count)]
    for one in held:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in held]
    dist.barrier()
    for one in held:
        one.close()
    return ports


def _mix(seed: tuple[int, ...]) -> int:
    """One number of 31 bits from several: SGLang takes one seed."""
    import numpy as np

    return int(np.random.SeedSequence(seed).generate_state(1)[0] >> 1)


def _child_failed(number, frame):
    raise RuntimeError("a process of SGLang failed; its message is above")
