"""Functions that the parts share: models, batches and measurements."""

import gc
import json
import os
import time
from pathlib import Path

import torch
import yaml
from common import make_tokenizer
from figures import Skip, record
from shapes import make_config
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from rl2.batch import Batch
from rl2.config.engines import PACKAGES, installed_version
from rl2.config.schema import WorkerConfig

# Times the mean error of log-probabilities in bf16 that transformers makes.
MOST_ROUNDING = 1.5
DRY = os.environ.get("RL2_DEVICE") == "cpu"
DEVICE = torch.device("cpu" if DRY else "cuda")
# What differs from the shapes of tests/shapes.py. The weights are random, because the GPU machine
# may be offline.
CHANGES = {
    "small": {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "initializer_range": 0.1,
    },
    "qwen3-0.6b": {"max_position_embeddings": 2**16},  # for a row of 65,536 tokens
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1024,
}


def need(engine: str) -> None:
    if engine in PACKAGES and installed_version(*PACKAGES[engine]) is None:
        raise Skip(f"{engine} is not installed")


def sglang_args() -> dict:
    """Returns the arguments of SGLang's engine on this machine.

    They come from SGLANG_ARGS. On a CPU, the arguments that SGLang needs there are added.
    """
    arguments: dict = {"max_total_tokens": 8192} if DRY else {}
    for word in os.environ.get("SGLANG_ARGS", "").split():
        key, _, value = word.partition("=")
        arguments[key] = yaml.safe_load(value)
    return arguments


def used_gib() -> float:
    """Returns the GPU memory in use by all processes, in GiB; 0 on a CPU."""
    if DRY:
        return 0.0
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


def check_memory_is_free(before: float, seconds: float = 20) -> None:
    """Checks that no more GPU memory is in use than before, so many seconds from now at most."""
    ends = time.monotonic() + seconds
    while (left := used_gib() - before) > 0.5 and time.monotonic() < ends:
        time.sleep(0.5)
    record(left_gib=left)
    assert left < 0.5, "memory of the GPU is held after the end"


def reset_peak() -> None:
    """Starts the measurement of peaks anew, without memory that torch only caches."""
    if not DRY:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def allocated_gib() -> float:
    """Returns the GPU memory that this process's tensors take, in GiB; 0 on a CPU."""
    return 0.0 if DRY else torch.cuda.memory_allocated() / 2**30


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns |got - expected| / |expected|. AssertionError if `got` is not finite."""
    got, expected = got.detach().double().cpu(), expected.detach().double().cpu()
    assert got.isfinite().all(), "not finite"
    return ((got - expected).norm() / expected.norm()).item()


def check_rounding(batch: Batch, name: str, temperature: float = 1.0, **logps: torch.Tensor):
    """Checks that log-probabilities are as close to those of fp32 as transformers is in bf16.

    `logps` are [B, T], by who computed them with the model `name`. Records the mean errors.
    """
    exact = plain_logps(batch, name, temperature, torch.float32)
    logps["transformers"] = plain_logps(batch, name, temperature, torch.bfloat16)
    errors, is_trained = {}, batch.mask > 0
    for source, values in logps.items():
        errors[source] = (values - exact)[is_trained].abs().mean().item()
    record(**{f"mean_logps_of_{source}": value for source, value in errors.items()})
    limit = MOST_ROUNDING * errors["transformers"]
    assert max(errors.values()) < limit, f"mean errors {errors}, of at most {limit:.3g}"


@torch.no_grad()
def plain_logps(batch: Batch, name: str, temperature: float, dtype: torch.dtype) -> torch.Tensor:
    """Returns [B, T] of transformers' model on padded rows, in host memory."""
    model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(DEVICE)
    log_p = (model(batch.inputs.to(DEVICE)).logits.float() / temperature).log_softmax(-1)
    return log_p.gather(2, batch.targets[..., None].long().to(DEVICE))[..., 0].cpu()


def make_model(name: str) -> str:
    """Returns a folder with a random bf16 model of the shape `name`, created on the first call.

    The folder has a character tokenizer with the size of the model's vocabulary.
    """
    folder = Path(os.environ["RL2_GPU_MODELS"], name)
    if (folder / "tokenizer_config.json").exists():
        return str(folder)
    config = make_config(name, **CHANGES.get(name, {}) | (TINY if DRY else {}))
    torch.manual_seed(0)
    with DEVICE:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():  # initial values 0 and 1 would hide swapped biases or norms
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    del model, parameter
    gc.collect()
    reset_peak()  # another process may need the memory
    # Last: a folder with a tokenizer is whole.
    _tokenizer(config.vocab_size).save_pretrained(folder)
    return str(folder)


def _tokenizer(size: int):
    """Returns the tests' character tokenizer, extended with words up to `size` tokens.

    So every token id can be decoded.
    """
    fast = make_tokenizer()
    text = json.loads(fast.backend_tokenizer.to_str())
    vocabulary = text["model"]["vocab"]
    vocabulary |= {f" word{i}": i for i in range(len(vocabulary), size)}
    fast._tokenizer = Tokenizer.from_str(json.dumps(text))
    return fast


def worker_config(model_name: str, **changes) -> WorkerConfig:
    """Returns a worker's section of the config: the defaults, without gradient checkpointing."""
    settings = {"gradient_checkpointing": False, "max_length_per_device": 4096, **changes}
    return WorkerConfig(model_name=model_name, **settings)
