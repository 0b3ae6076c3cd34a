"""Rehearses the parts of tests/gpu on a CPU, with tiny shapes."""

import json
import os
import re
import subprocess
import sys

import pytest
from common import ROOT, conversation, launch, make_model, read_jsonl, write_jsonl

GPU = ROOT / "tests/gpu"
sys.path.insert(0, str(GPU))
from parts import PARTS  # noqa: E402


def shell(*words, **env):
    env = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **env}
    command = ["bash", str(GPU / "run.sh"), *map(str, words)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)


def test_without_a_gpu_it_says_so(tmp_path):
    done = shell("--out", tmp_path, CUDA_VISIBLE_DEVICES="")
    assert (
        done.returncode == 3
        and "there is no GPU" in done.stdout
        and len(done.stdout.splitlines()) == 1
    )
    assert not list(tmp_path.iterdir())


def test_the_outcomes_of_parts_are_in_a_table(tmp_path):
    """SGLang is not installed, so the second part is skipped, and with it the one that needs it."""
    names = ("facts", "sglang_facts", "sglang_contract")
    done = shell("--out", tmp_path, *names, RL2_DEVICE="cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = tmp_path.glob("gpu-*-dry.md")
    text = result.read_text()
    assert "a dry run" in text and "torch 2" in text
    assert "| facts | passed |" in text and "| sglang_facts | skipped |" in text
    assert "needs sglang_facts, which was skipped" in text


NEED_MORE = {name for name in PARTS if name.startswith(("sglang", "vllm", "plan"))}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The folder of the models of all parts."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory):
    """The folder of the part gsm8k."""
    folder = tmp_path_factory.mktemp("gsm8k")
    make_model(folder / "model")
    for name in ("train", "test"):
        rows = [{"messages": conversation(i)[:2]} for i in range(24)]
        write_jsonl(folder / f"{name}.jsonl", rows)
    return folder


@pytest.mark.parametrize("name", PARTS)
def test_a_part_can_be_rehearsed_on_a_cpu(tmp_path, monkeypatch, models, gsm8k, name):
    part, figures = PARTS[name], tmp_path / "figures"
    figures.touch()
    for key, value in {
        "RL2_DEVICE": "cpu",
        "RL2_GPU_MODELS": models,
        "RL2_GPU_GSM8K": gsm8k,
        "RL2_GPU_FIGURES": figures,
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }.items():
        monkeypatch.setenv(key, str(value))
    if part.function == "two_gpus":
        launch(2, GPU / part.file, *part.arguments)
    else:
        function = [GPU / part.file, part.function or name, json.dumps(part.arguments)]
        launch(1, GPU / "part.py", *function, figures, 300, check=name not in NEED_MORE)
    reasons = [line["reason"] for line in read_jsonl(figures) if "reason" in line]
    assert len(reasons) == (name in NEED_MORE), reasons


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("command", "result"),
    [
        (["bash", "gpu.sh", "grpo", "trainer.seed=1"], r"rl2 +[\d.]+ s a step"),
        ([sys.executable, "update.py", "--pack=auto", "--document=64"], r"update .* tokens/s"),
    ],
)
def test_measurements_can_be_rehearsed_on_a_cpu(models, gsm8k, command, result):
    env = {"RL2_DEVICE": "cpu", "RL2_GPU_MODELS": str(models), "RL2_GPU_GSM8K": str(gsm8k)}
    env |= {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    program, name, *arguments = command
    arguments += [str(gsm8k / "model")] * (program == sys.executable)
    done = subprocess.run(
        [program, ROOT / "benchmarks" / name, *arguments],
        env=os.environ | env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(rf"^{result}", done.stdout, re.MULTILINE)
    assert re.search(r"step \d/\d", done.stderr)
