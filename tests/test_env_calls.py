"""What a call of the environment may do to the others: hang, block, wait. See faulty_env.py."""

import asyncio
import sys
import threading
import time

import pytest
from env_helpers import MESSAGES, call, call_together, env_of, failure, wait_until
from env_helpers import load_text as load

BLOCKING_ENV = """
    import asyncio, threading, time
    release = threading.Event()
    async def blocks(messages):
        while True:
            pass
    async def reward_fn(messages, kind):
        if kind == "python":
            await blocks(messages)
        if kind == "C":
            release.wait()
        if kind == "waits":
            await asyncio.sleep(0.05)
        return 1
"""


def call_kinds(env, *kinds):
    """Calls whose limit of 0.6 s ends at the same moment for all: while the caller sleeps."""

    async def main():
        asyncio.get_running_loop().call_later(0.3, time.sleep, 0.6)
        tasks = [env.score(MESSAGES, {"kind": kind}) for kind in kinds]
        return await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run(main())


@pytest.mark.parametrize("kind", ["python", "C"])
def test_a_call_that_blocks_the_loop_costs_those_that_wait_for_it(tmp_path, monkeypatch, kind):
    """Endless Python code is ended with its call. C code blocks all calls until it returns.

    All are told which call it was, however soon that is ended.
    """
    env = load(tmp_path, BLOCKING_ENV, timeout=0.6)
    before = set(threading.enumerate())
    assert call(env, kind="") == {"reward": 1.0}
    loop = env._threads._loop
    end = loop.thread.end

    def end_and_wait():
        end()
        wait_until(lambda: "in blocks" not in loop.describe_work())

    monkeypatch.setattr(loop.thread, "end", end_and_wait)
    release = sys.modules[env.spec.reward_fn.__module__].release
    results = call_kinds(env, "waits", kind, "")
    assert call_kinds(env, kind) != [{"reward": 1.0}]
    for text in map(str, results):
        assert "blocked by reward_fn" in text and env.path in text, text
        assert ("while True:" if kind == "python" else "release.wait()") in text, text
    if kind == "C":
        env.close()  # does not wait
        release.set()
    else:
        assert call(env, kind="waits") == {"reward": 1.0}
        env.close()
    wait_until(lambda: set(threading.enumerate()) <= before)


@pytest.mark.parametrize("prefix", ["", "async "])
def test_hanging_calls_leave_no_threads_behind(tmp_path, prefix):
    body = "await asyncio.Event().wait()" if prefix else "time.sleep(0.001)"
    text = f"import asyncio, time\n{prefix}def reward_fn(messages):\n    while True: {body}"
    env = load(tmp_path, text, timeout=0.02)
    before = set(threading.enumerate())
    assert all("did not return" in str(error) for error in call_together(env, [(None, {})] * 100))
    env.close()
    wait_until(lambda: set(threading.enumerate()) <= before)


def test_calls_follow_each_other_in_a_thread_until_one_is_late(tmp_path):
    text = """
        import contextvars, threading, time
        own = threading.local()
        variable = contextvars.ContextVar("variable", default=0)
        def reward_fn(messages, seconds):
            time.sleep(seconds)
            own.calls = getattr(own, "calls", 0) + 1
            variable.set(variable.get() + 1)
            return own.calls if variable.get() == 1 else -1.0
    """
    env = load(tmp_path, text, timeout=0.3)
    before = set(threading.enumerate())
    assert [call(env, seconds=0)["reward"] for _ in range(3)] == [1, 2, 3]
    assert "did not return" in str(failure(env, seconds=2))
    assert [call(env, seconds=0)["reward"] for _ in range(2)] == [1, 2]
    env.close()
    wait_until(lambda: set(threading.enumerate()) <= before)


@pytest.mark.parametrize("prefix", ["", "async "])
def test_a_thread_that_does_not_start_costs_a_trajectory(tmp_path, monkeypatch, prefix):
    env = load(tmp_path, f"{prefix}def reward_fn(messages): return 1")

    def fail(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        reason = str(failure(env))
    assert "can't start new thread" in reason and "lower rollout.env_concurrency" in reason
    assert call(env) == {"reward": 1.0}
    env.close()


def test_concurrency_limits_calls_and_the_queue_is_not_counted():
    num_running, most = 0, 0

    def slow(messages):
        nonlocal num_running, most
        num_running += 1
        most = max(most, num_running)
        time.sleep(0.4)
        num_running -= 1
        return 1

    env = env_of(slow, timeout=1.5, concurrency=3)
    assert call_together(env, [(None, {})] * 12) == [{"reward": 1.0}] * 12  # 4 rounds: 1.6 s
    assert most == 3
    env.close()
