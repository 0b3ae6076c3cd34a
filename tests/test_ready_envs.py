"""The ready-made env files with their rows: the command in each docstring, a right and a wrong
trajectory, and what attacks or needs a server."""

import asyncio
import contextlib
import glob
import json
import os
import random
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from common import (
    ROOT,
    make_environment,
    make_model,
    pack_rows,
    read_cases,
    read_jsonl,
    run,
    serve_json,
)
from env_helpers import call_text, make_play, trained_text, wait_until
from scripted import PARAMS, ScriptedEngine, process_group  # noqa: F401
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from rl2.agents.session import AgentSession
from rl2.config.parse import parse
from rl2.config.schema import PPOConfig
from rl2.data.examples import PROMPT_ROWS
from rl2.data.rows import load_rows
from rl2.env.contract import EnvError
from rl2.env.load import load_env, preflight
from rl2.rewards.sandbox import Limits
from rl2.user_files import import_env_file

CASES = read_cases("ready_envs")
QUESTION = {"messages": [{"role": "user", "content": "1+1="}], "answer": 2}
COMMAND = re.compile(r"^ +python -m (rl2\.trainer\.ppo (?:.*\\\n)*.*)", re.MULTILINE)


def read_command(name):
    """The arguments of the trainer in the docstring of an env file."""
    text = (ROOT / "envs" / f"{name}.py").read_text(encoding="utf-8")
    [command] = COMMAND.findall(text)
    return shlex.split(command.replace("\\\n", " "))[1:]


def load_ready(name, monkeypatch):
    """(the env, its rows, the limit of turns) as its command asks for them."""
    monkeypatch.chdir(ROOT)
    config = parse(PPOConfig, read_command(name))
    assert config.rollout.env_path == name and config.trainer.max_steps == 1
    rows = load_rows(config.data.path, read=PROMPT_ROWS.read)
    assert len(rows) == 3 == config.data.prompts_per_rollout
    monkeypatch.syspath_prepend(ROOT / "examples/rows")  # has a taskset of verifiers
    isolation = config.rollout.env_isolation
    env = load_env(config.rollout.env_path, 600, isolation=isolation)
    return env, rows, config.rollout.max_turns


def play(env, row, replies, max_turns):
    """The trajectory of a row in which the model gives these replies, or calls of tools."""
    texts = []
    for reply in replies:
        if isinstance(reply, dict):
            [(tool, arguments)] = reply.items()
            reply = call_text(tool, **arguments)
        texts.append(reply)
    trajectory, player = play_script(env, row, texts, max_turns)
    assert trajectory.finish_reason == "stop", player.failures.last
    return trajectory


def play_script(env, row, script, max_turns, **options):
    """(the trajectory of a row, which may fail, its player) with a script of the engine."""
    params = replace(PARAMS, max_new_tokens=5000)
    options |= {"max_turns": max_turns, "max_length": 50_000, "params": params}
    collector, prompts, player = make_play(env, script, [row], **options)
    (trajectory,) = collector.play(prompts, params, 1, "train", 1)
    return trajectory, player


def reward(env, content, row):
    """The reward parts of one reply."""
    messages = [*row["messages"], {"role": "assistant", "content": content}]
    return asyncio.run(env.score(messages, row, inputs={"turn": 1}))


def shell_call(command):
    return call_text("shell", command=command)


END = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


def agent_commands(*commands):
    """Replies as envs/mini_swe_agent.py asks for them."""
    return [f"```bash\n{command}\n```" for command in commands]


def mend_return(expression):
    """A command that makes it the result of a function of one line."""
    return f"sed -i 's|return .*|return {expression}|' solution.py"


SCRIPTS = CASES["scripts"]
# The trial at the start plays the answers in their rows, and warns of one that earns too little.
GOLD = ("arithmetic", "boxed", "gsm8k", "reasoning", "think_answer")
PACKAGES = {
    "gem_games": "gem",
    "mini_swe_agent": "minisweagent",
    "openenv_server": "openenv",
    "reasoning": "reasoning_gym",
    "verifiers_tasks": "verifiers",
}  # what an env needs beside the standard library
SERVERS = {  # their fixtures
    "harbor_tasks": "fake_docker",
    "search": "search_address",
    "judge": "judge_server",
    "openenv_server": "backwards_server",
}


