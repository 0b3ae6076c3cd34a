"""Runs that meet signals, hangs, lost ranks and full disks. The scenarios are in faults.py."""

import signal
import textwrap

from common import make_model, run, write_jsonl


def test_signals_full_disks_hangs_and_a_lost_rank(tmp_path):
    make_model(tmp_path / "tiny")
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]}
    write_jsonl(tmp_path / "rows.jsonl", 4 * [row])
    run("tests/faults.py", tmp_path, timeout=600)


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


def test_killed_runs_resume_to_equal_bits(tmp_path):
    """A slice of the hundred kills: of a run with a critic on two ranks, and of a reward model."""
    arguments = ["--kills", "3", "--seed", "3", "--case", "ppo_critic", "rm"]
    run("tests/kills.py", tmp_path / "runs", *arguments, timeout=200)
