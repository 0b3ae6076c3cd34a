"""Agents from outside: `run` of an env file, and the OpenAI-compatible address that it gets."""

import asyncio
import os
import textwrap
import threading
import warnings
from dataclasses import replace
from unittest import mock
from urllib.parse import urlsplit

import pytest
from common import pack_rows
from env_helpers import describe, load_text, make_agent, play, trained_text
from scripted import PARAMS, ScriptedEngine, make_row, process_group  # noqa: F401

from rl2.agents.endpoint import LOCAL_HOST, MAX_BODY_BYTES, Endpoint
from rl2.config.schema import RolloutConfig
from rl2.ppo_inputs import read_envs
from rl2.rollout.trajectory import begin_group

TWO_TURNS = """
    def run(row, base_url, model, api_key):
        messages = list(row["messages"])
        first = ask(base_url, api_key, messages)
        assert first["finish_reason"] == "stop", first
        messages += [first["message"], user("sure?")]
        second = ask(base_url, api_key, messages)
        return {"answers": float(first["message"]["content"] + second["message"]["content"])}
"""
TWO_TURNS_OF_A_LOOP = """
    async def play(row, generate):
        messages = list(row["messages"])
        first = await generate(messages)
        assert first.finish_reason == "stop"
        messages += [first.message, user("sure?")]
        second = await generate(messages)
        return {"answers": float(first.text + second.text)}
"""


@pytest.mark.parametrize(
    "env, isolation",
    [(TWO_TURNS, "thread"), (TWO_TURNS, "process"), (TWO_TURNS_OF_A_LOOP, "thread")],
    ids=["agent", "agent in a process", "loop"],
)
def test_an_agent_gives_the_tokens_of_interact(tmp_path, env, isolation):
    (agent,), player = play(tmp_path, ["4", "5"], env, isolation=isolation)
    assert agent.rewards == {"answers": 45.0} and agent.finish_reason == "stop"
    (sample,) = agent.samples
    assert trained_text(player, sample) == "4<|im_end|>5<|im_end|>"
    interact = """
        def interact(messages):
            return [user("sure?")] if len(messages) == 2 else []
        def reward_fn(messages): return 45.0
    """
    (other,), _ = play(tmp_path, ["4", "5"], interact)
    assert describe(agent) == describe(other)
    assert agent.messages == other.messages and agent.versions == other.versions
    assert (agent.num_turns, agent.longest_turn) == (other.num_turns, other.longest_turn) == (2, 2)
    assert [seed for seed, _ in player.engine.requests] == [(0, 0, 1, 0, 0, n) for n in (0, 1)]


def test_other_messages_begin_a_new_sequence(tmp_path):
    env = """
        def run(row, base_url, model, api_key):
            a = ask(base_url, api_key, [user("a")])["message"]
            ask(base_url, api_key, [user("b")])
            ask(base_url, api_key, [user("a"), {**a, "content": "other"}, user("c")])
            ask(base_url, api_key, [user("a"), a, user("d")], tools=[{"function": {"name": "f"}}])
            ask(base_url, api_key, [user("a"), a, user("e")])
            ask(base_url, api_key, [user("a"), a, user("f")])  # "a" has been continued
            return 1.0
        def reward_fn(messages): return {"last": float(messages[-1]["content"])}
    """
    (trajectory,), player = play(tmp_path, list("123456"), env, max_turns=6)
    texts = [trained_text(player, sample) for sample in trajectory.samples]
    assert texts == [f"{n}<|im_end|>" for n in "234"] + ["1<|im_end|>5<|im_end|>", "6<|im_end|>"]
    assert trajectory.rewards == {"run": 1.0, "last": 6.0}
    # The reward lies on the last token of the last sequence.
    assert [sum(sample.rewards) for sample in trajectory.samples] == [0, 0, 0, 0, 7.0]
    assert trajectory.samples[-1].rewards[-1] == 7.0
    assert trajectory.num_turns == 6 and trajectory.length == 12