@pytest.mark.parametrize("name", [*SCRIPTS, *GOLD])
def test_the_rows_of_an_env_reward_the_right_trajectory(name, monkeypatch, request):
    """The command in the docstring is read by the trainer's own parser; the model is a script."""
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name], reason="the env needs it")
    if name in SERVERS:
        request.getfixturevalue(SERVERS[name])
    env, rows, max_turns = load_ready(name, monkeypatch)
    tried = rows if name in GOLD else pack_rows([rows[0]])
    warnings = preflight(env, {"data.path": tried}, max_turns)
    assert len(warnings) == (name == "countdown")  # whose answer is the target, not the reply
    state = random.getstate()
    for i in range(3 if name in SCRIPTS else 0):
        scripts = SCRIPTS[name]["right"][i], SCRIPTS[name]["wrong"]
        good, bad = (play(env, rows[i], replies, max_turns).reward for replies in scripts)
        assert good >= 1.0 and good - bad >= 0.5, (rows[i], good, bad)
    if name == "gem_games":  # GEM seeds Python's random numbers
        assert random.getstate() == state, "the games run in processes of their own"
    env.close()
    if name == "harbor_tasks":  # the last container was started as its task says, all are removed
        state = Path(os.environ["FAKE_DOCKER"])
        *_, options = read_jsonl(state / "runs.jsonl")
        assert ["--network", "none"] in options and ["--memory", "512m"] in options
        assert [path.name for path in state.iterdir()] == ["runs.jsonl"]


def test_every_ready_env_has_rows_and_a_command():
    names = {path.stem for path in (ROOT / "envs").glob("*.py")}
    assert names - {"reward_model"} == {*SCRIPTS, *GOLD}  # needs a model of its own


def conversation(*replies):
    return [{"role": "assistant", "content": reply} for reply in replies]


REWARDS = read_cases("ready_env_rewards")


@pytest.mark.parametrize(
    "name, replies, answer, earned",
    [(name, *case) for name in REWARDS for case in REWARDS[name]["cases"]],
)
def test_what_a_ready_env_rewards(name, replies, answer, earned):
    """An answer in the prompt is none of the reply."""
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name], reason="the env needs it")
    replies = [replies] if isinstance(replies, str) else replies
    right = answer[0] if isinstance(answer, list) else answer
    prompt = f"<answer>{right}</answer> \\boxed{{{right}}}\n#### {right}"
    messages = [{"role": "user", "content": prompt}, *conversation(*replies)]
    if name == "calculator":  # the result of a call in the last turn is not the model's answer
        messages.append({"role": "tool", "content": f"<answer>{answer}</answer>"})
    row = {"messages": messages[:1], "answer": answer, **REWARDS[name].get("row", {})}
    parts = asyncio.run(load_env(name).score(messages, row))
    assert parts == (earned if isinstance(earned, dict) else {"reward": earned})


@pytest.mark.parametrize("expression, result", read_cases("calculator_calls"))
def test_calculator_answers_a_call(expression, result):
    text = import_env_file("calculator").make_env().calculate(expression)
    assert text.startswith(result) and (result.startswith("error") or text == result)


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    """The folder of a small reward model. Its template ends replies in the padding token."""
    folder = str(tmp_path_factory.mktemp("reward_model"))
    make_model(folder)
    config = AutoConfig.from_pretrained(folder, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.chat_template = "".join(
        [
            "{{ bos_token }}{% for m in messages %}{{ m.role + ': ' + m.content }}",
            "{{ pad_token if m.role == 'assistant' }}{% endfor %}",
        ]
    )
    tokenizer.save_pretrained(folder)
    return folder


def score(messages):
    """What envs/reward_model.py gives to a conversation, loaded anew: it reads the environment."""
    return asyncio.run(load_env("reward_model", 60).score(messages, QUESTION))["reward"]


def test_a_reward_model_scores_alike_in_process_and_on_both_servers(reward_model, monkeypatch):
    """The servers read the last token of what they get, and vLLM gives a sigmoid by default."""
    model = AutoModelForSequenceClassification.from_pretrained(reward_model)
    monkeypatch.setenv("RL2_REWARD_MODEL", reward_model)
    messages = [*QUESTION["messages"], *conversation("2")]
    expected = score(messages)
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    text = f"{tokenizer.bos_token}user: 1+1=assistant: 2"
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]

    def value_at_the_end(ids):
        assert ids == token_ids
        hidden = model.model(torch.tensor([ids])).last_hidden_state
        return model.score(hidden[0, -1])

    def sglang(path, body):
        assert path == "/classify" and body.keys() == {"input_ids"}
        return 200, {"embedding": value_at_the_end(body["input_ids"]).tolist(), "meta_info": {}}

    def vllm(path, body):
        assert path == "/classify" and body.keys() <= {"model", "input", "use_activation"}
        values = value_at_the_end(body["input"])
        if body.get("use_activation", True):
            values = values.sigmoid()
        item = {"index": 0, "label": "LABEL_0", "probs": values.tolist(), "num_classes": 1}
        return 200, {"object": "list", "data": [item]}

    for name, answer in (("sglang", sglang), ("vllm", vllm)):
        with serve_json(answer) as (address, _):
            monkeypatch.setenv("RL2_REWARD_SERVER", name)
            for url in (address, f"{address}/classify"):
                monkeypatch.setenv("RL2_REWARD_URL", url)
                assert score(messages) == pytest.approx(expected, abs=1e-6)
            if name == "sglang":
                monkeypatch.setenv("RL2_REWARD_SERVER", "vllm")
                with pytest.raises(EnvError, match="does not answer"):
                    score(messages)


