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
from rl2.run.signals import StopSignal, user_errors


def fail_in_an_operator():
    """The last frame of Python is rl2's, but torch raised."""
    masked(torch.ones(2), torch.ones(3))


def fail_in_own_code():
    raise ValueError("not of rl2")


@pytest.mark.parametrize("fail", [fail_in_an_operator, fail_in_own_code])
def test_an_error_that_rl2_does_not_raise_keeps_its_traceback(fail, tmp_path, monkeypatch, capsys):
    """And torchrun's report names the error and its place."""
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    with pytest.raises((RuntimeError, ValueError)) as raised, user_errors():
        fail()
    assert capsys.readouterr().err == ""
    message = json.loads(file.read_text())["message"]["message"]
    assert str(raised.value) in message and ".py, line " in message


def test_ctrl_c_while_a_trainer_is_imported_ends_it_without_a_traceback():
    code = (
        "import time; from rl2.config.help import answer_trainer; answer_trainer('ppo');"
        "print('ready', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == -signal.SIGINT and process.stderr.read() == b""


@pytest.mark.parametrize(
    ("fail", "words"),
    [
        (lambda: find_policy_loss("nope"), "error: actor.loss=nope: choose ppo"),
        (lambda: open("missing.json"), f"missing.json' ({__file__}, line "),
    ],
)
def test_what_a_user_can_fix_is_one_message_with_its_place(fail, words, capsys):
    with pytest.raises(SystemExit), user_errors():
        fail()
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_a_stop_is_asked_for_although_nobody_reads_stderr():
    """Ctrl-C ends `tee` too, and an error in the handler would be one of the step."""
    reader, writer = os.pipe()
    os.close(reader)
    stderr = os.dup(2)
    os.dup2(writer, 2)
    stop_signal = StopSignal()
    try:
        stop_signal.handle(signal.SIGINT, None)
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(writer)
    assert stop_signal.requested_at is not None


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is of Linux")
def test_a_rank_in_c_code_ends_with_its_launcher():
    rank = (
        "import os, re; from rl2.run.signals import end_with_launcher; end_with_launcher();"
        "print(os.getpid(), flush=True); re.match(r'(a+)+$', 'a' * 40 + 'b')"
    )
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])"
    launcher = subprocess.Popen(
        [sys.executable, "-c", code],
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
