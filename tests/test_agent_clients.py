"""OpenAI's agents with OpenAI's client, and Anthropic's client: unchanged, each in its protocol.

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
OPENAI = """
    import agents, openai
    agents.set_tracing_disabled(True)
    @agents.function_tool
    def double(x: int) -> str:
        return str(2 * x)
    async def run(row, base_url, model):
        async with openai.AsyncOpenAI(base_url=base_url) as client:
            try:
                await client.chat.completions.create(model=model, messages=row["messages"], n=2)
            except openai.BadRequestError as error:
                assert "only 1 is supported" in error.message
            policy = agents.OpenAIChatCompletionsModel(model=model, openai_client=client)
            agent = agents.Agent(name="doubler", model=policy, tools=[double])
            text = {"type": "input_text", "text": row["messages"][0]["content"]}
            conversation = [{"role": "user", "content": [text]}]
            if STREAM:
                result = agents.Runner.run_streamed(agent, conversation)
                async for _ in result.stream_events():
                    pass
            else:
                result = await agents.Runner.run(agent, conversation)
            assert result.final_output == "6 and 8", result.final_output
            usage = result.context_wrapper.usage
            assert usage.total_tokens > usage.output_tokens > 0
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
CLIENTS = {"agents": OPENAI, "anthropic": ANTHROPIC}  # by the package


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("client", CLIENTS)
def test_each_client_gives_the_tokens_of_an_object_with_tools(
    tmp_path, monkeypatch, client, stream
):
    """That of OpenAI finds its key in the environment: one that rl2 has set, or the user's own."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    if stream:
        monkeypatch.setenv("OPENAI_API_KEY", "the user's own")
    pytest.importorskip(client)
    env = f"STREAM = {stream}{textwrap.dedent(HEAD)}{textwrap.dedent(CLIENTS[client])}"
    (agent,), player = play(tmp_path, SCRIPT, env)
    (other,), _ = play(tmp_path, SCRIPT, DOUBLING_OBJECT)
    assert agent.rewards == {"reward": 5.0} == other.rewards, player.failures.last
    assert describe(agent) == describe(other)
    assert trained_text(player, agent.samples[0]) == "<|im_end|>".join([*SCRIPT, ""])
