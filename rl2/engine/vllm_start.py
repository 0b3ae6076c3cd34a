"""How vLLM's engine starts and ends in a process of the trainer, and what it is patched with."""

import gc
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from rl2.engine.base import EngineSettings
from rl2.model.classes import idle_parts, is_recurrent
from rl2.progress import expecting

REQUIRED_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler runs in this process
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # it has not been tried
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
    # In 0.32.0 a part of a prompt moves the offset of a request's generator, which a CPU's has not.
    "enable_chunked_prefill": False,
    # In 0.32.0 the kernel is wrong for queries [tokens, heads, size] (LFM2, DeepSeek-V3).
    "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
}
TRIED_RECURRENT = ("falcon_h1", "lfm2", "lfm2_moe", "qwen3_5_text", "qwen3_next")  # model types
GATED_DELTA = ("qwen3_5_text", "qwen3_next")  # those of them that a CPU computes in bfloat16 only
SECONDS_TO_START = 900.0  # a GPU compiles kernels and records graphs: minutes in the first run


def start_engine(settings: EngineSettings, model: PreTrainedModel) -> Any:
    """Returns vLLM's LLMEngine. `model` is that of the trainer.

    RuntimeError with vLLM's reason if it does not start, ValueError for a model of a kind that has
    not been tried.
    """
    _check_kind(settings, model)
    with _preserved_process(settings.device), expecting(SECONDS_TO_START):
        _set_variables(settings)
        return _start(settings, model)


def _set_variables(settings: EngineSettings) -> None:
    os.environ.update(REQUIRED_VARIABLES)
    for name, value in DEFAULT_VARIABLES.items():
        os.environ.setdefault(name, value)
    if settings.device.type == "cpu":
        os.environ.update(CPU_VARIABLES)
    elif settings.deterministic:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    # vLLM makes its groups among the ranks of the default process group, as these.
    os.environ["RANK"] = str(settings.rank)
    os.environ.setdefault("LOCAL_RANK", str(settings.device.index or 0))


def _start(settings: EngineSettings, model: PreTrainedModel) -> Any:
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    if settings.device.type == "cpu":
        _patch_for_cpu()
    arguments = engine_arguments(settings, model)
    try:
        config = EngineArgs(**arguments).create_engine_config()
        engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        raise RuntimeError(
            f"vLLM did not start: {error}. rollout.engine_args.NAME=VALUE sets any argument of its "
            "engine; rollout.engine=local needs no other package."
        ) from error
    # At the exit of this process it would destroy the trainer's process groups.
    engine.engine_core._finalizer.detach()
    gc.unfreeze()  # vLLM has frozen the trainer's objects too
    return engine


def engine_arguments(settings: EngineSettings, model: PreTrainedModel) -> dict[str, object]:
    """Arguments of vLLM's EngineArgs. Those of the user (settings.engine_args) come last."""
    arguments: dict[str, object] = {
        "model": settings.model_name,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "max_num_seqs": settings.max_running_requests,
        "max_model_len": -1,  # the model's, or as much as the cache holds
        "skip_tokenizer_init": True,
        "use_tqdm_on_load": False,
        "seed": settings.seed + settings.rank,
        "disable_log_stats": True,
        "async_scheduling": False,  # a step returns its tokens
        "distributed_executor_backend": "external_launcher",  # the ranks of torchrun are vLLM's
        "logprobs_mode": "processed_logprobs",  # with the temperature
    }
    if settings.dtype != torch.float32:
        arguments["hf_overrides"] = {"head_dtype": "float32"}
    if idle_parts(model):
        arguments["language_model_only"] = True  # without the towers
    if settings.device.type == "cpu":
        arguments |= CPU_ARGUMENTS
        if any(map(is_recurrent, model.modules())):
            # There the kernel of Mamba2 does not give the states within a prompt.
            arguments["enable_prefix_caching"] = False
    else:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(settings.device)
        # vLLM's share is of the whole memory.
        arguments["gpu_memory_utilization"] = settings.gpu_memory_utilization * free / total
        arguments["enable_sleep_mode"] = True
    return arguments | settings.engine_args


def _check_kind(settings: EngineSettings, model: PreTrainedModel) -> None:
    """ValueError for a kind of model that vLLM computes or loads wrongly, or that was not tried."""
    kind = model.config.get_text_config().model_type
    has_state = any(map(is_recurrent, model.modules()))
    remedy = "set sglang or local"
    if kind == "gpt_oss":
        obstacle = "has experts and sinks that vLLM 0.32 leaves out when it is sent weights"
    elif kind == "nemotron_h":
        obstacle = "has a least time step (time_step_min), which vLLM 0.32 does not compute"
    elif has_state and kind not in TRIED_RECURRENT:
        obstacle = f"has layers with a state, and was not tried ({', '.join(TRIED_RECURRENT)} were)"
    elif hasattr(model.config, "quantization_config"):
        obstacle = "is quantized, which was not tried"
    elif kind in GATED_DELTA and settings.device.type == "cpu" and settings.dtype != torch.bfloat16:
        obstacle = "has gated delta rules, which it computes on a CPU in bfloat16 only"
        remedy = "set actor.dtype=bfloat16"
    else:
        return
    raise ValueError(f"rollout.engine=vllm: {settings.model_name} {obstacle}: {remedy}")


@cache
def _patch_for_cpu() -> None:
    """Lets vLLM on a CPU multiply with what it is sent, and its ranks meet over gloo.

    It would keep packed copies of matrices only, so there would be nothing to compare, and a head
    that is tied to the embedding would keep the copy of the first load. It packs experts in place,
    but in the first load only: there it has no kernel. The first kernel stays, since it reads the
    weights that are compared. Its shared memory has the same name in all jobs on a machine.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod as Experts

    dispatch, process = utils.dispatch_cpu_unquantized_gemm, Experts.process_weights_after_loading

    def dispatch_plain(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = torch.nn.functional.linear
        else:  # of convolutions, which are packed in place
            dispatch(layer, remove_weight)

    def process_as_the_first_time(method: Any, layer: Any) -> None:
        kernel, config = method.moe_kernel, method.moe_quant_config
        method.moe_kernel = None
        process(method, layer)
        if kernel is not None:
            method.moe_kernel, method.moe_quant_config = kernel, config

    utils.dispatch_cpu_unquantized_gemm = dispatch_plain
    Experts.process_weights_after_loading = process_as_the_first_time
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


def shut_down(core: Any) -> None:
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
