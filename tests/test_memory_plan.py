"""The memory plan: predicted bytes against those of real tensors."""

import json
import re
from dataclasses import asdict

import memory_fits
import pytest
import shapes
from common import launch, make_model, run, run_main

from rl2.tools.plan import main

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "head_dim": 32,
    "vocab_size": 1024,
}


@pytest.mark.parametrize("world", [1, 2])
def test_predicted_bytes_are_those_of_a_real_run(tmp_path, world):
    model = make_model(tmp_path / "model", "qwen3", **SIZES)
    # Of more layers and fewer tokens: what is gathered of an embedding takes more than is
    # predicted, which would be a large part of a model whose layers take 4 bits.
    sizes = {**SIZES, "hidden_size": 256, "num_hidden_layers": 6, "vocab_size": 128}
    sizes["initializer_range"] = 0.02  # or the tokens of a row are certain, and have no gradient
    quantised = make_model(tmp_path / "quantised", "qwen3", **sizes)
    launch(world, "tests/measured_memory.py", model, quantised, tmp_path / "bytes.json")
    jobs = json.loads((tmp_path / "bytes.json").read_text())
    assert len(jobs) >= 5
    for job, bytes_of in jobs.items():
        assert bytes_of["predicted"].keys() == bytes_of["measured"].keys()
        for phase, measured in bytes_of["measured"].items():
            assert bytes_of["predicted"][phase] == pytest.approx(measured, rel=0.12), (job, phase)


def test_the_table_of_the_docs_has_the_plan_of_today():
    plans = json.loads(memory_fits.FILE.read_text())
    assert len(plans) == len(memory_fits.MODELS) * len(memory_fits.METHODS)
    assert plans["qwen3-0.6b qlora"] == asdict(memory_fits.make_plan("qwen3-0.6b", "qlora")), (
        "run python tests/memory_fits.py and python docs/generate.py"
    )


def make_large_config(folder) -> str:
    """A folder with the config of a model of 0.2e9 weights, and without any."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 32000}
    shapes.make_config("qwen3-0.6b", num_hidden_layers=2, **sizes).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def plan(capsys, monkeypatch):
    """Runs `rl2 plan`. Returns (status, stdout, stderr)."""
    monkeypatch.setenv("WORLD_SIZE", "1")  # or what the command sets would stay

    def run_here(*words):
        return run_main(main, *words), *capsys.readouterr()

    return run_here


def test_the_command_says_what_fits_and_what_needs_less(tmp_path, plan):
    """It reads config.json alone."""
    model = make_large_config(tmp_path / "model")
    arguments = [f"actor.model_name={model}", "actor.max_length_per_device=512"]
    arguments += ["data.max_length=400", "data.path=nowhere.jsonl", "data.batch_size=8"]
    gpu = ["--gpu-memory", "5"]  # 3 of them are for what is not a tensor
    status, output, errors = plan("sft", *gpu, *arguments)
    assert status == 1, errors
    rows = dict(re.findall(r"^(\w+) +([\d.]+) +[\d.]+ +[\d.]+$", output, re.MULTILINE))
    assert rows.keys() == {"load", "update", "step", "save"}
    # 16 bytes a weight in the step, and 12 between steps.
    assert float(rows["step"]) == pytest.approx(16 * 186.6e6 / 2**30, rel=0.1)
    assert "does not fit" in output and "offload_optimizer=true" in output
    status, output, _ = plan("sft", *gpu, *arguments, "--gpus", "4")
    assert status == 0 and "fits" in output.splitlines()[-1]


def test_a_layout_that_is_refused_is_a_problem_of_the_plan_too(tmp_path, plan):
    """And a model that the hub does not give is one message."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = run("-m", "rl2", "plan", "actor.model_name=nobody/none", env=offline, check=False)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: actor.model_name=nobody/none: there is no such folder")
    for arguments in (["pop"], ["--gpus", "0"], ["--gpu-memory", "-1"]):
        assert plan(*arguments)[0] == 2
    model = make_large_config(tmp_path / "model")
    status, _, errors = plan(f"actor.model_name={model}", "actor.tp_size=3", "--gpus", "8")
    assert status == 2 and "actor.tp_size=3 does not divide the 8 processes" in errors
