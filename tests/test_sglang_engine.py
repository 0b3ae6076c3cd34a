"""Tests what the SGLang engine does around SGLang, with a stand-in for SGLang and for GPUs."""

import pytest
from common import ROOT, launch, make_model


@pytest.fixture(scope="module")
def name(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "llama")


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("world", [1, 2])
def test_schedulers_read_the_weights_of_their_ranks(name, world, device):
    launch(world, ROOT / "tests/sglang_ranks.py", "weights", name, device)


def test_experts_arrive_as_in_files(tmp_path):
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    name = make_model(tmp_path / "qwen3_moe", "qwen3_moe", tied=False, **sizes)
    launch(1, ROOT / "tests/sglang_ranks.py", "experts", name, "cpu")


@pytest.mark.parametrize(
    "check",
    ["overlap", "environment", "share", "evaluation", "arguments", "buffers", "kept"],
)
def test_an_engine_of_one_rank(name, check):
    launch(1, ROOT / "tests/sglang_ranks.py", check, name, "cuda:0")


def test_training_waits_for_the_memory_of_its_own_gpu(name):
    launch(2, ROOT / "tests/sglang_ranks.py", "release", name, "cuda:0")


def test_ports_are_outside_the_range_of_connections(name):
    launch(2, ROOT / "tests/sglang_ranks.py", "ports", name, "cpu")
