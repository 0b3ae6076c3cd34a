"""Runs that meet signals, hangs, lost ranks and full disks. The scenarios are in faults.py."""

import json
import signal
import textwrap

import pytest
from common import make_model, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model and rows for SFT."""
    folder = tmp_path_factory.mktemp("faults")
    make_model(folder / "tiny")
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]}
    (folder / "rows.jsonl").write_text(4 * (json.dumps(row) + "\n"))
    return folder


def test_signals_full_disks_and_a_port_in_use(folder):
    run("tests/faults.py", folder, "signals", "disks", timeout=300)


def test_a_crash_in_native_code_prints_where_it_was(tmp_path):
    script = """
        import ctypes, resource
        from rl2.run.signals import guard

        def crash():
            ctypes.string_at(0)

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with guard(0):
            crash()
    """
    (tmp_path / "crash.py").write_text(textwrap.dedent(script))
    done = run(tmp_path / "crash.py", check=False)
    assert done.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in done.stderr
    assert 'crash.py", line 6 in crash' in done.stderr


def test_the_watchdog_and_a_lost_rank(folder):
    run("tests/faults.py", folder, "watchdog", timeout=300)


def test_killed_runs_resume_to_equal_bits(tmp_path):
    """A slice of the hundred kills: of a run with a critic on two ranks, and of a reward model."""
    arguments = ["--kills", "3", "--seed", "3", "--case", "ppo_critic", "rm"]
    done = run("tests/kills.py", tmp_path, *arguments, timeout=200)
    assert "3 kills" in done.stdout and "; 0 runs failed" in done.stdout, done.stdout
