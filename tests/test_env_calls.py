"""What a call of the environment may do: raise, hang, block, return anything. See faulty_env.py."""

import asyncio
import json
import sys
import threading
import time

import numpy
import pytest
import torch
from env_helpers import MESSAGES, call, call_together, env_of, wait_until
from env_helpers import load_text as load
from faulty_env import nest

from rl2.env.contract import EnvError

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


@pytest.mark.parametrize("prefix", ["", "async "])
def test_a_thread_that_does_not_start_costs_a_trajectory(tmp_path, monkeypatch, prefix):
    env = load(tmp_path, f"{prefix}def reward_fn(messages): return 1")

    def fail(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        with pytest.raises(
            EnvError, match="can't start new thread .*lower rollout.env_concurrency"
        ):
            call(env)
    assert call(env) == {"reward": 1.0}
    env.close()


@pytest.mark.parametrize("value", [numpy.float16(0.5), torch.tensor(0.5, requires_grad=True)])
def test_messages_with_scalars_of_numpy_and_pytorch_are_json(value):
    answer = [{"role": "tool", "content": "x", "value": value}]
    env = env_of(lambda messages: 0, lambda messages: answer)
    [message] = asyncio.run(env.answer(MESSAGES, {})).messages
    assert json.loads(json.dumps(message))["value"] == 0.5


@pytest.mark.parametrize("depth, is_accepted", [(45, True), (60, False)])
def test_deep_nesting_is_refused_before_it_overflows_the_stack(depth, is_accepted):
    answer = [{"role": "tool", "content": "x", "value": nest(depth)}]
    env = env_of(lambda messages: 0, lambda messages: answer)
    if is_accepted:
        assert asyncio.run(env.answer(MESSAGES, {})).messages == answer
    else:
        with pytest.raises(EnvError, match="interact: lists and objects are nested"):
            asyncio.run(env.answer(MESSAGES, {}))


def test_a_flood_of_text_is_refused():
    env = env_of(lambda messages: 0, lambda messages: [{"role": "tool", "content": "x" * 2**21}])
    with pytest.raises(EnvError, match="interact: 20971.. characters, a turn may have 1048576, in"):
        asyncio.run(env.answer(MESSAGES, {}))


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
