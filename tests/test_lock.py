"""Tests of the lock of a run folder: one run at a time has it, and a run that is gone loses it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from common import run

from rl2.run import lock as run_lock
from rl2.run.lock import RunLock

HOLD_LOCK = """
import sys, time
from pathlib import Path
from rl2.run import lock as run_lock

run_lock.BEAT_SECONDS = 0.05
run_lock.RunLock(Path(sys.argv[1])).acquire()
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


def write_lock(folder, number, **changes):
    process = {**vars(run_lock.this_process()), **changes}
    (folder / "lock").mkdir(exist_ok=True)
    (folder / f"lock/{number}.json").write_text(json.dumps(process))


def test_a_live_run_keeps_its_folder_and_a_dead_one_does_not(tmp_path):
    holder = start_holder(tmp_path)
    for sent in (None, signal.SIGSTOP):
        if sent:
            holder.send_signal(sent)
        with pytest.raises(ValueError, match=f"in use by another run .process {holder.pid}") as got:
            RunLock(tmp_path).acquire()
        message = str(got.value)
        host = run_lock.this_process().host
        assert f"on {host}, since 20" in message and f"kill {holder.pid}" in message
        assert "trainer.experiment_name=NAME" in message and str(tmp_path) in message
    holder.kill()
    deadline = time.monotonic() + 10
    while run_lock.process_start(holder.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    lock = RunLock(tmp_path)
    lock.acquire()  # at once, although nobody has waited for the killed process yet
    holder.communicate()
    lock.release()
    failed = start_holder(tmp_path, "fail")
    assert "some error" in failed.communicate()[1]
    assert (tmp_path / "lock/3.json").read_text() == "{}", "an error does not release the lock"
    write_lock(tmp_path, 4, pid=os.getppid(), start="1")  # its pid belongs to another process now
    lock = RunLock(tmp_path)
    lock.acquire()
    assert [path.name for path in (tmp_path / "lock").iterdir()] == ["5.json"]
    lock.release()


def test_a_lock_of_another_machine_is_watched(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_lock, "WATCH_SECONDS", 1.0)
    write_lock(tmp_path, 1, machine="another", host="node7", pid=4711)
    is_over = threading.Event()

    def touch():
        while not is_over.wait(0.05):
            os.utime(tmp_path / "lock/1.json")

    thread = threading.Thread(target=touch)
    thread.start()
    with pytest.raises(ValueError, match="process 4711 on node7"):
        RunLock(tmp_path).acquire()
    is_over.set()
    thread.join()
    assert "waiting 1 s for a sign of life" in capsys.readouterr().out
    lock = RunLock(tmp_path)
    lock.acquire()
    lock.release()

    # A run that was only silent must not continue beside the one that took its folder.
    silent = start_holder(tmp_path)
    write_lock(tmp_path, 4, machine="another", host="node8", pid=4712)
    assert "process 4712 on node8 took" in silent.communicate(timeout=10)[1]
    assert silent.returncode == 1


RACE = """
import json, multiprocessing, sys
from pathlib import Path
from rl2.run import lock as run_lock

def compete(folder, start, end, winners):
    start.wait()
    try:
        run_lock.RunLock(Path(folder)).acquire()
        winners.put(1)
    except ValueError:
        pass
    end.wait()  # the winner lives until all have tried

context = multiprocessing.get_context("fork")
for _ in range(12):
    start, end, winners = context.Barrier(4), context.Barrier(5), context.Queue()
    arguments = (sys.argv[1], start, end, winners)
    racers = [context.Process(target=compete, args=arguments) for _ in range(4)]
    for racer in racers:
        racer.start()
    end.wait()
    for racer in racers:
        racer.join()
    print(winners.qsize())
"""


def test_of_several_newcomers_one_takes_a_stale_lock(tmp_path):
    done = run("-c", RACE, tmp_path)
    assert done.stdout.split() == ["1"] * 12