def test_a_reward_server_that_fails_or_is_another_is_an_error(reward_model, monkeypatch):
    monkeypatch.setenv("RL2_REWARD_MODEL", reward_model)
    messages = [*QUESTION["messages"], *conversation("2")]
    answers = iter([(500, {"why": "too long"}), (200, {"embedding": [1.0, 2.0]})])
    with serve_json(lambda path, body: next(answers)) as (address, _):
        monkeypatch.setenv("RL2_REWARD_URL", address)
        with pytest.raises(EnvError, match="500.*too long"):
            score(messages)
        with pytest.raises(EnvError, match="RL2_REWARD_SERVER=sglang: expected one score"):
            score(messages)
    with pytest.raises(EnvError, match="RL2_REWARD_URL=http.* does not answer"):
        score(messages)  # the server has ended
    monkeypatch.setenv("RL2_REWARD_SERVER", "tgi")
    with pytest.raises(ValueError, match="RL2_REWARD_SERVER=tgi: choose sglang or vllm"):
        load_env("reward_model")
    monkeypatch.delenv("RL2_REWARD_MODEL")
    with pytest.raises(ValueError, match="set the environment variable RL2_REWARD_MODEL"):
        load_env("reward_model")


def test_search_looks_up_the_first_query_of_the_last_turn(monkeypatch):
    def answer(path, request):
        [query] = request["queries"]
        contents = ['"France"\nIts capital is Paris. ', "x" * 9999] if query != "nothing" else []
        documents = [{"document": {"contents": text}, "score": 1.0} for text in contents]
        return 500 if query == "fail" else 200, {"result": [documents]}

    with serve_json(answer) as (address, requests):
        monkeypatch.setenv("RL2_SEARCH_URL", f"{address}/retrieve")
        env = load_env("search", 10)

        def answered(reply):
            messages = [*QUESTION["messages"], *conversation("<search>old</search>", reply)]
            return asyncio.run(env.answer(messages, QUESTION)).messages

        [message] = answered(
            "Let me see. <search> capital of France\n</search> <search>two</search>"
        )
        assert message["role"] == "tool" and message["content"].startswith(
            '[1] "France"\nIts capital is Paris.\n\n[2] xx'
        )
        assert len(message["content"]) < 1700
        [(_, request)] = requests
        assert request == {"queries": ["capital of France"], "topk": 3, "return_scores": True}
        assert answered("<search>nothing</search>")[0]["content"] == "nothing was found"
        assert answered("<search> </search>")[0]["content"] == "the query is empty"
        assert len(requests) == 2
        for end in ("<search>x</search><answer>Paris</answer>", "<search>Paris", "", "Paris"):
            assert answered(end) == []
        with pytest.raises(EnvError, match="500"):
            answered("<search>fail</search>")


@pytest.mark.parametrize("reply", ["1" * 40_000, "1,111" * 10_000])
def test_arithmetic_reads_a_reply_of_one_repeated_token_in_linear_time(reply):
    """Policies that collapse write such replies; test_rewards.py has what other envs read with."""
    start = time.process_time()
    assert reward(load_env("arithmetic"), reply, QUESTION) == {"reward": 0.0}
    assert time.process_time() - start < 10


def test_countdown_is_exact():
    row = {"messages": [], "answer": 24, "numbers": [3, 3, 8, 8]}
    assert reward(load_env("countdown"), "<answer>8 / (3 - 8 / 3)</answer>", row)["right"] == 1


@pytest.fixture(scope="module")
def search_address():
    """The address of the search server, started by its command on a free port."""
    script, corpus = ROOT / "envs/search.py", ROOT / "examples/rows/search_corpus.jsonl"
    command = [sys.executable, script, "serve", corpus, "--port", "0"]
    with subprocess.Popen(
        command, env=make_environment(None), stdout=subprocess.PIPE, text=True
    ) as server:
        line = server.stdout.readline()
        address = re.fullmatch(r"6 texts at RL2_SEARCH_URL=(http://127\.0\.0\.1:\d+/.*)\n", line)[1]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RL2_SEARCH_URL", address)
            yield address
        server.terminate()


