"""Tests what the SGLang engine does for GPUs. tests/sglang/ runs the real SGLang on a CPU."""

import itertools
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rl2.engine import sglang
from rl2.engine.base import EngineSettings, TrainerMemory
from rl2.engine.share import choose_share
from rl2.parallel.device import GIB

GPU = torch.device("cuda:0")
SETTINGS = EngineSettings("model", torch.bfloat16, GPU, rank=0, world_size=1)


def test_weights_that_travel_together_have_one_dtype_and_fit_a_bucket(monkeypatch):
    monkeypatch.setattr(sglang, "BUCKET_SIZE_BYTES", 64)
    short, long = torch.bfloat16, torch.float32
    sizes = [(3, short), (5, long), (7, short), (20, short), (100, short)]
    weights = [(str(i), torch.empty(size, dtype=dtype)) for i, (size, dtype) in enumerate(sizes)]
    buckets = ["".join(name for name, _ in bucket) for bucket in sglang._buckets(weights)]
    assert buckets == ["0", "1", "23", "4"]


def test_the_folder_of_the_cuda_runtime_is_that_of_torch(monkeypatch, tmp_path):
    """Where this process has loaded it, else where pip has installed it."""
    monkeypatch.setattr(torch.version, "cuda", None)
    assert sglang.cudart_folder() is None, "a torch for CPUs has none"
    monkeypatch.setattr(torch.version, "cuda", "913.0")
    assert sglang.cudart_folder() is None
    packaged = tmp_path / "nvidia/cu913/lib/libcudart.so.913"
    packaged.parent.mkdir(parents=True)
    packaged.touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert sglang.cudart_folder() == str(packaged.parent)
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


@pytest.mark.parametrize(("requests", "graphs"), [(48, 48), (512, 512), (2000, 512)])
def test_graphs_reach_up_to_the_requests_that_run(requests, graphs):
    settings = replace(SETTINGS, max_running_requests=requests)
    arguments = sglang._server_arguments(settings, 0.5, nccl_port=1, http_port=2)
    assert arguments["max_running_requests"] == requests
    assert arguments["cuda_graph_max_bs_decode"] == graphs
    assert arguments["sleep_on_idle"] is True


def test_buffers_that_nobody_sends_get_no_noise():
    buffer = "model.layers.0.conv._state_indices"
    names = [buffer, "model.layers.0.mlp.gate_up_proj.weight", "model.layers.0.experts.w13_weight"]
    answers = [{"checksums": dict.fromkeys(names, "")}]
    assert sglang._names_without_source(answers, ["layers.0.mlp.up_proj.weight"]) == [buffer]


@pytest.fixture
def release(monkeypatch):
    """Frees the memory of a rank's GPU, of which each look finds so many GiB free.

    `told` is what the engine's first rank has got back, and what SGLang took, in GiB; None on the
    first rank itself.
    """

    def release_memory(looks, told=None):
        def broadcast(values, **options):
            values[:] = values if told is None else [GIB * number for number in told]

        dist = SimpleNamespace(barrier=lambda group: None, broadcast_object_list=broadcast)
        monkeypatch.setattr(sglang, "dist", dist)
        looks = iter(looks)
        rank = SimpleNamespace(engine=None, group=None, device=GPU, taken=40 * GIB)
        rank._free_bytes = lambda: next(looks) * GIB
        sglang.SGLangEngine._release_memory(rank)
        return next(looks, None)

    return release_memory


def test_training_waits_for_the_memory_of_its_own_gpu(release, monkeypatch):
    """That takes a rank longer, and it may get a little less than the first one."""
    assert release([30, 30, 31, 68], told=[39, 40]) is None, "it did not look until all was free"
    monkeypatch.setattr(sglang, "SECONDS_TO_RELEASE", 0.05)
    with pytest.raises(RuntimeError, match="gave back 39.0 GiB on the first GPU.* 0.0 on cuda:0"):
        release(itertools.repeat(30), told=[39, 40])


def test_an_engine_that_gives_too_little_back_is_an_error(release):
    release([30, 66, 66])  # it keeps its context and its graphs
    with pytest.raises(RuntimeError, match="took 40.0 GiB .* gave back 3.0"):
        release([30, 33, 33])


def test_ports_are_outside_the_range_of_connections(monkeypatch):
    monkeypatch.setattr(sglang, "dist", SimpleNamespace(barrier=lambda: None))
    ports = sglang._free_ports(2)
    assert len(set(ports)) == 2 and max(ports) < 32_768  # the default of Linux


def test_with_auto_the_engine_takes_what_the_trainer_leaves(monkeypatch):
    """The figures are those of a 7B model on two GPUs, in GB: weights and optimizer take 46."""
    gb = 10**9
    total, free = 85 * gb, 38 * gb
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 46 * gb)
    monkeypatch.setattr("rl2.engine.share.all_gather_objects", lambda value: [value])

    def share_beside(**memory):
        trainer = TrainerMemory(**memory)
        return choose_share(replace(SETTINGS, gpu_memory_utilization="auto", trainer=trainer))

    share = share_beside(sending=3 * gb, engine_weights=15 * gb)
    assert 0.99 * free < 0.15 * total + share * free <= free  # room to generate
    share = share_beside(sending=24 * gb, engine_weights=gb)  # keys and values stay meanwhile
    assert 0.99 * free < 24 * gb + 2**30 + 0.05 * total + share * free <= free
    with pytest.raises(RuntimeError, match="keeps 42.8 GiB.*actor.offload_optimizer=true"):
        share_beside(sending=24 * gb, engine_weights=15 * gb)
    assert choose_share(replace(SETTINGS, gpu_memory_utilization=0.6)) == 0.6
