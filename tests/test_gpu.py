"""Tests the runner of tests/gpu with parts that fail, hang, die and leave processes behind.

Also runs some of the real parts on a CPU.
"""

import ast
import os
import subprocess
import sys
import time

import psutil
import pytest
from common import ROOT

GPU = ROOT / "tests/gpu"
sys.path.insert(0, str(GPU))
import run as runner  # noqa: E402
from run import PARTS, Part, run_parts  # noqa: E402

FAKES = """
import os, signal, subprocess, sys, time
from figures import Skip, goal, record

def good():
    record(answer=42, rate=1.23456)
    goal("share", 0.25, 0.5)

def wrong():
    record(before=1)
    assert False, "one | two"

def hangs():
    record(before=2)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    time.sleep(600)

def dies():
    os.kill(os.getpid(), signal.SIGKILL)

def leaves():
    code = "import time; time.sleep(600)  # forgotten"
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True)

def skipped():
    raise Skip("there is one GPU")
"""


def shell(*words, **env):
    env = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **env}
    command = ["bash", str(GPU / "run.sh"), *map(str, words)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture
def paths(monkeypatch):
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests/sglang", GPU)))
    )


def test_a_part_that_fails_hangs_or_dies_costs_itself_only(tmp_path, paths, capsys):
    (tmp_path / "fakes.py").write_text(FAKES)
    names = ("wrong", "hangs", "dies", "leaves", "skipped", "missing", "good")
    parts = {
        name: Part(str(tmp_path / "fakes.py"), 15 if name == "hangs" else 60) for name in names
    }
    start = time.monotonic()
    outcomes = {o.name: o for o in run_parts(parts, tmp_path / "found/result.md", "# versions\n")}
    assert {name: o.result for name, o in outcomes.items()} == {
        "wrong": "failed",
        "hangs": "timed out",
        "dies": "failed",
        "leaves": "failed",
        "skipped": "skipped",
        "missing": "failed",
        "good": "passed",
    }
    assert outcomes["wrong"].reason == "AssertionError: one | two" and outcomes[
        "wrong"
    ].figures == {"before": 1}
    assert outcomes["hangs"].figures == {"before": 2} and outcomes["hangs"].seconds < 40
    assert "forgotten" in outcomes["leaves"].reason and "-9" in outcomes["dies"].reason
    assert outcomes["good"].figures == {
        "answer": 42,
        "rate": 1.235,
        "share": "0.25 (goal 0.5: missed)",
    }
    assert time.monotonic() - start < 200
    text = (tmp_path / "found/result.md").read_text()
    assert text.startswith("# versions\n") and "| good | passed |" in text and "one / two" in text
    assert [line.split(" | ")[0][2:] for line in text.splitlines()[4:]] == list(parts)
    assert "| skipped | skipped |" in capsys.readouterr().out
    words = [p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"])]
    assert not any("time.sleep(600)" in " ".join(w) for w in words), "a part's process goes on"


def test_what_no_time_is_left_for_is_told(tmp_path, paths, monkeypatch):
    monkeypatch.setattr(runner, "LEAST", 2)
    (tmp_path / "fakes.py").write_text(FAKES)
    parts = {name: Part(str(tmp_path / "fakes.py"), 600) for name in ("hangs", "good")}
    first, second = run_parts(parts, tmp_path / "result.md", "", budget=5)
    assert first.result == "timed out" and second.result == "not run"


def test_every_part_is_there_and_imports(paths):
    for name, part in PARTS.items():
        functions = {
            getattr(node, "name", "") for node in ast.parse((GPU / part.file).read_text()).body
        }
        assert name in functions, f"{part.file} has no {name}"
    code = "import sys, importlib\nfor name in sys.argv[1:]: importlib.import_module(name)"
    files = sorted({part.file.removesuffix(".py") for part in PARTS.values()})
    subprocess.run(
        [sys.executable, "-c", code, *files],
        check=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert shell("--list").stdout.split()[::3] == list(PARTS)


def test_without_a_gpu_it_says_so(tmp_path):
    done = shell("--out", tmp_path, CUDA_VISIBLE_DEVICES="")
    assert (
        done.returncode == 3
        and "there is no GPU" in done.stdout
        and len(done.stdout.splitlines()) == 1
    )
    assert not list(tmp_path.iterdir())


def test_parts_can_be_tried_on_a_cpu(tmp_path):
    done = shell("--out", tmp_path, "head", "worker", RL2_DEVICE="cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = tmp_path.glob("gpu-*-dry.md")
    text = result.read_text()
    assert (
        "a dry run" in text
        and "torch 2" in text
        and "| head | passed |" in text
        and "| worker | passed |" in text
    )
