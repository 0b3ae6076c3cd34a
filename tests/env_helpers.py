"""Helpers of the tests of environments."""

import asyncio
import json
import textwrap
import time

import pytest
from common import ROOT, make_tokenizer
from scripted import PARAMS, ScriptedEngine, make_row, player_class, write_nothing

from rl2.data.chat import ChatTemplate
from rl2.data.examples import Example
from rl2.env.call import Env
from rl2.env.contract import EnvError, EnvFailures
from rl2.env.load import load_env
from rl2.env.spec import EnvSpec
from rl2.rollout.collect import Collector

MESSAGES = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
ENVS = ROOT / "envs"
CHATML_WITH_TOOLS = (
    "{% for tool in tools or [] %}{{ '<tool>' + tool.function.name + '</tool>' }}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# A client of HTTP with the standard library alone, for what OpenAI's client would not send.
CLIENT = """
    import asyncio, http.client, json
    from urllib.parse import urlsplit
    def send(base_url, body, path="/chat/completions", method="POST", **headers):
        url = urlsplit(base_url)
        connection = http.client.HTTPConnection(url.hostname, url.port)
        if not isinstance(body, (bytes, str)):
            body = json.dumps(body)
        path = path if path.startswith("//") else url.path + path
        connection.request(method, path.replace("//", "/"), body, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    def ask(base_url, api_key, messages, **fields):
        body = {"model": "rl2", "messages": messages, **fields}
        status, answer = send(base_url, body, Authorization=f"Bearer {api_key}")
        if status != 200:
            raise ValueError(f"{status} {answer['error']['message']}")
        return answer["choices"][0]
    def user(text):
        return {"role": "user", "content": text}
"""


def env_of(reward_fn, interact=None, timeout=60.0, concurrency=32) -> Env:
    """Returns the environment of these functions, which come from no file."""
    return Env(EnvSpec(reward_fn, interact), timeout, concurrency)


def load_text(folder, text, timeout=20.0, **options) -> Env:
    """Returns the environment of a file with this text."""
    file = folder / "env.py"
    file.write_text(textwrap.dedent(text))
    return load_env(str(file), timeout, **options)


def call(env, key=None, **row):
    return asyncio.run(env.score(MESSAGES, row, key))


def failure(env, key=None, **row) -> EnvError:
    """The error of a call."""
    with pytest.raises(EnvError) as error:
        call(env, key, **row)
    return error.value


def call_together(env, calls):
    """The results of calls (key, row) side by side: {"reward": ...} or EnvError."""

    async def main():
        tasks = [env.score(MESSAGES, row, key) for key, row in calls]
        return await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run(main())


def wait_until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def make_play(
    env,
    script,
    rows,
    max_turns=4,
    max_length=400,
    params=PARAMS,
    engine_class=ScriptedEngine,
    **more,
):
    """(collector, prompts, player) of an env. `script` is that of the engine, or the replies."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHATML_WITH_TOOLS
    template = ChatTemplate(tokenizer)
    replies = script if callable(script) else lambda turn, _: (script[turn], "stop")
    player = player_class(env, **more)(
        engine=engine_class(tokenizer, replies),
        envs={"": env},
        templates={"": template},
        failures=EnvFailures(1.0),
        max_turns=max_turns,
        max_length=max_length,
    )
    collector = Collector(player, params=params, write_records=write_nothing, deterministic=True)
    prompts = [
        Example(i, row, [(template.encode_prompt(row["messages"]), [])])
        for i, row in enumerate(rows)
    ]
    return collector, prompts, player


def make_agent(folder, script, env, num_prompts=1, isolation="thread", timeout=20, **options):
    """The same of an env file with this text, which may use the client above.

    A column of the rows has the name of an argument of agents, which they get all the same.
    """
    text = textwrap.dedent(CLIENT) + textwrap.dedent(env)
    loaded = load_text(folder, text, timeout, isolation=isolation)
    rows = [{**make_row(i), "model": "of the row"} for i in range(num_prompts)]
    return make_play(loaded, script, rows, **options)


def play(folder, script, env, num_samples=1, **options):
    """(the trajectories of each prompt, the player)."""
    collector, prompts, player = make_agent(folder, script, env, **options)
    trajectories = collector.play(prompts, collector.params, num_samples, "train", 1)
    if player.failures.last:
        print(player.failures.last)
    player.envs[""].close()
    endpoint = getattr(player, "endpoint", None)
    assert endpoint is None or not endpoint.addresses
    return trajectories, player


def trained_text(player, sample):
    """The text of the trained tokens."""
    pairs = zip(sample.tokens, sample.mask, strict=True)
    return player.templates[""].decode([token for token, trains in pairs if trains])


def call_text(name, /, **arguments):
    """What a model writes to call a tool."""
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


def describe(trajectory):
    """What is trained, comparable."""
    columns = [(s.tokens, s.mask, s.logps, s.rewards) for s in trajectory.samples]
    return [[list(column) for column in sample] for sample in columns]