def test_two_requests_at_once(tmp_path):
    """Of two that extend a conversation, one continues its sequence; no turn is trained twice."""
    env = """
        async def play(row, generate):
            first = await generate([user("a")])
            prompts = [[user("a"), first.message, user(text)] for text in "bc"]
            await asyncio.gather(*map(generate, prompts))
            return 1.0
    """
    (trajectory,), player = play(tmp_path, list("123"), env)
    assert trajectory.rewards == {"play": 1.0}, player.failures.last
    texts = sorted(trained_text(player, s).split("<|im_end|>") for s in trajectory.samples)
    assert [len(text) for text in texts] == [3, 2] and texts[0][0] == "1"
    assert {texts[0][1], texts[1][0]} == {"2", "3"}


REFUSED = """
    def run(row, base_url, model, api_key):
        good = {"model": model, "messages": [user("a")]}
        own = {"Authorization": f"Bearer {api_key}"}
        secret = base_url.split("/")[3]
        answers = [
            send(base_url, good),
            send(base_url, good, Authorization="Bearer wrong"),
            send(base_url, good, "/embeddings", **own),
            send(base_url, good, "//v1/chat/completions", **own),
            send(base_url, good, "//wrong/v1/chat/completions", **own),
            send(base_url, b"", "/chat/completions", "GET", **own),
            send(base_url, b"{" + b" " * LARGE, **own),
            send(base_url, b"{'a': 1}", **own),
            send(base_url, b"[1]", **own),
            send(base_url, b"[" * 100_000, **own),
            send(base_url, {**good, "model": "gpt-4"}, **own),
            send(base_url, {**good, "tools": [1]}, **own),
            send(base_url, {**good, "messages": [user("\\udce9")]}, **own),
        ]
        status, models = send(base_url, b"", "/models", "GET", **own)
        assert status == 200 and [m["id"] for m in models["data"]] == [model]
        for status, answer in answers:
            error = answer["error"]
            assert error["type"] == "invalid_request_error" and error["message"]
        ask(base_url, api_key, [user("a")])  # the server goes on
        return {f"{status} {answer['error']['message']}": 1.0 for status, answer in answers}
"""


def test_what_is_refused_has_a_reason_and_stops_nothing(tmp_path):
    env = textwrap.dedent(REFUSED).replace("LARGE", str(MAX_BODY_BYTES))
    (trajectory,), player = play(tmp_path, ["a"], env, max_turns=1)
    assert trajectory.finish_reason == "stop", player.failures.last
    answers = list(trajectory.rewards)
    expected = ["401 wrong API key", "404 /v1/embeddings is not served", "404 /v1/ is not served"]
    expected += ["404 /v1/chat/completions is not served", "413 a request may have 4194304 bytes"]
    expected += ["Expecting property name", "400 the request cannot be answered: maximum recursion"]
    expected += ["404 model='gpt-4': there is 'rl2' only", "cannot be answered: 'int' object"]
    expected += ["surrogates not allowed"]
    for reason in expected:
        assert any(reason in answer for answer in answers), (reason, answers)
    assert len(player.engine.requests) == 1


def test_other_sampling_parameters_are_ignored_with_a_warning(tmp_path):
    env = """
        def run(row, base_url, model, api_key):
            fields = {"temperature": 0.5, "top_p": 1.0, "seed": None, "stop": "x", "n": 1,
                      "service_tier": "auto", "min_p": 0.1, "presence_penalty": 0,
                      "max_tokens": 9, "max_completion_tokens": 5, "tool_choice": "required"}
            choice = ask(base_url, api_key, [user("a")], **fields)
            assert choice["message"]["content"] == "one ", choice
            return 1.0
    """
    params = replace(PARAMS, stop=("x",))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (trajectory,), player = play(tmp_path, ["one x"], env, params=params)
    assert trajectory.rewards == {"run": 1.0}
    assert player.engine.params == [replace(params, max_new_tokens=5)]
    texts = {str(w.message) for w in caught if "of agents is ignored" in str(w.message)}
    assert {text.split()[0] for text in texts} == {"temperature", "min_p", "tool_choice"}
    # The text that stops is hidden from the agent; it was sampled, so it is trained.
    assert trained_text(player, trajectory.samples[0]) == "one x<|im_end|>"


