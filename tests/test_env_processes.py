"""rollout.env_isolation=process: functions of an env file run in processes that can be killed."""

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from common import ROOT
from env_helpers import MESSAGES, call, call_together, failure, load_text, wait_until

from rl2.env.contract import EnvError


@pytest.fixture
def load(tmp_path):
    """Makes an env whose functions run in processes, and ends them after the test."""
    envs = []

    def load(text, timeout=20.0, concurrency=1):
        options = {"concurrency": concurrency, "isolation": "process"}
        envs.append(load_text(tmp_path, text, timeout, **options))
        return envs[-1]

    yield load
    for env in envs:
        if env._pool._loop.thread.is_alive():
            env.close()


def is_alive(process_id):
    try:
        return psutil.Process(int(process_id)).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def held():
    """The children, threads and open descriptors of this process."""
    descriptors = set()
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one of iterdir
            descriptors.add((path.name, os.readlink(path)))
    return set(psutil.Process().children()), set(threading.enumerate()), descriptors


def test_a_process_imports_the_env_file_and_nothing_of_the_trainer(load):
    env = load(
        """
        import os, sys
        def interact(messages, level):
            return [{"role": "tool", "content": f"{level} {messages[-1]['content']}"}]
        def reward_fn(messages, answer, **columns):
            loaded = {"torch", "transformers", "asyncio", "rl2.progress"} & set(sys.modules)
            descriptors = set(os.listdir("/proc/self/fd")) - {"0", "1", "2"}
            return {
                "answer": answer,
                "loaded": len(loaded),
                "descriptors": len(descriptors) - 1,  # listdir has one too
                "process": os.getpid(),
                "input": len(sys.stdin.read()),
            }
        """
    )
    parts = call(env, answer=0.1, level=2)
    assert parts.pop("process") not in (os.getpid(), 0)
    assert parts == {"answer": 0.1, "loaded": 0, "descriptors": 1, "input": 0}
    turn = asyncio.run(env.answer(MESSAGES, {"level": 3}))
    assert turn.messages == [{"role": "tool", "content": "3 2"}]


STATEFUL = """
    import os, signal, time
    counts = {}
    def reward_fn(messages, name, state, fault=""):
        if fault == "hang":
            time.sleep(60)
        if fault == "exit":
            os._exit(3)
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02)
        counts[name] = counts.get(name, 0) + 1
        return {"count": counts[name], "process": os.getpid()}
"""


def test_a_trajectory_stays_on_its_process_and_trajectories_are_spread(load):
    env = load(STATEFUL, concurrency=3)
    first = [call(env, i, name=i) for i in range(6)]
    assert {len({parts["process"] for parts in some}) for some in (first[:3], first[3:])} == {3}
    again = call_together(env, [(i, {"name": i}) for i in reversed(range(6))])
    assert again == [{**parts, "count": 2} for parts in reversed(first)]
    for i in range(6):
        asyncio.run(env.end(i))


@pytest.mark.parametrize(
    "fault, reason",
    [
        ("hang", "reward_fn did not return within rollout.env_timeout=1 s"),
        ("exit", "reward_fn ended its process: exit status 3"),
        ("kill", r"reward_fn ended its process: signal 9 \(Killed\)"),
    ],
)
def test_a_process_that_ends_costs_the_trajectories_with_state_there(load, fault, reason):
    """The others go on in the process that takes its place."""
    env = load(STATEFUL, timeout=1.0)
    old = call(env, "early", name="early")["process"]
    calls = [("fault", {"name": "", "fault": fault}), ("late", {"name": "late"})]
    failed, late, early = call_together(env, [*calls, ("early", {"name": "early"})])
    with pytest.raises(EnvError, match=reason):
        raise failed
    assert late["count"] == 1 and late["process"] != old and not is_alive(old)
    assert "the state of its earlier calls is lost" in str(early)
    assert "is lost" in str(failure(env, "early", name="early"))  # until it ends
    asyncio.run(env.end("early"))
    assert call(env, "early", name="early") == {**late, "count": 1}


def test_a_process_that_ends_between_two_calls_is_replaced(load):
    env = load(STATEFUL)
    old = call(env, "early", name="early")["process"]
    os.kill(int(old), signal.SIGKILL)
    wait_until(lambda: not is_alive(int(old)))
    reason = str(failure(env, "early", name="early"))
    assert "is lost" in reason or "ended its process: signal 9" in reason
    assert call(env, "late", name="late")["count"] == 1