@pytest.fixture
def backwards_server(monkeypatch):
    """A server of OpenEnv, started by its command on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("RL2_OPENENV_URL", f"http://127.0.0.1:{port}")
    command = [sys.executable, ROOT / "examples/rows/backwards_server.py", str(port)]
    with subprocess.Popen(command, env=make_environment(None)) as server:
        while server.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        yield
        server.terminate()


@pytest.fixture
def fake_docker(tmp_path, monkeypatch):
    """The folder of the containers of a stand-in for docker."""
    state = tmp_path / "docker-state"
    (tmp_path / "bin").mkdir()
    state.mkdir()
    (tmp_path / "bin/docker").symlink_to(ROOT / "tests/fake_docker.py")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_DOCKER", str(state))
    return state


def post(address, body):
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def test_the_search_server_answers_several_queries_and_refuses_what_is_no_request(search_address):
    request = {"queries": ["Isk sea", "Marrow Bridge arches"], "topk": 1, "return_scores": True}
    [[sea], [bridge]] = post(search_address, json.dumps(request).encode())["result"]
    assert sea["document"]["contents"].startswith('"Isk"') and sea["score"] > 0
    assert bridge["document"]["contents"].startswith('"Marrow Bridge"')
    for body in (b"{", b"[]", b"{}", b'{"queries": [3]}', b'{"queries": [""], "topk": "x"}'):
        with pytest.raises(urllib.error.HTTPError, match="400"):
            post(search_address, body)
    huge = json.dumps({"queries": ["Isk " * 200_000], "topk": 10**9}).encode()
    assert len(post(search_address, huge)["result"][0]) == 2


def test_bm25_is_the_formula(tmp_path):
    search = import_env_file("search")
    texts = ["a b c", "a a d e f", "b"]
    index = search.Index(texts)
    # log(1 + (N - n + 0.5) / (n + 0.5)) * f * 2.2 / (f + 1.2 * (0.25 + 0.75 * length / 3))
    expected = {
        "a a d e f": 0.470004 * 2 * 2.2 / (2 + 1.2 * (0.25 + 0.75 * 5 / 3)),
        "a b c": 0.470004 * 2.2 / (1 + 1.2),
    }
    assert dict(index.search("A, a!", 5)) == pytest.approx(expected, abs=1e-5)
    assert [text for text, _ in index.search("a", 5)] == list(expected)
    assert [text for text, _ in index.search("b d", 1)] == ["a a d e f"]
    assert search.Index([]).search("a", 3) == search.Index([""]).search("a", 3) == []
    equal = search.Index(["x y", "x y", "x y"])
    assert equal.search("x", 2)[0][1] == equal.search("x", 2)[1][1]
    (tmp_path / "corpus").write_text('{"contents": "a"}\n{"text": "b"}\n')
    with pytest.raises(ValueError, match=r'corpus:2: expected .*got .*"text": "b"'):
        search.read_corpus(tmp_path / "corpus")


def test_the_calculators_rows_and_conversations_are_those_of_its_rollouts(tmp_path, monkeypatch):
    """What SFT teaches is the same messages that a rollout with the tool has."""
    script = ROOT / "envs/calculator.py"
    for command, seed in (("rows", 0), ("conversations", 1)):
        run(script, command, 50, tmp_path / f"{command}.jsonl", "--seed", seed)
    rows = load_rows(str(tmp_path / "rows.jsonl"), read=PROMPT_ROWS.read)
    lines = (tmp_path / "conversations.jsonl").read_text().splitlines()
    conversations = [json.loads(line)["messages"] for line in lines]
    questions = {row["messages"][1]["content"] for row in (rows[i] for i in range(50))}
    assert len(questions) == 50 and not questions & {c[1]["content"] for c in conversations}
    env = load_ready("calculator", monkeypatch)[0]
    assert preflight(env, {"data.path": rows}, 2) == []
    for messages in conversations[:3]:
        *prompt, call, result, answer = messages
        number = answer["content"].removeprefix("<answer>").removesuffix("</answer>")
        row = {"messages": prompt, "answer": number}
        trajectory = play(env, row, [call["content"], answer["content"]], 2)
        del trajectory.messages[3]["tool_call_id"]
        assert trajectory.messages == messages and trajectory.rewards == {"reward": 1.0}
    assert env.tools[0]["function"]["parameters"]["required"] == ["expression"]


@pytest.mark.parametrize("task, settings", CASES["reasoning_has_any_task_by_its_name"])
def test_reasoning_has_any_task_by_its_name(task, settings):
    """The task's own answer is right, and other texts are not."""
    pytest.importorskip("reasoning_gym", reason="comes with rl2[quickstart]")
    made = import_env_file("reasoning").make_rows(task, settings, 5, 3)
    rows = [json.loads(json.dumps(row)) for row in made]
    env = load_env("reasoning", 60)
    last = rows[-1]  # it is made again from its index alone
    assert reward(env, f"So <answer>{last['answer']}</answer>", last) == {"reward": 1.0}
    for wrong in ("<answer>zyx</answer>", last["answer"], "<answer></answer>", "<answer>"):
        assert reward(env, wrong, last)["reward"] < 0.3
    for absurd in ("9" * 5000, "(" * 900, "\0", "x" * 10**6):
        assert reward(env, f"<answer>{absurd}</answer>", last)["reward"] < 0.3
    with pytest.raises(EnvError, match="write the rows again"):
        reward(env, "", {**last, "answer": "?"})


