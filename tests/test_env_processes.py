"""rollout.env_isolation=process: the functions of an env file run in processes that can be killed."""

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from common import ROOT

from rl2.env import processes
from rl2.env.contract import EnvError
from rl2.env.load import load_env, preflight

MESSAGES = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]


@pytest.fixture
def load(tmp_path):
    """Makes an env whose functions run in processes, and ends them after the test."""
    envs = []

    def load(text, timeout=20.0, concurrency=1, name="env.py"):
        (tmp_path / name).write_text(textwrap.dedent(text))
        envs.append(load_env(str(tmp_path / name), timeout, concurrency, "process"))
        return envs[-1]

    yield load
    for env in envs:
        env.close()


def call(env, key=None, **row):
    return asyncio.run(env.score(MESSAGES, row, key))


def call_together(env, calls):
    """The results of calls (key, row) side by side: {"reward": ...} or EnvError."""

    async def main():
        tasks = [env.score(MESSAGES, row, key) for key, row in calls]
        return await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run(main())


def failure(env, key=None, **row):
    with pytest.raises(EnvError) as error:
        call(env, key, **row)
    return str(error.value)


def is_alive(process_id):
    """Whether the process runs. One that has ended may still be listed as a zombie."""
    try:
        status = Path(f"/proc/{int(process_id)}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def children():
    """The children of this process, zombies among them."""
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


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
    turn = asyncio.run(env.interact(MESSAGES, {"level": 3}))
    assert turn == [{"role": "tool", "content": "3 2"}]


STATEFUL = """
    import os, signal, time
    counts = {}
    def reward_fn(messages, name, fault=""):
        if fault == "hang":
            time.sleep(60)
        if fault == "exit":
            os._exit(3)
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "close":
            os.closerange(3, 99)
        time.sleep(0.02)
        counts[name] = counts.get(name, 0) + 1
        return {"count": counts[name], "process": os.getpid()}
"""


def test_a_trajectory_stays_on_its_process_and_calls_run_side_by_side(load):
    env = load(STATEFUL, concurrency=3)
    first = call_together(env, [(i, {"name": i}) for i in range(9)])
    assert len({parts["process"] for parts in first}) == 3
    for i in reversed(range(9)):
        assert call(env, i, name=i) == {**first[i], "count": 2}
        env.end(i)


@pytest.mark.parametrize(
    "fault, reason",
    [
        ("hang", "reward_fn did not return within rollout.env_timeout=0.3 s"),
        ("stop", "reward_fn did not return within rollout.env_timeout=0.3 s"),
        ("exit", "reward_fn ended its process: exit status 3"),
        ("kill", r"reward_fn ended its process: signal 9 \(Killed, perhaps for its memory\)"),
        ("close", "reward_fn ended its process: "),
    ],
)
def test_a_process_that_ends_costs_the_trajectories_with_state_there(load, fault, reason):
    """The others go on in the process that takes its place."""
    env = load(STATEFUL, timeout=0.3)
    old = call(env, "early", name="early")["process"]
    calls = [("fault", {"name": "", "fault": fault}), ("late", {"name": "late"})]
    failed, late, early = call_together(env, [*calls, ("early", {"name": "early"})])
    with pytest.raises(EnvError, match=reason):
        raise failed
    assert late["count"] == 1 and late["process"] != old and not is_alive(old)
    assert "the state of its earlier calls is lost" in str(early)
    assert "is lost" in failure(env, "early", name="early")  # until it ends
    env.end("early")
    assert call(env, "early", name="early") == {**late, "count": 1}


def test_a_process_that_ends_between_two_calls_is_replaced(load):
    env = load(STATEFUL)
    old = call(env, "early", name="early")["process"]
    os.kill(int(old), signal.SIGKILL)
    wait_until(lambda: not is_alive(int(old)))
    assert "is lost" in failure(env, "early", name="early")
    assert call(env, "late", name="late")["count"] == 1
