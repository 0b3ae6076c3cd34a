"""Weights at random places of their rounding cells."""

import sys

import pytest
import torch
import torch.distributed as dist
from common import launch, make_model
from parity import full_weights, make_batch, make_worker, policy_loss, save_layouts
from transformers import AutoModelForCausalLM

from rl2.model.dither import CHUNK_SIZES, dither_
from rl2.parallel.mesh import init_distributed

ALL_BF16 = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
COPIES = 256
CPU = torch.device("cpu")


def dithered(weight: torch.Tensor, seed: int = 0, name: str = "w") -> torch.Tensor:
    weight = weight.clone()
    dither_(seed, name, weight)
    return weight


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_every_bf16_number_rounds_to_itself_from_all_over_its_cell():
    stored = ALL_BF16.float().repeat(COPIES, 1)
    moved = dithered(stored)
    assert same_bits(moved.bfloat16(), stored.bfloat16())
    may_move = ALL_BF16.isfinite() & (ALL_BF16.abs().float() >= 2.0**-125)
    assert same_bits(moved[:, ~may_move], stored[:, ~may_move])
    exponents = torch.frexp(stored[0]).exponent
    places = (moved - stored).double() / 2.0 ** (exponents - 8).double()  # in steps of bf16
    places = places[:, may_move] * stored[0, may_move].sign()
    is_power = torch.frexp(stored[0, may_move]).mantissa.abs() == 0.5
    inner, of_powers = places[:, ~is_power], places[:, is_power]
    # Uniform: in [-1/2, 1/2], and in [-1/4, 1/2] around a power of two.
    for sample, low, high in ((inner, -0.5, 0.5), (of_powers, -0.25, 0.5)):
        assert low <= sample.min() < low + 1e-3 and high - 1e-3 < sample.max() <= high
        edges = torch.linspace(low, high, 9, dtype=torch.float64)
        counts = torch.histc(sample, 8, low, high) / sample.numel()
        assert counts == pytest.approx([1 / 8] * 8, abs=0.005), (edges, counts)
    assert (inner.mean(0).abs() < 5 / (12 * COPIES) ** 0.5).all()  # each number by itself


def test_places_depend_on_seed_name_and_position_alone(monkeypatch):
    weight = torch.randn(3, 2**18 // 2 + 1).bfloat16().float()  # more than one chunk
    moved = dithered(weight)
    assert same_bits(moved, dithered(weight))
    assert same_bits(moved.view(-1)[:1000], dithered(weight.view(-1)[:1000]))
    for other in (dithered(weight, seed=1), dithered(weight, name="v")):
        assert (other == moved).float().mean() < 0.01
    for size in CHUNK_SIZES["cuda"], 1000:
        monkeypatch.setitem(CHUNK_SIZES, "cpu", size)
        assert same_bits(moved, dithered(weight))
    exact = torch.randn(1000)
    exact[exact == exact.bfloat16().float()] = 0.1  # what bf16 does not have
    assert same_bits(dithered(exact), exact)


@pytest.fixture(scope="module")
def stored_in_bf16(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dither")
    make_model(folder / "plain")
    model = AutoModelForCausalLM.from_pretrained(folder / "plain", dtype=torch.bfloat16)
    model.save_pretrained(folder / "model")
    init_distributed()
    yield str(folder / "model")
    dist.destroy_process_group()


def test_a_dithered_worker_starts_with_the_stored_model(stored_in_bf16):
    plain = make_worker(stored_in_bf16, CPU, dtype="bfloat16")
    moved = make_worker(stored_in_bf16, CPU, dtype="bfloat16", dither_weights=True)
    batch = make_batch()
    assert torch.equal(plain.score(batch).logps, moved.score(batch).logps)
    rounded = full_weights(moved, torch.bfloat16)
    for name, weight in full_weights(plain, torch.bfloat16).items():
        assert same_bits(weight, rounded[name])
    in_fp32 = full_weights(moved, torch.float32)
    assert all((weight != rounded[name].float()).any() for name, weight in in_fp32.items())
    computed_in_fp32 = make_worker(stored_in_bf16, CPU, dtype="float32", dither_weights=True)
    for name, weight in full_weights(computed_in_fp32, torch.float32).items():
        assert same_bits(weight, rounded[name].float())


LAYOUTS = {
    "fsdp": {},
    "copies": {"fsdp_size": 1},
    "tp": {"tp_size": 2},
    "sp": {"sp_size": 2},
    "offload": {"offload_model": True, "offload_optimizer": True},
}


def start(name, **changes):
    """The float32 weights at the start."""
    return full_weights(make_worker(name, CPU, dtype="bfloat16", dither_weights=True, **changes))


if __name__ == "__main__":  # a process of the test below
    save_layouts(start, LAYOUTS, *sys.argv[1:])


def test_every_layout_starts_at_the_same_places(stored_in_bf16, tmp_path):
    launch(2, __file__, stored_in_bf16, tmp_path / "results")
    results = torch.load(tmp_path / "results")
    assert results.keys() == LAYOUTS.keys()
    expected = start(stored_in_bf16)
    for layout, weights in results.items():
        assert weights.keys() == expected.keys()
        assert all(same_bits(weights[key], expected[key]) for key in weights), layout


@pytest.mark.parametrize("changes", [{}, {"dtype": "float32"}, {"dither_weights": True}])
def test_a_resume_warns_if_the_weights_round_to_another_policy(stored_in_bf16, capsys, changes):
    """With or without dither, the policy is the rounded copy of the saved weights."""
    worker = make_worker(stored_in_bf16, CPU, dtype="bfloat16", lr=1e-4)
    worker.update(make_batch(), policy_loss, with_entropy=True)
    batch = make_batch()
    logps = worker.score(batch).logps
    resumed = make_worker(stored_in_bf16, CPU, **{"dtype": "bfloat16"} | changes)
    capsys.readouterr()
    resumed.load_state_dict(worker.state_dict())
    output = capsys.readouterr().out
    is_another = "dtype" in changes
    assert ("torch.bfloat16 and goes on in torch.float32" in output) == is_another
    assert torch.equal(resumed.score(batch).logps, logps) != is_another