@pytest.mark.parametrize("replies, operations", CASES["maths_steps_reward_each_operation_once"])
def test_maths_steps_reward_each_operation_once(replies, operations, monkeypatch):
    env, rows, _ = load_ready("maths_steps", monkeypatch)
    row = {**rows[0], "expression": "(3 + 4) * (10 - 2)"}
    messages = list(row["messages"])
    for turn, (reply, earned) in enumerate(zip(replies, operations, strict=True), start=1):
        messages.append({"role": "assistant", "content": reply})
        answer = asyncio.run(env.answer(messages, row, inputs={"turn": turn}))
        assert answer.reward == pytest.approx(earned / 3)
        messages += answer.messages
        is_last = turn == len(replies) and reply == "56"
        assert answer.done == is_last and bool(answer.messages) != is_last
        if not earned:
            assert answer.messages[0]["content"].startswith("Wrong: ")
    parts = asyncio.run(env.score(messages, row, inputs={"turn": len(replies)}))
    assert parts == {"solved": float(sum(operations) == 3)}


def test_maths_steps_count_the_step_that_the_limit_of_turns_cuts_off(monkeypatch):
    env, rows, _ = load_ready("maths_steps", monkeypatch)
    row = {**rows[0], "expression": "6 * 6 - 5"}
    trajectory = play(env, row, ["36 - 5", "31"], max_turns=2)
    assert trajectory.rewards == {"turns": 0.5, "solved": 1.0}