LOOPS = {
    "run": """
        def run(row, base_url, model, api_key):
            messages = list(row["messages"])
            while True:
                messages += [ask(base_url, api_key, messages)["message"], user("more")]
    """,
    "play": """
        async def play(row, generate):
            messages = list(row["messages"])
            while True:
                reply = await generate(messages)
                messages += [reply.message, user("more")]
    """,
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("judge", ["", "def reward_fn(messages, finish_reason): return 1.0"])
@pytest.mark.parametrize(
    "limits, turns", [({"max_turns": 2}, 2), ({"max_length": 73}, 2), ({"max_length": 20}, 0)]
)
def test_limits_end_a_trajectory(tmp_path, loop, judge, limits, turns):
    """The request beyond a limit is refused. reward_fn then judges what there is."""
    env = f"{judge}\n{textwrap.dedent(LOOPS[loop])}"
    (trajectory,), player = play(tmp_path, list("abcdef"), env, **limits)
    assert len(player.engine.requests) == turns
    if judge and turns:
        assert trajectory.finish_reason == "length" and trajectory.rewards == {"reward": 1.0}
        assert trained_text(player, trajectory.samples[0]) == "a<|im_end|>b<|im_end|>"
    else:
        assert trajectory.finish_reason == "failed"
        assert not any(1 in sample.mask for sample in trajectory.samples)


REFUSED_ONCE = """
    def run(row, base_url, model, api_key):
        choice = ask(base_url, api_key, [user("a")])
        assert choice["finish_reason"] == "length"
        try:
            ask(base_url, api_key, [user("a"), choice["message"], user("long" * 100)])
        except ValueError as error:
            assert "tokens" in str(error)
        {rest}
    def reward_fn(messages, finish_reason): return float(finish_reason == "stop")
"""
AGAIN = 'ask(base_url, api_key, [user("shorter")])'


@pytest.mark.parametrize(
    "rest, reason, texts",
    [
        (f"{AGAIN}; return 1.0", "stop", ["1", "2<|im_end|>"]),
        (f"{AGAIN}; raise KeyError('of the agent')", "failed", []),
    ],
)
def test_an_agent_may_go_on_after_a_refusal_for_length(tmp_path, rest, reason, texts):
    env = REFUSED_ONCE.replace("{rest}", rest)
    script = [("1", "length"), ("2", "stop")]
    (trajectory,), player = play(tmp_path, lambda turn, _: script[turn], env, max_length=100)
    assert trajectory.finish_reason == reason, player.failures.last
    trained = [trained_text(player, s) for s in trajectory.samples if 1 in s.mask]
    assert trained == texts
    if reason != "failed":
        assert trajectory.rewards == {"run": 1.0, "reward": 1.0}


@pytest.mark.parametrize(
    "fault, reason",
    [
        ("raise KeyError(base_url, api_key)", "/SECRET/v1', 'API_KEY'"),
        ("await asyncio.sleep(1000)", "=2 s; until then the model has answered it 1 times"),
    ],
)
def test_an_agent_that_fails_costs_its_trajectory(tmp_path, fault, reason):
    env = f"""
        async def run(row, state, base_url, model, api_key):
            call = asyncio.to_thread(ask, base_url, api_key, row["messages"])
            if (await call)["message"]["content"] == "bad":
                {fault}
            return 1.0
    """

    def script(turn, seed):
        return "bad" if seed[-2] else "good", "stop"

    (good, bad), player = play(tmp_path, script, env, num_samples=2, timeout=2)
    assert good.rewards == {"run": 1.0} and good.finish_reason == "stop"
    assert bad.finish_reason == "failed" and bad.length == 0
    assert not any(1 in sample.mask for sample in bad.samples)
    assert bad.messages[-1]["content"] == "bad"  # for the records
    assert reason in str(player.failures.last)
    assert not player.envs[""]._sessions._by_key and not player.envs[""].open_keys


@pytest.mark.parametrize(
    "request_, reason",
    [
        ("None", "no request has come to its base_url"),
        ("send(base_url, {'model': 'rl2', 'messages': [user('a')]})", "wrong API key"),
        (
            "send(base_url, {}, '/responses', **own)",
            "/v1/responses is no longer in rl2: use chat/comp",
        ),
        ("send(base_url, {}, '/' + base_url, **own)", "/SECRET/v1 is not served"),
    ],
)
def test_an_agent_without_an_answer_fails_with_the_reason(tmp_path, request_, reason):
    """Also where the agent itself says nothing of a refusal."""
    env = f"""
        def run(base_url, api_key):
            own = {{"Authorization": f"Bearer {{api_key}}"}}
            {request_}
            return 1.0
    """
    (trajectory,), player = play(tmp_path, [], env)
    assert trajectory.finish_reason == "failed" and trajectory.messages[0]["content"] == "q0"
    assert reason in str(player.failures.last) and "\n" not in str(player.failures.last)


class WaitingEngine(ScriptedEngine):
    """A request with the message "wait" waits until it is cancelled."""

    arrived, cancelled = threading.Semaphore(0), threading.Semaphore(0)

    async def generate(self, prompt, params, seed):
        if "wait" in self.template.decode(prompt):
            self.arrived.release()
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.release()
        return await super().generate(prompt, params, seed)


def test_requests_end_with_their_client_and_with_their_agent(tmp_path):
    """They are not trained, and leave the order of answers as it was.

    The reward lies on the sequence that was answered last, which is the one that is judged.
    """
    env = f"""
        import sys
        engine = sys.modules[{__name__!r}].WaitingEngine
        open_clients = []
        def run(row, base_url, model, api_key):
            one = ask(base_url, api_key, [user("a")])["message"]
            ask(base_url, api_key, [user("b")])
            body = json.dumps({{"model": model, "messages": [user("a"), one, user("wait")]}})
            url = urlsplit(base_url)
            head = {{"Authorization": f"Bearer {{api_key}}"}}
            def begin():
                client = http.client.HTTPConnection(url.netloc)
                client.request("POST", f"{{url.path}}/chat/completions", body, head)
                assert engine.arrived.acquire(timeout=20)
                return client
            begin().close()
            assert engine.cancelled.acquire(timeout=20)
            open_clients.append(begin())
            return 1.0
        def reward_fn(messages): return {{"last": float(messages[-1]["content"])}}
    """
    (trajectory,), player = play(tmp_path, ["1", "2"], env, engine_class=WaitingEngine)
    assert trajectory.rewards == {"run": 1.0, "last": 2.0}, player.failures.last
    texts = [trained_text(player, sample) for sample in trajectory.samples]
    assert texts == ["1<|im_end|>", "2<|im_end|>"]
    assert [sum(sample.rewards) for sample in trajectory.samples] == [0.0, 3.0]
    assert player.num_requests == 0


WAITING_AGENT = """
    async def run(row, base_url, model, api_key):
        await asyncio.to_thread(ask, base_url, api_key, row["messages"])
        await asyncio.sleep(1000)
"""


def test_an_engine_that_fails_ends_the_addresses_of_all_agents(tmp_path):
    fails = lambda _, seed: ("a", "stop") if seed[-2] else 1 / 0  # noqa: E731
    collector, prompts, player = make_agent(tmp_path, fails, WAITING_AGENT)
    with pytest.raises(ZeroDivisionError):
        collector.play(prompts, PARAMS, 2, "train", 1)
    assert not player.endpoint.addresses


def test_a_trajectory_that_is_not_needed_ends_its_agent(tmp_path):
    """As of groups that rollout.filter does not need. It is no failure."""
    _, prompts, player = make_agent(tmp_path, ["ab"], WAITING_AGENT)
    [trajectory] = begin_group(0, prompts[0], 1).trajectories

    async def cancel():
        task = asyncio.ensure_future(player.play(trajectory, PARAMS, (0,)))
        while not player.engine.requests:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task], timeout=20)
        return task.cancelled()

    assert player.engine.loop.run_until_complete(cancel())
    assert player.failures.count == 0 and not player.endpoint.addresses


