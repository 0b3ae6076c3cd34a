"""Tests of rl2/run/signals.py: which errors are one message, and which keep their traceback."""

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
import torch

from rl2.algorithms.find import find_policy_loss
from rl2.algorithms.losses import masked
from rl2.run.signals import user_errors
from rl2.run.watchdog import Sign, Watchdog


def fail_in_an_operator():
    """The last frame of Python is rl2's, but torch raised."""
    masked(torch.ones(2), torch.ones(3))


def fail_in_a_builtin():
    find_policy_loss(None)  # None has no rpartition


def fail_in_own_code():
    raise ValueError("not of rl2")


@pytest.mark.parametrize("fail", [fail_in_an_operator, fail_in_a_builtin, fail_in_own_code])
def test_an_error_that_rl2_does_not_raise_keeps_its_traceback(fail, tmp_path, monkeypatch, capsys):
    """And torchrun's report names the error and its place."""
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    with pytest.raises((AttributeError, RuntimeError, ValueError)) as raised, user_errors():
        fail()
    assert capsys.readouterr().err == ""
    message = json.loads(file.read_text())["message"]["message"]
    assert str(raised.value) in message and ".py, line " in message


def test_an_error_that_rl2_raises_is_one_message(capsys):
    with pytest.raises(SystemExit), user_errors():
        find_policy_loss("nope")
    error = capsys.readouterr().err
    assert error.startswith("error: actor.loss=nope: choose ppo") and error.count("\n") == 1


def test_a_missing_file_is_one_message_with_its_place(tmp_path, capsys):
    with pytest.raises(SystemExit), user_errors():
        open(tmp_path / "missing.json")
    error = capsys.readouterr().err
    assert "missing.json" in error and f"({__file__}, line " in error and error.count("\n") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is of Linux")
def test_a_rank_in_c_code_ends_with_its_launcher():
    rank = (
        "import os, re; from rl2.run.signals import end_with_launcher; end_with_launcher();"
        "print(os.getpid(), flush=True); re.match(r'(a+)+$', 'a' * 40 + 'b')"
    )
    launcher = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])",
        ],
        env={**os.environ, "TORCHELASTIC_RUN_ID": "test"},
        stdout=subprocess.PIPE,
        text=True,
    )
    process_id = int(launcher.stdout.readline())
    launcher.kill()
    launcher.wait()
    try:  # the pipe ends when the last process that has it has ended
        assert select.select([launcher.stdout], [], [], 2)[0]
    finally:
        with suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGKILL)
        launcher.stdout.close()


class Store(dict):
    """Signs of ranks by number. Those of living ranks grow while `lost_ranks` waits."""

    def __init__(self, slow_ranks=()):
        for rank in range(3):
            self[str(rank)] = Sign(1, "", f"(pid {rank})", 0.0)
        self.slow_ranks = slow_ranks  # which sign at every third look only
        self.num_looks = 0

    def clone(self):
        return self

    def check(self, keys):
        return keys[0] in self

    def multi_get(self, keys):
        return [json.dumps(vars(self[key])) for key in keys]

    def wait(self, seconds):
        self.num_looks += 1
        for rank in (0, 1):
            self[str(rank)].number += rank not in self.slow_ranks or self.num_looks % 3 == 0


@pytest.mark.parametrize("slow_ranks, num_looks", [((), 1), ((1,), 3), ((0,), 3)])
def test_the_rank_that_alone_is_silent_is_named_at_once(monkeypatch, slow_ranks, num_looks):
    monkeypatch.setenv("WORLD_SIZE", "3")
    watchdog = Watchdog(60)
    store = watchdog.store = Store(slow_ranks)
    monkeypatch.setattr("time.sleep", store.wait)
    assert watchdog.lost_ranks() == ["rank 2 (pid 2)"]
    assert store.num_looks == num_looks
