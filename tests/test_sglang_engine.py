"""Tests what the SGLang engine does for GPUs. tests/sglang/ runs the real SGLang on a CPU."""

import asyncio
import itertools
import os
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from transformers import Gemma3TextConfig, MistralConfig, Qwen2Config

from rl2 import progress
from rl2.engine import sglang
from rl2.engine.base import SamplingParams
from rl2.parallel.device import GIB
from rl2.parallel.worlds import buckets

GPU = torch.device("cuda:0")


def test_weights_that_travel_together_have_one_dtype_and_fit_a_bucket():
    short, long = torch.bfloat16, torch.float32
    sizes = [(3, short), (5, long), (7, short), (20, short), (100, short)]
    weights = [(str(i), torch.empty(size, dtype=dtype)) for i, (size, dtype) in enumerate(sizes)]
    names = ["".join(name for name, _ in bucket) for bucket in buckets(weights, limit=64)]
    assert names == ["0", "1", "23", "4"]


def test_the_folder_of_the_cuda_runtime_is_that_of_torch(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert sglang.cudart_folder() is None, "a torch for CPUs has none"
    monkeypatch.setattr(torch.version, "cuda", "913.0")
    assert sglang.cudart_folder() is None, "this process has not loaded it"
    maps = tmp_path / "maps"
    maps.write_text("7f00-7f10 r-xp 00000000 08:01 42    /opt/of torch/libcudart.so.913.0.88\n")
    monkeypatch.setattr(sglang, "MAPPED_FILES", maps)
    assert sglang.cudart_folder() == "/opt/of torch"


@pytest.mark.parametrize("folder", [None, "/own"])
def test_schedulers_find_the_cuda_runtime_and_ranks_keep_their_variables(monkeypatch, folder):
    monkeypatch.setattr(sglang, "cudart_folder", lambda: "/nvidia")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    monkeypatch.setenv("LD_LIBRARY_PATH", folder or "")
    if folder is None:
        monkeypatch.delenv("LD_LIBRARY_PATH")
    with sglang._environment_of_schedulers(GPU):
        assert os.environ["LD_LIBRARY_PATH"].split(":") == [*filter(None, [folder]), "/nvidia"]
        os.environ["NCCL_NVLS_ENABLE"] = os.environ["NCCL_CUMEM_ENABLE"] = "0"  # as SGLang does
    assert os.environ.get("LD_LIBRARY_PATH") == folder
    variables = {key: value for key, value in os.environ.items() if key.startswith("NCCL_")}
    assert variables == {"NCCL_NVLS_ENABLE": "1"}


def test_buffers_that_nobody_sends_get_no_noise():
    buffer = "model.layers.0.conv._state_indices"
    names = [buffer, "model.layers.0.mlp.gate_up_proj.weight", "model.layers.0.experts.w13_weight"]
    answers = [{"checksums": dict.fromkeys(names, "")}]
    assert sglang._names_without_source(answers, ["layers.0.mlp.up_proj.weight"]) == [buffer]


@pytest.mark.parametrize(
    ("looks", "message"),
    [([30, 30, 31, 68], None), (itertools.repeat(33), "took 40.0 GiB of .* gave back 3.0 GiB")],
)
def test_training_waits_for_the_memory_of_its_own_gpu(monkeypatch, looks, message):
    """Each look finds so many GiB free, of which SGLang has taken 40. It keeps its context."""
    monkeypatch.setattr(sglang, "dist", SimpleNamespace(barrier=lambda group: None))
    monkeypatch.setattr(sglang, "SECONDS_TO_RELEASE", 0.05)
    looks = itertools.chain([30], looks)
    rank = SimpleNamespace(engine=None, group=None, device=GPU, taken=40 * GIB)
    rank._free_bytes = lambda: next(looks) * GIB
    with pytest.raises(RuntimeError, match=message) if message else nullcontext():
        sglang.SGLangEngine._release_memory(rank)


def test_one_timer_marks_while_requests_are_in_flight(monkeypatch):
    monkeypatch.setattr(sglang, "SECONDS_BETWEEN_MARKS", 0.01)
    engine = object.__new__(sglang.SGLangEngine)
    engine.loop = asyncio.new_event_loop()
    engine.num_requests = engine.num_aborts = engine.version = 0
    engine.vocabulary, engine.max_length = 9, 99
    may_answer, params = asyncio.Event(), SamplingParams(max_new_tokens=2)

    async def async_generate(**request):
        await may_answer.wait()
        told = [(-0.5, 7, None), (-0.25, 8, None)]
        meta = {"output_token_logprobs": told, "finish_reason": {"type": "length"}}
        return {"meta_info": meta}

    async def count_marks(seconds=0.1):
        before = progress.num_marks
        await asyncio.sleep(seconds)
        return progress.num_marks - before

    async def main():
        requests = [engine.generate([1, 2], params, (0, i)) for i in range(50)]
        answers = asyncio.gather(*requests)
        assert 2 <= await count_marks() <= 20
        may_answer.set()
        for answer in await answers:
            assert (answer.tokens, answer.logps, answer.version) == ([7, 8], [-0.5, -0.25], 0)
        assert not await count_marks()

    engine.engine = SimpleNamespace(async_generate=async_generate)
    engine.loop.run_until_complete(main())
    engine.loop.close()


def test_sglang_is_refused_where_it_would_ignore_a_window():
    config = MistralConfig(sliding_window=4096)
    sglang._check_window(config, 4096)
    with pytest.raises(ValueError, match="4096 tokens, and a request may have 8192"):
        sglang._check_window(config, 8192)
    for without_window in (MistralConfig(sliding_window=None), Qwen2Config(sliding_window=64)):
        sglang._check_window(without_window, 8192)
    sglang._check_window(Gemma3TextConfig(sliding_window=512), 8192)  # SGLang has its window
