"""Rehearses the parts of tests/gpu on a CPU, with tiny shapes."""

import ast
import os
import subprocess
import sys

from common import ROOT

GPU = ROOT / "tests/gpu"
sys.path.insert(0, str(GPU))
from parts import PARTS  # noqa: E402


def shell(*words, **env):
    env = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **env}
    command = ["bash", str(GPU / "run.sh"), *map(str, words)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)


def test_every_part_is_there_and_needs_earlier_ones():
    for number, (name, part) in enumerate(PARTS.items()):
        functions = {
            getattr(node, "name", "") for node in ast.parse((GPU / part.file).read_text()).body
        }
        assert (part.function or name) in functions, f"{part.file} has no {name}"
        assert set(part.needs) <= set(list(PARTS)[:number]), name
    assert shell("--list").stdout.split()[::3] == list(PARTS)


def test_without_a_gpu_it_says_so(tmp_path):
    done = shell("--out", tmp_path, CUDA_VISIBLE_DEVICES="")
    assert (
        done.returncode == 3
        and "there is no GPU" in done.stdout
        and len(done.stdout.splitlines()) == 1
    )
    assert not list(tmp_path.iterdir())


NEED_MORE = {name for name in PARTS if name.startswith(("sglang", "vllm", "plan"))}


def test_all_parts_can_be_rehearsed_on_a_cpu(tmp_path):
    done = shell("--out", tmp_path, "--fork", RL2_DEVICE="cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = tmp_path.glob("gpu-*-dry.md")
    text = result.read_text()
    assert "a dry run" in text and "torch 2" in text
    skipped = {name for name in PARTS if f"| {name} | skipped |" in text}
    assert skipped == NEED_MORE
    for name in PARTS.keys() - NEED_MORE:
        assert f"| {name} | passed |" in text, name
