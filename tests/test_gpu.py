"""Tests the runner of tests/gpu with parts that fail, hang, die and leave processes behind.

Also rehearses the real parts on a CPU, with tiny shapes.
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
from parts import PARTS, Part  # noqa: E402
from run import run_parts  # noqa: E402

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

def fine():
    pass

def steps():
    from figures import Steps
    steps = Steps()
    with steps.step("first"):
        assert False, "one"
    with steps.step("second"):
        record(after=3)
    with steps.step("third"):
        assert False, "three"
    steps.finish()
"""


def shell(*words, **env):
    env = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **env}
    command = ["bash", str(GPU / "run.sh"), *map(str, words)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """The file with the fake parts."""
    paths = (ROOT, ROOT / "tests", ROOT / "tests/sglang", GPU)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
    file = tmp_path / "fakes.py"
    file.write_text(FAKES)
    return str(file)


def results_of(parts, tmp_path):
    outcomes = run_parts(parts, tmp_path / "found/result.md", "# versions\n")
    return {outcome.name: outcome for outcome in outcomes}


def test_a_part_that_fails_hangs_or_dies_costs_itself_only(tmp_path, fakes, monkeypatch, capsys):
    monkeypatch.setattr(runner, "SECONDS_TO_END", 2)
    names = ("wrong", "hangs", "dies", "leaves", "skipped", "missing", "good")
    parts = {name: Part(fakes, 8 if name == "hangs" else 60) for name in names}
    start = time.monotonic()
    outcomes = results_of(parts, tmp_path)
    assert {name: o.result for name, o in outcomes.items()} == {
        "wrong": "failed",
        "hangs": "timed out",
        "dies": "failed",
        "leaves": "failed",
        "skipped": "skipped",
        "missing": "failed",
        "good": "passed",
    }
    assert outcomes["wrong"].reason == "AssertionError: one | two"
    assert outcomes["wrong"].figures == {"before": 1}
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
    printed = capsys.readouterr().out
    assert "| skipped | skipped |" in printed
    # Who started the call reads its output only: why a part failed and where it hung is in it.
    assert 'assert False, "one | two"' in printed
    assert f'File "{fakes}", line 16 in hangs' in printed
    words = [p.info["cmdline"] or [] for p in psutil.process_iter(["cmdline"])]
    assert not any("time.sleep(600)" in " ".join(w) for w in words), "a part's process goes on"


def test_a_part_is_skipped_at_once_if_one_that_it_needs_has_failed(tmp_path, fakes):
    parts = {
        "wrong": Part(fakes, 60),
        "good": Part(fakes, 60, ("wrong",)),
        "fine": Part(fakes, 60, ("good",)),
        "steps": Part(fakes, 60),
    }
    outcomes = results_of(parts, tmp_path)
    assert outcomes["good"].reason == "needs wrong, which failed"
    assert outcomes["fine"].reason == "needs good, which was skipped"
    assert outcomes["fine"].seconds == outcomes["good"].seconds == 0
    # A step of a part that fails does not stop the next one.
    assert outcomes["steps"].result == "failed" and outcomes["steps"].figures == {"after": 3}
    assert outcomes["steps"].reason == "AssertionError: first: one; third: three"


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


BY_HAND = {
    "variants_8k",
    "plan",
}  # half a minute each; test_compile.py and test_memory_plan.py do more
NEED_MORE = {
    "quickstart",
    *(name for name in PARTS if name.startswith(("sglang", "vllm"))),
}


def test_all_parts_can_be_rehearsed_on_a_cpu(tmp_path):
    names = [name for name in PARTS if name not in BY_HAND]
    done = shell("--out", tmp_path, "--fork", *names, RL2_DEVICE="cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    (result,) = tmp_path.glob("gpu-*-dry.md")
    text = result.read_text()
    assert "a dry run" in text and "torch 2" in text
    skipped = {name for name in names if f"| {name} | skipped |" in text}
    assert skipped == NEED_MORE
    for name in set(names) - NEED_MORE:
        assert f"| {name} | passed |" in text, name
