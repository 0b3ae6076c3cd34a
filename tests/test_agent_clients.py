"""The clients of OpenAI and Anthropic, unchanged, in each protocol of an agent's address.

Each plays the same conversation: a question, two calls of a tool in one turn, their results, an
answer. It gives the tokens that an object with tools gives.
"""

import textwrap

import pytest
from env_helpers import call_text, describe, play, trained_text
from scripted import process_group  # noqa: F401

# An object with a tool, whose calls the same conversation has without an agent.
DOUBLING_OBJECT = '''
    class make_env:
        def double(self, x: int):
            """Doubles.

            Args:
                x: a number
            """
            return str(2 * x)
    def reward_fn(messages): return float(len(messages))
'''
SCRIPT = ["Hm. " + call_text("double", x=3) + call_text("double", x=4), "6 and 8"]
HEAD = """
    import json
    PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer"}}}
    def reward_fn(messages): return float(len(messages))
"""
CHAT = """
    import openai
    TOOL = {"type": "function", "function": {"name": "double", "parameters": PARAMETERS}}
    async def ask(client, model, messages):
        asked = {"model": model, "messages": messages, "tools": [TOOL]}
        if not STREAM:
            answer = await client.chat.completions.create(**asked)
            assert answer.usage.total_tokens > answer.usage.completion_tokens > 0
            message = answer.choices[0].message
            return message.content, message.tool_calls, answer.choices[0].finish_reason
        text, calls, reason, usage = "", {}, None, None
        options = {"include_usage": True}
        async for chunk in await client.chat.completions.create(
            **asked, stream=True, stream_options=options
        ):
            assert chunk.object == "chat.completion.chunk"
            usage = chunk.usage
            for choice in chunk.choices:
                reason = choice.finish_reason or reason
                text += choice.delta.content or ""
                for call in choice.delta.tool_calls or []:
                    if call.id:
                        calls[call.index] = call
                    else:
                        calls[call.index].function.arguments += call.function.arguments
        assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
        return text, list(calls.values()), reason
    async def run(row, base_url, model):
        async with openai.AsyncOpenAI(base_url=base_url) as client:
            assert [m.id async for m in client.models.list()] == [model]
            [question] = row["messages"]
            messages = [{**question, "content": [{"type": "text", "text": question["content"]}]}]
            try:
                await client.chat.completions.create(model=model, messages=messages, n=2)
            except openai.BadRequestError as error:
                assert "only 1 is supported" in error.message
            text, calls, reason = await ask(client, model, messages)
            assert (text, reason) == ("Hm.", "tool_calls")
            turn = [call.model_dump(include={"id", "type", "function"}) for call in calls]
            messages.append({"role": "assistant", "content": text, "tool_calls": turn})
            for call in calls:
                result = str(2 * json.loads(call.function.arguments)["x"])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            text, calls, reason = await ask(client, model, messages)
            assert (text, reason) == ("6 and 8", "stop") and not calls
"""
ANTHROPIC = """
    import anthropic
    TOOL = {"name": "double", "input_schema": PARAMETERS}
    async def ask(client, model, messages):
        asked = {"model": model, "messages": messages, "tools": [TOOL], "max_tokens": 1000}
        if not STREAM:
            return await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            return await stream.get_final_message()
    async def run(row, base_url, model, api_key):
        async with anthropic.AsyncAnthropic(base_url=base_url, api_key=api_key) as client:
            messages = list(row["messages"])
            try:
                await client.messages.create(model=model, messages=messages, max_tokens=-1)
            except anthropic.BadRequestError as error:
                assert error.body["type"] == "error" and "max_tokens=-1" in str(error.body)
            answer = await ask(client, model, messages)
            text, *calls = answer.content
            assert (text.text, answer.stop_reason) == ("Hm.", "tool_use")
            messages.append({"role": "assistant", "content": answer.content})
            results = []
            for call in calls:
                result = [{"type": "text", "text": str(2 * call.input["x"])}]
                results.append({"type": "tool_result", "tool_use_id": call.id, "content": result})
            messages.append({"role": "user", "content": results})
            answer = await ask(client, model, messages)
            assert answer.stop_reason == "end_turn" and answer.usage.output_tokens > 0
            assert [block.text for block in answer.content] == ["6 and 8"]
"""
CLIENTS = {"chat": CHAT, "anthropic": ANTHROPIC}


def run_env(*parts, stream=False):
    """The text of an env file."""
    return "\n".join([f"STREAM = {stream}", *map(textwrap.dedent, (HEAD, *parts))])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("client", CLIENTS)
def test_each_client_gives_the_tokens_of_an_object_with_tools(
    tmp_path, monkeypatch, client, stream
):
    """That of OpenAI finds its key in the environment: one that rl2 has set, or the user's own."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    if stream:
        monkeypatch.setenv("OPENAI_API_KEY", "the user's own")
    pytest.importorskip("anthropic" if client == "anthropic" else "openai")
    (agent,), player = play(tmp_path, SCRIPT, run_env(CLIENTS[client], stream=stream))
    (other,), _ = play(tmp_path, SCRIPT, DOUBLING_OBJECT)
    assert agent.rewards == {"reward": 5.0} == other.rewards, player.failures.last
    assert describe(agent) == describe(other)
    assert trained_text(player, agent.samples[0]) == "<|im_end|>".join([*SCRIPT, ""])


AGENTS = """
    import agents, openai
    agents.set_tracing_disabled(True)

    @agents.function_tool
    def double(x: int) -> str:
        return str(2 * x)

    async def run(row, base_url, model, api_key):
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            policy = agents.OpenAIChatCompletionsModel(model=model, openai_client=client)
            agent = agents.Agent(name="doubler", model=policy, tools=[double])
            result = agents.Runner.run_streamed(agent, row["messages"])
            async for _ in result.stream_events():
                pass
            assert result.final_output == "6 and 8", result.final_output
            more = [*result.to_input_list(), {"role": "user", "content": "sure?"}]
            again = await agents.Runner.run(agent, more)
            assert again.final_output == "yes"
"""


def test_agents_of_openai_run_unchanged(tmp_path):
    """With chat completions, streamed and not. All their requests extend one sequence."""
    pytest.importorskip("agents")
    script = [*SCRIPT, "yes"]
    (trajectory,), player = play(tmp_path, script, run_env(AGENTS), max_length=2000)
    assert trajectory.rewards == {"reward": 7.0}, player.failures.last
    (sample,) = trajectory.samples
    assert trained_text(player, sample) == "<|im_end|>".join([*script, ""])
