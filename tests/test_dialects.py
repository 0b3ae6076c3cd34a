"""The protocols of agents: how each is translated to messages of chat templates, and back."""

import json
from dataclasses import replace

import pytest

from rl2.agents import anthropic_messages, chat_completions
from rl2.agents.endpoint import DIALECTS
from rl2.agents.form import MALFORMED, ChatAnswer, to_call
from rl2.engine.base import SamplingParams

PARAMS = SamplingParams(max_new_tokens=16, stop_token_ids=(2,), stop=("END",))
USER = {"role": "user", "content": "q"}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
FUNCTION = {"name": "double", "description": "Doubles.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {
    "id": "call1",
    "type": "function",
    "function": {"name": "double", "arguments": {"x": 3}},
}
# What the request below says.
MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "ab"},
    {"role": "assistant", "content": "Hm.", "tool_calls": [CALL, {**CALL, "id": "call2"}]},
    {"role": "tool", "tool_call_id": "call1", "content": "6"},
    {"role": "tool", "tool_call_id": "call2", "content": "12"},
    {"role": "user", "content": "and now?"},
]
ANTHROPIC_CALL = {"type": "tool_use", "name": "double", "input": {"x": 3}}
ANTHROPIC = {
    "model": "rl2",
    "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Hm."},
                {**ANTHROPIC_CALL, "id": "call1"},
                {**ANTHROPIC_CALL, "id": "call2"},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call1", "content": "6"},
                {
                    "type": "tool_result",
                    "tool_use_id": "call2",
                    "content": [{"type": "text", "text": "12"}],
                },
                {"type": "text", "text": "and now?"},
            ],
        },
    ],
    "tools": [{"name": "double", "description": "Doubles.", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto"},
    "max_tokens": 5,
    "stop_sequences": ["END"],
}


def test_a_conversation_is_the_same_in_each_protocol():
    chat = chat_completions.read({"model": "rl2", "messages": MESSAGES}, PARAMS)
    assert chat.messages == MESSAGES
    request = anthropic_messages.read(ANTHROPIC, PARAMS)
    assert request.messages == MESSAGES
    assert request.tools == [TOOL]
    assert request.max_tokens == 5
    assert request.stop == ("END",)


ANSWER = ChatAnswer("ab12", "four", [], False, None, 10, 3)
CALLS = [to_call("c1", "double", {"x": 3}), to_call("c2", "say", {"text": 'é "'})]
ANSWERS = {
    "text": ANSWER,
    "empty": replace(ANSWER, text=""),
    "text and calls": replace(ANSWER, calls=CALLS),
    "calls": replace(ANSWER, text="", calls=CALLS),
    "cut": replace(ANSWER, is_cut=True),
    "stopped": replace(ANSWER, stop="END"),
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
@pytest.mark.parametrize("path", DIALECTS)
def test_an_answer_comes_back_from_the_client_as_it_was(path, answer):
    """Else its conversation would not be continued."""
    dialect = DIALECTS[path]
    response = json.loads(json.dumps(dialect.write(answer)))
    if path == "messages":
        sent_back = {"role": "assistant", "content": response["content"]}
    else:
        sent_back = response["choices"][0]["message"]
    body = {"model": "rl2", "messages": [USER, sent_back, USER], "max_tokens": 5}
    assert dialect.read(body, PARAMS).messages == [USER, answer.message(), USER]


def test_an_answer_says_how_it_ended():
    for name, reason, stop in (("cut", "max_tokens", None), ("stopped", "stop_sequence", "END")):
        message = anthropic_messages.write(ANSWERS[name])
        assert (message["stop_reason"], message["stop_sequence"]) == (reason, stop)
        assert message["usage"]["input_tokens"] == 10 and message["usage"]["output_tokens"] == 3
    completions = {name: chat_completions.write(answer) for name, answer in ANSWERS.items()}
    reasons = {name: each["choices"][0]["finish_reason"] for name, each in completions.items()}
    calls = {"text and calls": "tool_calls", "calls": "tool_calls"}
    assert reasons == dict.fromkeys(ANSWERS, "stop") | calls | {"cut": "length"}


IMAGE = {"type": "image_url", "image_url": {"url": "http://localhost"}}
REFUSED = [
    ("chat/completions", {"logprobs": True}, "logprobs=True: only False"),
    ("chat/completions", {"response_format": {"type": "json_schema"}}, "response_format="),
    ("chat/completions", {"messages": [{"role": "user", "content": [IMAGE]}]}, "'image_url'"),
    ("chat/completions", {"messages": [USER, {"role": "assistant", "content": ""}]}, "assistant's"),
    ("chat/completions", {"stop": ["END", "x"]}, "stop='x': add it to rollout.train_sampling"),
    ("chat/completions", {"max_completion_tokens": 1.5}, "max_tokens=1.5, expected a whole number"),
    ("chat/completions", {"messages": []}, "expected text or a list of messages, not empty"),
    ("chat/completions", {"messages": [USER | {"tool_calls": [{"id": 1}]}]}, "'function'"),
    ("chat/completions", {"tools": [{"function": {"name": ""}}]}, "expected text, not empty"),
    ("messages", {"stop_sequences": ["x"]}, "stop='x'"),
    ("messages", {"output_config": {"format": {"type": "json_schema"}}}, "output_config="),
    ("messages", {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "'bash_20250124'"),
    ("messages", {"messages": [USER, {"role": "assistant", "content": "a"}]}, "assistant's"),
    (
        "messages",
        {"messages": [USER, {"role": "assistant", "content": [{"type": "thinking"}]}, USER]},
        "content of type 'thinking'",
    ),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "only text"),
]


@pytest.mark.parametrize("path, change, reason", REFUSED)
def test_what_cannot_be_answered_is_refused_in_words(path, change, reason):
    body = {"model": "rl2", "max_tokens": 5, "messages": [USER]}
    assert DIALECTS[path].read(body, PARAMS).messages == [USER]
    with pytest.raises(MALFORMED) as caught:
        DIALECTS[path].read({**body, **change}, PARAMS)
    assert reason in str(caught.value)
