"""Tests of the lock of a run folder: one run at a time has it, and a run that is gone loses it."""

import json
import signal
import subprocess
import sys

import pytest

from rl2.run.lock import RunLock, look_at_lock

HOLD_LOCK = """
import sys, time
from pathlib import Path
from rl2.run.lock import RunLock

RunLock(Path(sys.argv[1])).acquire()
print("locked", flush=True)
if sys.argv[2] == "fail":
    raise OSError("some error")
time.sleep(60)
"""


def start_holder(folder, ending="sleep"):
    """A process that has taken the lock of the folder."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK, str(folder), ending],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout.readline() == "locked\n"
    return holder


def test_a_live_run_keeps_its_folder_and_a_dead_one_does_not(tmp_path):
    assert look_at_lock(tmp_path) == "never"
    (tmp_path / "config.yaml").touch()  # a folder without files of the run goes with its lock
    holder = start_holder(tmp_path)
    for sent in (None, signal.SIGSTOP):
        if sent:
            holder.send_signal(sent)
        with pytest.raises(ValueError, match=f"in use by another run .process {holder.pid}") as got:
            RunLock(tmp_path).acquire()
        message = str(got.value)
        assert ", since 20" in message
        assert "trainer.experiment_name=NAME" in message and str(tmp_path) in message
        assert look_at_lock(tmp_path) == "held"
    holder.kill()
    holder.communicate()
    assert look_at_lock(tmp_path) == "abandoned"
    lock = RunLock(tmp_path)
    lock.acquire()
    lock.release()
    assert look_at_lock(tmp_path) == "released"
    failed = start_holder(tmp_path, "fail")
    assert "some error" in failed.communicate()[1]
    assert look_at_lock(tmp_path) == "released", "an error does not release the lock"


def test_a_lock_that_another_machine_has_left_is_taken_and_its_owner_named(tmp_path, capsys):
    """A file system may not show the locks of other machines."""
    lock = RunLock(tmp_path)
    lock.path.parent.mkdir()
    owner = {"pid": 4711, "host": "node7", "since": "2026-01-01 00:00:00"}
    lock.path.write_text(json.dumps(owner))
    lock.acquire()
    assert json.loads(lock.path.read_text())["pid"] != 4711
    assert "process 4711 on node7" in capsys.readouterr().out
    lock.release()