def test_an_engine_that_aborts_ends_its_agents(tmp_path):
    def end(turn, seed):
        player.is_pausing = True
        return "ab", "abort"

    collector, prompts, player = make_agent(tmp_path, end, WAITING_AGENT)
    with pytest.raises(AssertionError, match="cancelled"):
        collector.play(prompts, PARAMS, 1, "train", 1)
    assert player.failures.count == 0 and not player.endpoint.addresses


def test_processes_that_began_before_the_endpoint_have_its_key(tmp_path):
    """Preflight starts them."""
    env = """
        import os
        def run(base_url): ...
        def reward_fn(messages): return float("OPENAI_API_KEY" in os.environ)
    """
    with mock.patch.dict("os.environ"):
        os.environ.pop("OPENAI_API_KEY", None)
        env = load_text(tmp_path, env, isolation="process")
        assert asyncio.run(env.score([], make_row(0))) == {"reward": 1.0}
    env.close()


@pytest.mark.parametrize("host", [LOCAL_HOST, "0.0.0.0"])
def test_each_trajectory_has_an_address_and_a_key_of_its_own(tmp_path, host):
    """Also where an agent knows the address of another one. No key stands in the environment.

    An exposed address takes no other key than that of the trajectory.
    """
    env = """
        import os, threading
        given, meeting, end = [], threading.Barrier(2), threading.Barrier(2)
        def run(row, base_url, model, api_key):
            given.append((base_url, api_key))
            meeting.wait(20)
            [other] = [pair for pair in given if pair != (base_url, api_key)]
            body = {"model": model, "messages": [user("a")]}
            assert send(other[0], body, Authorization=f"Bearer {api_key}")[0] == 401
            if "127.0.0.1" not in base_url:
                assert "0.0.0.0" not in base_url
                shared = f"Bearer {os.environ['OPENAI_API_KEY']}"
                assert send(base_url, body, Authorization=shared)[0] == 401
            assert not {api_key, *base_url.split("/")} & {*os.environ.values()}
            ask(base_url, api_key, [user("a")])
            end.wait(20)
            return float("127.0.0.1" not in base_url)
    """
    options = {"num_samples": 2, "endpoint_host": host}
    trajectories, player = play(tmp_path, ["b"], env, **options)
    expected = {"run": float(host != LOCAL_HOST)}
    assert [t.rewards for t in trajectories] == [expected] * 2, player.failures.last