def test_what_the_env_prints_reaches_the_console_also_before_a_kill(load, capfd, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    env = load(
        """
        import os, sys, time
        def reward_fn(messages, fault):
            print("printed", fault)
            print("warned", fault, file=sys.stderr)
            if fault == "flood":
                print("flood" * 10**6)
            if fault == "hang":
                time.sleep(60)
            return 1
        """,
        timeout=5,
    )
    assert call(env, fault="flood") == {"reward": 1.0}
    env._pool.timeout = 0.1
    assert "did not return" in str(failure(env, fault="hang"))
    output, errors = capfd.readouterr()
    assert output.count("flood") == 10**6 + 1 and "printed hang\n" in output
    assert "warned flood\n" in errors and "warned hang\n" in errors


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_calls_that_hang_leave_no_thread_process_or_descriptor_behind(load, monkeypatch):
    """In C code that keeps Python's lock, with a process of their own that ignores signals.

    RL2_HANGS=1000 makes it a longer test.
    """
    count = int(os.environ.get("RL2_HANGS", "12"))
    gc.collect()  # what earlier tests left unreferenced may close at any moment
    before = held()
    env = load(
        """
        import re, subprocess, sys
        def reward_fn(messages, hang):
            if hang:
                ignore = "import signal, time; signal.signal(15, 1); time.sleep(60)"
                subprocess.Popen([sys.executable, "-S", "-c", ignore])
                re.match("(a+)+$", "a" * 50 + "b")
            return 1
        """,
        timeout=0.3,
        concurrency=4,
    )
    groups = set()
    popen = subprocess.Popen

    def start(*arguments, **options):
        process = popen(*arguments, **options)
        groups.add(process.pid)
        return process

    monkeypatch.setattr(subprocess, "Popen", start)
    calls = [(i, {"hang": True}) for i in range(count)]
    results = call_together(env, [*calls, (None, {"hang": False})])
    assert all("did not return" in str(error) for error in results[:-1])
    assert results[-1] == {"reward": 1.0}
    new = [now - then for now, then in zip(held(), before, strict=True)]
    assert len(new[0]) <= 4
    assert len(new[1]) == 1
    assert len(new[2]) <= 7
    assert len(groups) >= count
    env.close()
    assert [now - then for now, then in zip(held(), before, strict=True)] == [set(), set(), set()]
    assert not [pid for pid in psutil.pids() if group_of(pid) in groups and is_alive(pid)]


def group_of(process_id):
    try:
        return os.getpgid(process_id)
    except ProcessLookupError:
        return 0


ENDLESS = """
import os, re, time
def reward_fn(messages, kind):
    print(kind, os.getpid(), flush=True)
    if kind == "sleep":
        time.sleep(600)
    if kind == "C":
        re.match("(a+)+$", "a" * 50 + "b")
    return 1
"""
ORPHANS = """
import asyncio, sys
from rl2.env.load import load_env
async def main():
    env = load_env(sys.argv[1], 60, 4, "process")
    rows = [{"kind": kind} for kind in ("sleep", "C", "idle")]
    calls = [asyncio.ensure_future(env.score([], row)) for row in rows]
    await calls[-1]
    await asyncio.gather(*calls)
asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_process_outlives_a_trainer_that_is_killed(tmp_path):
    """A process that sleeps, one in C code, and an idle one."""
    (tmp_path / "env.py").write_text(ENDLESS)
    command = [sys.executable, "-c", ORPHANS, tmp_path / "env.py"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    trainer = subprocess.Popen(command, cwd=ROOT, **pipes)
    lines = [trainer.stdout.readline().split() for _ in range(3)]
    processes = [int(number) for _, number in lines]
    assert all(map(is_alive, processes))
    trainer.kill()
    trainer.wait()
    wait_until(lambda: not any(map(is_alive, processes)))
    assert b"Traceback" not in trainer.stderr.read()


def test_a_process_that_cannot_start_costs_its_call(load, monkeypatch):
    env = load("def reward_fn(messages): return 1")

    def fail(*_, **__):
        raise BlockingIOError("Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", fail)
        assert "cannot start: Resource temporarily" in str(failure(env))
    assert call(env) == {"reward": 1.0}


def test_a_call_that_is_cancelled_frees_its_process(load):
    env = load(
        """
        import time
        def reward_fn(messages, state, seconds):
            time.sleep(seconds)
            state["count"] = state.get("count", 0) + 1
            return state["count"]
        """
    )

    async def cancel():
        calls = [env.score(MESSAGES, {"seconds": 60}, key) for key in ("own", "waiting")]
        tasks = list(map(asyncio.create_task, calls))
        await asyncio.sleep(0.1)
        tasks[1].cancel()  # has not begun
        tasks[0].cancel()

    asyncio.run(cancel())
    asyncio.run(env.end("own"))
    assert call(env, "new", seconds=0) == {"reward": 1.0}


def test_arguments_that_no_process_can_get_cost_their_call(load):
    env = load("def reward_fn(messages, value): return value")
    assert "a process cannot get its arguments" in str(failure(env, value=(i for i in range(3))))
    assert call(env, value=2) == {"reward": 2.0}


def test_a_hanging_process_does_not_delay_those_that_are_free(load):
    """Calls of a new trajectory go to any process that is free."""
    env = load(STATEFUL, timeout=1, concurrency=2)
    call_together(env, [(i, {"name": i}) for i in range(2)])
    calls = [(0, {"name": 0, "fault": "hang"}), *((i, {"name": i}) for i in range(2, 12))]
    hung, *others = call_together(env, calls)
    assert "did not return" in str(hung)
    assert all(parts["count"] == 1 for parts in others)
    assert len({parts["process"] for parts in others}) == 1
