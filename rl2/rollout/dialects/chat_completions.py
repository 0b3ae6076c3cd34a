"""Chat completions of OpenAI, and of all that imitate it."""

import json
from collections.abc import Iterator
from typing import Any

from rl2.data.messages import check_messages, read_message
from rl2.engine.base import SamplingParams
from rl2.rollout.dialects.form import (
    MODEL,
    ChatAnswer,
    ChatRequest,
    check_fields,
    openai_error,
    read_stop,
    to_call,
)

LIMITS = ("max_tokens", "max_completion_tokens")
USED = ("model", "messages", "tools", "stop", "stream", *LIMITS)
FIXED = {"n": 1, "logprobs": False, "response_format": {"type": "text"}}

write_error = openai_error


def read(body: dict[str, Any], params: SamplingParams) -> ChatRequest:
    """Returns what a request asks for."""
    messages = [read_message(message) for message in body["messages"]]
    check_messages(messages)
    check_fields(body, USED, FIXED, params)
    limits = [body[name] for name in LIMITS if body.get(name)]
    return ChatRequest(
        messages=[_read_message(message) for message in messages],
        tools=body.get("tools") or None,
        max_tokens=min(limits, default=None),
        stop=read_stop(body.get("stop"), params),
    )


def _read_message(message: dict[str, Any]) -> dict[str, Any]:
    names = ("role", "name", "tool_call_id")
    plain = {name: message[name] for name in names if message.get(name)}
    plain["content"] = message.get("content", "")
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [_read_call(call) for call in calls]
    return plain


def _read_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return to_call(call.get("id"), function["name"], function["arguments"])


def write(answer: ChatAnswer, body: dict[str, Any]) -> dict[str, Any]:
    """Returns the answer as an object of the type `chat.completion`."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    reason = "length" if answer.is_cut else "stop"
    if answer.calls:
        reason = "tool_calls"
        message["tool_calls"] = [
            to_call(call.id, call.name, json.dumps(call.arguments)) for call in answer.calls
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


def stream(response: dict[str, Any], body: dict[str, Any]) -> Iterator[dict[str, Any] | str]:
    """Yields chunks: the role, the text, each call in two parts, the end, and the usage if asked.

    Only the last chunk has the usage, and no choice.
    """
    options = body.get("stream_options") or {}
    asks_usage = bool(options.get("include_usage"))
    head = {name: response[name] for name in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk"
    if asks_usage:
        head["usage"] = None
    [choice] = response["choices"]
    for delta in _deltas(choice["message"]):
        yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
    end = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    yield {**head, "choices": [end]}
    if asks_usage:
        yield {**head, "choices": [], "usage": response["usage"]}
    yield "[DONE]"


def _deltas(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": ""}
    if message["content"]:
        yield {"content": message["content"]}
    for index, call in enumerate(message.get("tool_calls", [])):
        function = call["function"]
        start = {**call, "index": index, "function": {**function, "arguments": ""}}
        yield {"tool_calls": [start]}
        arguments = {"arguments": function["arguments"]}
        yield {"tool_calls": [{"index": index, "function": arguments}]}