@pytest.mark.parametrize(
    "host, is_exposed",
    [("127.0.0.1", False), ("localhost", False), ("::1", False), ("0.0.0.0", True)]
    + [("::", True), ("172.17.0.1", True), ("node7", True)],
)
def test_an_exposed_address_needs_an_agent_that_asks_for_its_key(tmp_path, host, is_exposed):
    rollout = RolloutConfig(env_path=str(tmp_path / "env.py"), endpoint_host=host, max_turns=2)
    for arguments, is_refused in (("base_url", is_exposed), ("base_url, api_key", False)):
        (tmp_path / "env.py").write_text(f"def run({arguments}): ...")
        problems = []
        read_envs(rollout, {"data.path": pack_rows([make_row(0)])}, problems)
        assert len(problems) == is_refused
        assert all(problem.startswith(f"rollout.endpoint_host={host}: ") for problem in problems)


def test_a_host_that_is_not_of_this_machine_is_named():
    with pytest.raises(OSError, match="rollout.endpoint_host=192.0.2.7"):
        Endpoint(asyncio.new_event_loop(), "192.0.2.7")


def talk(head, end):
    """The answer to the head of a request that no client would send, up to the text `end`."""
    with asyncio.Runner() as runner:  # which ends what the server still waits for
        endpoint = Endpoint(runner.get_loop(), LOCAL_HOST)
        address = endpoint.open(None, PARAMS)
        url = urlsplit(address.base_url)

        async def send():
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
            writer.write(f"POST {url.path}/chat/completions HTTP/1.1\r\n{head}\r\n\r\n".encode())
            answer = await asyncio.wait_for(reader.readuntil(end), 20)
            writer.close()
            return answer

        return runner.run(send()), address


def test_what_a_client_sends_stands_in_no_log(caplog):
    """A broken header may be a key, and a path is a secret."""
    caplog.set_level(0)
    answer, address = talk("Host: a\r\nAuthorization: Bearer \0secret", b"\r\n")
    assert b" 400 " in answer
    assert "secret" not in caplog.text and address.secret not in caplog.text


def test_a_client_that_may_not_ask_is_refused_before_its_body():
    answer, _ = talk("Host: a\r\nContent-Length: 4000000", b"api_key")
    assert b" 401 " in answer