def test_maths_steps_rows_can_be_solved_and_show_solutions(tmp_path):
    run(ROOT / "envs/maths_steps.py", 30, tmp_path / "rows.jsonl", "--seed", 3)
    module = import_env_file("maths_steps")
    for line in (tmp_path / "rows.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert row["messages"][-1] == {"role": "user", "content": row["expression"]}
        assert 2 <= module.count_operations(row["expression"]) <= 4
        number = str(eval(row["expression"]))
        assert module.follow(row["expression"], [number]) == number
    for question, *steps in module.EXAMPLES:
        for step in steps:
            assert module.find_fault(question, step) == ""
            question = step


def test_the_rows_of_reasoning_come_from_its_command(tmp_path):
    pytest.importorskip("reasoning_gym", reason="comes with rl2[quickstart]")
    file = tmp_path / "rows.jsonl"
    run(ROOT / "envs/reasoning.py", "leg_counting", 3, file, "max_animals=3")
    assert file.read_text() == (ROOT / "examples/rows/reasoning.jsonl").read_text()


@pytest.fixture
def judge_server(monkeypatch):
    """A server of the OpenAI protocol. `answers` are its next (status, reply, headers), or return
    them.
    """
    answers = []

    def answer(path, body):
        if answers:
            given = answers.pop(0)
            status, reply, headers = given() if callable(given) else given
        else:
            quoted = body["messages"][0]["content"].partition("in JSON:\n\n")[2]
            parts, _ = json.JSONDecoder().raw_decode(quoted)
            score = 10 if "good" in parts["reply"] else 1
            status, reply, headers = 200, f"It says so.\nSCORE: {score}", {}
        message = {"role": "assistant", "content": reply}
        return status, {"choices": [{"message": message}]}, headers

    with serve_json(answer) as (url, requests):
        monkeypatch.setenv("RL2_JUDGE_URL", f"{url}/v1/")
        monkeypatch.setenv("RL2_JUDGE_MODEL", "judge-7b")
        monkeypatch.setenv("RL2_JUDGE_KEY", "secret")
        yield SimpleNamespace(answers=answers, requests=requests)


class Clock:
    """The time of a test, which passes in sleep() alone."""

    def __init__(self):
        self.now = 100.0
        self.sleeps = []

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        if seconds:
            self.sleeps.append(round(seconds, 6))


@pytest.fixture
def judge(judge_server):
    """The module of the judge, with a clock of its own."""
    module = import_env_file("judge")
    module.time = Clock()
    return module


def judged(module, reply, criteria="It is good."):
    messages = [{"role": "user", "content": "Write."}, {"role": "assistant", "content": reply}]
    return module.reward_fn(messages, criteria)


def test_a_judge_is_asked_once_for_equal_conversations(judge, judge_server):
    assert [judged(judge, reply) for reply in ("good", "bad", "good")] == [1.0, 0.1, 1.0]
    assert judged(judge, "good", "It is short.") == 1.0
    assert len(judge_server.requests) == 3
    headers, body = judge_server.requests[0]
    assert headers["Authorization"] == "Bearer secret" and body["model"] == "judge-7b"
    assert body["temperature"] == 0 and "It is good." in body["messages"][0]["content"]
    assert judged(judge, " ") == judged(judge, "x" * 20_001) == 0.0
    assert len(judge_server.requests) == 3


def test_a_busy_judge_is_asked_again_after_longer_pauses_until_its_deadline(judge, judge_server):
    judge_server.answers += [(429, "", {}), (500, "", {}), (503, "", {})]
    judge_server.answers += [(200, "no JSON", {"Content-Length": 5})]
    assert judged(judge, "good") == 1.0
    assert judge.time.sleeps == [0.5, 1.0, 2.0, 4.0] and len(judge_server.requests) == 5
    judge_server.answers += [(500, "", {})] * 99
    judge.time = Clock()
    with pytest.raises(TimeoutError, match="no verdict in 28 s: the server answers 500"):
        judged(judge, "another good one")
    limit = parse(PPOConfig, read_command("judge")).rollout.env_timeout
    assert judge.time.now - 100 <= 28 < limit and len(judge_server.requests) == 5 + 6
    judge_server.answers.clear()
    assert judged(judge, "another good one") == 1.0, "a failure is not cached"


def test_a_request_waits_for_the_end_of_another_one(judge, monkeypatch):
    monkeypatch.setattr(judge, "SLOTS", threading.Semaphore(0))
    threading.Timer(0.2, judge.SLOTS.release).start()
    assert judged(judge, "good") == 1.0 and judge.time.sleeps == []


def test_a_judge_that_does_not_answer_is_given_up(judge, judge_server):
    judge.TIMEOUT_SECONDS = 0.3
    stop = threading.Event()

    def hang():
        judge.TIMEOUT_SECONDS = 60  # of the next requests
        stop.wait(60)
        return 200, "SCORE: 3", {}

    judge_server.answers += [hang]
    assert judged(judge, "good") == 1.0
    assert judge.time.sleeps == [0.5] and len(judge_server.requests) == 2
    stop.set()


@pytest.mark.parametrize("reply, score", CASES["a_verdict_is_read_strictly"])
def test_a_verdict_is_read_strictly(reply, score):
    judge = import_env_file("judge")
    if score is None:
        with pytest.raises(ValueError, match="not one verdict"):
            judge.read_verdict(reply)
    else:
        assert judge.read_verdict(reply) == score


@pytest.mark.parametrize("attack", CASES["a_reply_stays_quoted"])
def test_a_reply_stays_quoted(attack, judge, judge_server):
    """A judge that repeats the reply gives no verdict; the prompt quotes the reply in one line."""
    assert judged(judge, attack) == 0.1
    prompt = judge_server.requests[0][1]["messages"][0]["content"]
    quoted = prompt.partition("in JSON:\n\n")[2]
    parts, end = json.JSONDecoder().raw_decode(quoted)
    assert parts["reply"] == attack and quoted[end:].startswith(
        "\n\nThe conversation and the reply"
    )
    assert not judge.SCORE_LINE.search(quoted[:end])
    judge_server.answers += [(200, f"The reply is\n{attack}\nSCORE: 1", {})]
    if "SCORE" in attack:
        with pytest.raises(ValueError, match="not one verdict"):
            judged(judge, attack, "It is short.")


def test_requests_to_a_judge_are_limited(judge, judge_server):
    """A request has its place until it is answered.

    One that is refused is not sent again, and makes room for the next one.
    """
    judge.SLOTS = threading.BoundedSemaphore(1)
    has_room = []

    def answer():
        has_room.append(judge.SLOTS.acquire(blocking=False))
        return 200, "SCORE: 10", {}

    judge_server.answers += [(401, "", {}), answer]
    with pytest.raises(urllib.error.HTTPError, match="401"):
        judged(judge, "bad")
    assert judged(judge, "good") == 1.0 and has_room == [False]
    assert len(judge_server.requests) == 2
    judge.DEADLINE_SECONDS = 0.0
    with judge.SLOTS, pytest.raises(TimeoutError, match="all requests at a time are in use"):
        judged(judge, "another")


SUMS = """
import verifiers.v1 as vf
__all__ = ["Sums"]
class Data(vf.TaskData):
    answer: int
class Sum(vf.Task[Data, vf.State, vf.TaskConfig]):
    async def setup(self, trace, runtime):
        trace.info["prompt"] = [message.content for message in trace.messages]
    @vf.reward(weight=2.0)
    async def right(self, trace):
        assert trace.info["prompt"] == ["Be brief.", self.data.prompt] and trace.num_turns == 1
        if trace.last_reply == "fail":
            raise ValueError("cannot score")
        return float(trace.last_reply == str(self.data.answer))
class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    INFINITE = True
    def load(self):
        a = 0
        while True:
            data = Data(prompt=f"{a} + 5 =", system_prompt="Be brief.", answer=a + 5)
            yield Sum(data, self.config.task)
            a += 1
"""


def test_verifiers_plays_a_taskset_of_its_own(tmp_path, monkeypatch):
    """The env of a plain taskset asks for one turn. Its tasks are read from their index alone.

    A task that needs a container is refused.
    """
    pytest.importorskip("verifiers.v1", reason="pip install verifiers")
    (tmp_path / "sums_of_five.py").write_text(SUMS)
    head = "class Sum(vf.Task[Data, vf.State, vf.TaskConfig]):\n"
    boxed_sums = SUMS.replace(head, f"{head}    NEEDS_CONTAINER = True\n")
    (tmp_path / "boxed_sums.py").write_text(boxed_sums)
    monkeypatch.syspath_prepend(tmp_path)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    module = import_env_file("verifiers_tasks")
    row = [*module.make_rows("sums_of_five", {}, 4)][3]
    assert [m["content"] for m in row["messages"]] == ["Be brief.", "3 + 5 ="]
    env = load_env("verifiers_tasks", 600, isolation="process")
    assert preflight(env, {"data.path": pack_rows([row])}, 1) == []
    for reply, right in (("8", 2.0), ("9", 0.0)):
        trajectory = play(env, row, [reply], 1)
        assert trajectory.rewards == {"right": right} and trajectory.num_turns == 1
    boxed = [*module.make_rows("boxed_sums", {}, 1)][0]
    for failing, reply, reason in (
        (row, "fail", "cannot score"),
        ({**row, "key": "?"}, "8", "task 3 has changed: write the rows again"),
        (boxed, "5", "Sum needs a container or tools"),
    ):
        trajectory, player = play_script(env, failing, [reply], 1)
        assert trajectory.is_failed and reason in str(player.failures.last)
    assert not env.open_keys
    env.close()


@pytest.fixture
def mini_swe_agent(monkeypatch):
    """(the env of mini-swe-agent, its first row)."""
    pytest.importorskip("minisweagent", reason="pip install mini-swe-agent")
    pytest.importorskip("litellm")  # takes seconds
    env, rows, _ = load_ready("mini_swe_agent", monkeypatch)
    yield env, rows[0]
    env.close()


def test_mini_swe_agent_asks_again_for_a_reply_without_a_command(mini_swe_agent):
    """It leaves the reply out of its history. Both sequences are trained; all later requests
    extend the second one.
    """
    env, row = mini_swe_agent
    replies = ["Hm.", *agent_commands(mend_return(row["right"]), END)]
    trajectory, player = play_script(env, row, replies, 4)
    assert trajectory.rewards == {"reward": 1.0}, player.failures.last
    first, second = (trained_text(player, sample) for sample in trajectory.samples)
    assert first == "Hm.<|im_end|>" and second == "<|im_end|>".join([*replies[1:], ""])


def test_mini_swe_agent_is_judged_at_the_limit_of_turns(mini_swe_agent):
    """A request that is refused ends the agent at once."""
    env, row = mini_swe_agent
    replies = agent_commands(mend_return(row["right"]), "python test_solution.py")
    check = AgentSession.check_may_ask
    options = {"autospec": True, "side_effect": check}
    with mock.patch.object(AgentSession, "check_may_ask", **options) as asked:
        trajectory, player = play_script(env, row, replies, 2)
    assert asked.call_count == 3
    assert trajectory.rewards == {"reward": 1.0}, player.failures.last
    assert trajectory.finish_reason == "length" and trajectory.num_turns == 2


def test_mini_swe_agent_earns_nothing_without_a_program(mini_swe_agent, monkeypatch):
    """And reads that a command took too long."""
    env, row = mini_swe_agent
    limits = Limits(cpu_seconds=5, wall_seconds=3.0, memory_bytes=2**30)
    monkeypatch.setitem(env.spec.run.__globals__, "LIMITS", limits)
    trajectory = play(env, row, agent_commands("sleep 100", "rm solution.py", END), 4)
    assert trajectory.rewards == {"reward": 0.0}
    assert trajectory.messages[3]["content"] == "(timed out)"


def test_mini_swe_agent_ends_with_its_time(mini_swe_agent):
    """Its workspace and its thread end too, though its request has no answer."""
    _, row = mini_swe_agent
    folders = find_sandboxes()

    class SilentEngine(ScriptedEngine):
        async def generate(self, prompt, params, seed):
            await asyncio.Event().wait()

    env = load_env("mini_swe_agent", 5)
    trajectory, player = play_script(env, row, [], 4, engine_class=SilentEngine)
    assert trajectory.is_failed
    assert "run did not return within rollout.env_timeout=5 s" in str(player.failures.last)
    wait_until(lambda: folders >= find_sandboxes())
    wait_until(lambda: "run" not in {thread.name for thread in threading.enumerate()})
    env.close()


def find_sandboxes():
    return set(glob.glob(f"{tempfile.gettempdir()}/rl2-sandbox-*"))


def test_the_rows_of_mini_swe_agent_can_be_solved(tmp_path):
    """Each has a test that fails, and more tests, which only the right program passes."""
    pytest.importorskip("minisweagent", reason="pip install mini-swe-agent")
    path = tmp_path / "rows.jsonl"
    run(ROOT / "envs/mini_swe_agent.py", "200", path)
    rows = read_jsonl(path)
    assert len({row["files"]["solution.py"] for row in rows}) > 150
    for row in rows:
        program, shown = row["files"]["solution.py"], row["files"]["test_solution.py"]
        mended = program.replace(row["wrong"], row["right"])
        tests = row["test_cases"]
        exec(mended + tests, {})
        with pytest.raises(AssertionError):
            exec(program + shown.partition("\n")[2], {})
        assert len(tests.splitlines()) >= 5 and shown.splitlines()[-1] in tests


@pytest.mark.parametrize(
    "command",
    [
        "rm -rf /app /tests",
        "mkdir -p /tests /logs/verifier; echo 1 > /logs/verifier/reward.txt; rm -rf /app",
    ],
)
def test_harbor_earns_nothing_where_no_test_can_run(command, fake_docker, monkeypatch):
    env, rows, max_turns = load_ready("harbor_tasks", monkeypatch)
    trajectory = play(env, rows[0], [shell_call(command), "Done."], max_turns)
    assert trajectory.rewards == {"environment": 0.0}
    env.close()


def make_harbor_task(folder, config="", reward="echo 0.5 > /logs/verifier/reward.txt"):
    for name in ("environment", "tests"):
        (folder / name).mkdir(parents=True)
    (folder / "task.toml").write_text(config)
    (folder / "instruction.md").write_text(f"Do {folder.name}.\n")
    (folder / "tests/test.sh").write_text(f"#!/bin/sh\n{reward}\n")
    return {"messages": [{"role": "user", "content": "Do it."}], "task": str(folder)}


@pytest.mark.parametrize("written, rewards", CASES["harbor_reads_what_the_tests_write"])
def test_harbor_reads_what_the_tests_write(written, rewards, tmp_path, fake_docker):
    config = '[verifier]\ntimeout_sec = 2\n[verifier.env]\nLEVEL = "${RL2_LEVEL:-0.75}"\n'
    row = make_harbor_task(tmp_path / "task", config, written)
    env = load_env("harbor_tasks", 60)
    assert play(env, row, ["Done."], 2).rewards == rewards
    env.close()


def test_harbor_ends_a_command_that_is_late(tmp_path, fake_docker, monkeypatch):
    row = make_harbor_task(tmp_path / "task")
    env = load_env("harbor_tasks", 60)
    monkeypatch.setitem(env.spec.make_env.shell.__globals__, "COMMAND_SECONDS", 1)
    replies = [shell_call("echo start; sleep 50"), shell_call("yes"), "Done."]
    trajectory = play(env, row, replies, 4)
    late, long = (m["content"] for m in trajectory.messages if m["role"] == "tool")
    assert late == "start\n(status 124)" and len(long) < 5000
    assert trajectory.rewards == {"environment": 0.5}
    env.close()


def test_harbor_leaves_out_tasks_that_need_more(tmp_path, fake_docker):
    make_harbor_task(tmp_path / "tasks/good")
    make_harbor_task(tmp_path / "tasks/composed")
    (tmp_path / "tasks/composed/environment/docker-compose.yaml").touch()
    for i, (config, _) in enumerate(CASES["harbor_leaves_out"]):
        make_harbor_task(tmp_path / f"tasks/{i}", config)
    path = tmp_path / "rows.jsonl"
    printed = run(ROOT / "envs/harbor_tasks.py", tmp_path / "tasks", path).stdout
    assert [row["messages"][0]["content"] for row in read_jsonl(path)] == ["Do good."]
    for reason in [*dict(CASES["harbor_leaves_out"]).values(), "Docker Compose"]:
        assert f"harbor_tasks does not have {reason}" in printed


def test_harbor_needs_docker(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="harbor_tasks needs Docker, which does not answer"):
        load_env("harbor_tasks")
