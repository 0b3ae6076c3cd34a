"""Tests what is said of a machine on which SGLang could not run, with stand-ins for compilers."""

import shutil

import pytest
import torch
from common import run

from rl2.config import toolkit
from rl2.config.toolkit import cudart_folder, toolkit_problems, version_problems

NVCC = """#!/bin/sh
if [ "$1" = --version ]; then echo "Cuda compilation tools, release $CUDA, V$CUDA.88"; exit; fi
[ -z "$NVCC_ERROR" ] || { echo "In file included from trial.cu:"; echo "$NVCC_ERROR"; exit 1; } >&2
"""
CXX = """#!/bin/sh
[ -e "$CUDA_HOME/lib64/libcudart.so" ] || { echo "ld: cannot find -lcudart" >&2; exit 1; }
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with a whole toolkit of CUDA 13.0, of which a test takes something away."""
    programs = {"cuda/bin/nvcc": NVCC, "bin/c++": CXX, "bin/ninja": "#!/bin/sh\n"}
    for name, text in programs.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    (tmp_path / "cuda/lib64").mkdir()
    (tmp_path / "cuda/lib64/libcudart.so").touch()
    (tmp_path / "bin/sh").symlink_to("/bin/sh")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("CUDA", "13.0")
    for name in ("CXX", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    return tmp_path


def test_a_whole_toolkit_is_no_problem(machine, monkeypatch):
    assert not list(toolkit_problems())
    monkeypatch.setenv("CUDA", "13.2")  # headers and nvcc of one minor version work together
    assert not list(toolkit_problems())


@pytest.mark.parametrize("name", ["cuda/bin/nvcc", "bin/ninja", "bin/c++"])
def test_a_missing_compiler_is_named(machine, name):
    (machine / name).unlink()
    (problem,) = toolkit_problems()
    assert f"there is no {machine / name if 'cuda' in name else name[4:]}." in problem
    assert "CUDA_HOME" in problem and "rollout.engine=local" in problem


def test_other_versions_and_failed_trials_are_refused_with_the_compilers_words(
    machine, monkeypatch
):
    monkeypatch.setenv("CUDA", "12.4")
    (problem,) = toolkit_problems()
    assert "nvcc is of CUDA 12.4, and torch is built for CUDA 13.0" in problem
    monkeypatch.setenv("CUDA", "13.0")
    monkeypatch.setenv("NVCC_ERROR", "error: compiler and headers are incompatible")
    (problem,) = toolkit_problems()
    assert "failed: error: compiler and headers are incompatible." in problem
    monkeypatch.setenv("NVCC_ERROR", "")
    (machine / "cuda/lib64/libcudart.so").unlink()
    (problem,) = toolkit_problems()
    assert "failed: ld: cannot find -lcudart." in problem
    monkeypatch.setenv("LOCAL_RANK", "1")  # the first process of the node says it
    assert not list(toolkit_problems())


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("0.5.2", "0.5.2 is too old: rl2 needs 0.5.15 or later"),
        ("0.4.9.post6", "Python 3.11 to 3.13"),
        ("0.5.17", "enable_fp32_lm_head=false"),
        ("0.5.18", None),
        ("0.5.23.post1", None),
        ("1.0.0rc1", None),
    ],
)
def test_old_releases_are_refused(monkeypatch, version, words):
    monkeypatch.setattr(toolkit, "version", lambda package: version)
    problems = list(version_problems(has_float32_head=True))
    assert len(problems) == (words is not None) and all(words in problem for problem in problems)
    if version == "0.5.17":
        assert not list(version_problems(has_float32_head=False))


def test_the_folder_of_the_cuda_runtime_is_that_of_torch(tmp_path, monkeypatch):
    """In a process of its own, where a library of that name is loaded, as torch loads libcudart."""
    assert cudart_folder() is None or torch.version.cuda, "a torch for CPUs has none"
    monkeypatch.setattr(torch.version, "cuda", "913.0")
    assert cudart_folder() is None
    packaged = tmp_path / "packages/nvidia/cu913/lib/libcudart.so.913"
    packaged.parent.mkdir(parents=True)
    packaged.touch()
    monkeypatch.syspath_prepend(tmp_path / "packages")
    assert cudart_folder() == str(packaged.parent)
    library = next(
        line.split()[-1]
        for line in open("/proc/self/maps")
        if "/libm.so" in line or "/libm-" in line
    )
    loaded = tmp_path / "loaded/libcudart.so.913"
    loaded.parent.mkdir()
    shutil.copy(library, loaded)
    code = (
        "import ctypes, sys, torch; ctypes.CDLL(sys.argv[1]); torch.version.cuda = '913.0'\n"
        "from rl2.config.toolkit import cudart_folder; print(cudart_folder())"
    )
    assert run("-c", code, loaded).stdout.strip() == str(loaded.parent)
