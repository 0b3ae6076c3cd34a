"""Chat completions of OpenAI, and of all that imitate it."""

import json
from collections.abc import Iterator

from rl2.agents.form import (
    MODEL,
    ChatAnswer,
    ChatRequest,
    JsonObject,
    check_fields,
    read_stop,
    to_call,
)
from rl2.data.messages import check_messages, read_message
from rl2.engine.base import SamplingParams

LIMITS = ("max_tokens", "max_completion_tokens")
USED = ("model", "messages", "tools", "stop", "stream", "stream_options") + LIMITS
MESSAGE_FIELDS = ("role", "name", "tool_call_id", "content", "tool_calls")


def read(body: JsonObject, params: SamplingParams) -> ChatRequest:
    """Returns what a request asks for."""
    messages = [read_message(message) for message in body["messages"]]
    check_messages(messages)
    check_fields(body, USED, params)
    limits = [body[name] for name in LIMITS if body.get(name)]
    return ChatRequest(
        messages=[_read_message(message) for message in messages],
        tools=body.get("tools") or None,
        max_tokens=min(limits, default=None),
        stop=read_stop(body.get("stop"), params),
    )


def _read_message(message: JsonObject) -> JsonObject:
    plain = {name: message[name] for name in MESSAGE_FIELDS if message.get(name)}
    plain.setdefault("content", "")
    if calls := plain.get("tool_calls"):
        plain["tool_calls"] = [
            to_call(call.get("id"), call["function"]["name"], call["function"]["arguments"])
            for call in calls
        ]
    return plain


def write(answer: ChatAnswer) -> JsonObject:
    """Returns the answer as an object of the type `chat.completion`."""
    message: JsonObject = {"role": "assistant", "content": answer.text}
    reason = "length" if answer.is_cut else "stop"
    if answer.calls:
        reason = "tool_calls"
        message["tool_calls"] = [
            to_call(call["id"], call["function"]["name"], json.dumps(call["function"]["arguments"]))
            for call in answer.calls
        ]
    return {
        "id": f"chatcmpl-{answer.id}",
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [{"index": 0, "message": message, "finish_reason": reason}],
        "usage": {
            "prompt_tokens": answer.num_prompt,
            "completion_tokens": answer.num_sampled,
            "total_tokens": answer.num_prompt + answer.num_sampled,
        },
    }


def stream(response: JsonObject) -> Iterator[JsonObject | str]:
    """Yields two chunks: the whole message, then how it ended with the usage."""
    head = {name: response[name] for name in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk"
    [choice] = response["choices"]
    message = choice["message"]
    calls = [call | {"index": i} for i, call in enumerate(message.get("tool_calls", []))]
    delta = message | {"tool_calls": calls} if calls else message
    yield head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    end = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    yield head | {"choices": [end], "usage": response["usage"]}
    yield "[DONE]"
