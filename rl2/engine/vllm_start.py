"""How vLLM's engine starts and ends in a process of the trainer, and what it is patched with."""

import gc
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from rl2.engine.base import EngineSettings
from rl2.engine.share import choose_share
from rl2.engine.vllm_adapters import lora_arguments
from rl2.model.recurrent import is_recurrent
from rl2.model.towers import find_towers
from rl2.progress import expecting

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
SECONDS_TO_START = 900.0  # a GPU compiles kernels and records graphs: minutes in the first run


def start_engine(settings: EngineSettings, model: PreTrainedModel, sampler: type) -> Any:
    """Returns vLLM's LLMEngine. `model` is that of the trainer, `sampler` a logits processor.

    RuntimeError with vLLM's reason if it does not start, ValueError for a model of a kind that
    has not been tried.
    """
    with _preserved_process(settings.device), expecting(SECONDS_TO_START):
        _set_variables(settings)
        return _start(settings, model, sampler)


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


def _start(settings: EngineSettings, model: PreTrainedModel, sampler: type) -> Any:
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    if settings.device.type == "cpu":
        _register_loader()
        _avoid_shared_memory()
    arguments = engine_arguments(settings, model, sampler)
    with _explained_errors():
        config = EngineArgs(**arguments).create_engine_config()
    _check_kind(settings, config.model_config)
    with _explained_errors():
        engine = LLMEngine.from_vllm_config(config, disable_log_stats=True)
    # At the exit of this process it would destroy the trainer's process groups.
    engine.engine_core._finalizer.detach()
    gc.unfreeze()  # vLLM has frozen the trainer's objects too
    return engine


@contextmanager
def _explained_errors() -> Iterator[None]:
    """RuntimeError with vLLM's reason and advice for an error inside."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        raise RuntimeError(
            f"vLLM did not start: {error}. rollout.engine_args.NAME=VALUE sets any argument of its "
            "engine; rollout.engine=local needs no other package."
        ) from error


def engine_arguments(
    settings: EngineSettings, model: PreTrainedModel, sampler: type
) -> dict[str, Any]:
    """Arguments of vLLM's EngineArgs. Those of the user (settings.engine_args) come last."""
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
    if settings.adapters is not None:
        arguments |= lora_arguments(model)
    if find_towers(model):
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
