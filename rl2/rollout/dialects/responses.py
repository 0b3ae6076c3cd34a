"""Responses of OpenAI, the protocol of its own agents. Nothing is stored between requests."""

import json
from collections.abc import Iterator
from itertools import count
from typing import Any

from rl2.engine.base import SamplingParams
from rl2.rollout.dialects.form import (
    MODEL,
    ChatAnswer,
    ChatRequest,
    check_fields,
    join_turns,
    openai_error,
    read_text,
    to_call,
)

USED = ("model", "input", "instructions", "tools", "text", "stream", "max_output_tokens")
FIXED = {
    "background": False,
    "conversation": None,
    "previous_response_id": None,
    "prompt": None,
    "top_logprobs": 0,
    "truncation": "disabled",
}
TEXT = ("input_text", "output_text", "text")  # types of parts of a content

write_error = openai_error


def read(body: dict[str, Any], params: SamplingParams) -> ChatRequest:
    """Returns what a request asks for."""
    check_fields(body, USED, FIXED, params)
    kind = ((body.get("text") or {}).get("format") or {}).get("type", "text")
    if kind != "text":
        raise ValueError(f"text.format of type {kind!r}: only 'text' is supported")
    messages = _read_items(body.get("input"))
    if body.get("instructions"):
        messages.insert(0, {"role": "system", "content": body["instructions"]})
    return ChatRequest(
        messages=messages,
        tools=[_read_tool(tool) for tool in body.get("tools") or []] or None,
        max_tokens=body.get("max_output_tokens"),
    )


def _read_items(items: Any) -> list[dict[str, Any]]:
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    return join_turns(map(_read_item, items))


def _read_item(item: dict[str, Any]) -> dict[str, Any]:
    kind = item.get("type") or "message"
    if kind == "message":
        return {"role": item["role"], "content": read_text(item["content"], TEXT)}
    if kind == "function_call":
        call = to_call(item["call_id"], item["name"], json.loads(item["arguments"]))
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if kind == "function_call_output":
        content = read_text(item["output"], TEXT)
        return {"role": "tool", "tool_call_id": item["call_id"], "content": content}
    raise ValueError(f"an input item of type {kind!r} is not supported")


def _read_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool["type"] != "function":
        raise ValueError(f"a tool of type {tool['type']!r} is not supported, only 'function'")
    names = ("name", "description", "parameters")
    function = {name: tool[name] for name in names if tool.get(name) is not None}
    return {"type": "function", "function": function}


def write(answer: ChatAnswer, body: dict[str, Any]) -> dict[str, Any]:
    """Returns the answer as an object of the type `response`: a message, then the calls."""
    output: list[dict[str, Any]] = []
    if answer.text.strip() or not answer.calls:
        part = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        output.append(
            {
                "type": "message",
                "id": f"msg_{answer.id}",
                "role": "assistant",
                "status": "incomplete" if answer.is_cut else "completed",
                "content": [part],
            }
        )
    for call in answer.calls:
        output.append(
            {
                "type": "function_call",
                "id": f"fc_{call.id}",
                "call_id": call.id,
                "name": call.name,
                "arguments": json.dumps(call.arguments),
                "status": "completed",
            }
        )
    return {
        "id": f"resp_{answer.id}",
        "object": "response",
        "created_at": 0,
        "model": MODEL,
        "status": "incomplete" if answer.is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if answer.is_cut else None,
        "error": None,
        "output": output,
        "usage": {
            "input_tokens": answer.num_prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": answer.num_sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.num_prompt + answer.num_sampled,
        },
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": body.get("tools") or [],
        "truncation": "disabled",
    }


def stream(response: dict[str, Any], body: dict[str, Any]) -> Iterator[dict[str, Any] | str]:
    """Yields the events of the items, between those of the beginning and the end."""
    numbers = count()
    begun = {**response, "status": "in_progress", "incomplete_details": None}
    begun |= {"output": [], "usage": None}
    for name in ("created", "in_progress"):
        yield {"type": f"response.{name}", "response": begun, "sequence_number": next(numbers)}
    for index, item in enumerate(response["output"]):
        events = _call_events(item) if item["type"] == "function_call" else _text_events(item)
        for event in events:
            yield {**event, "output_index": index, "sequence_number": next(numbers)}
    end = f"response.{response['status']}"
    yield {"type": end, "response": response, "sequence_number": next(numbers)}


def _text_events(item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    [part] = item["content"]
    text = {"text": part["text"], "logprobs": []}
    place = {"item_id": item["id"], "content_index": 0}
    begun = {**item, "status": "in_progress", "content": []}
    yield {"type": "response.output_item.added", "item": begun}
    yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
    if part["text"]:
        delta = {"delta": part["text"], "logprobs": []}
        yield {"type": "response.output_text.delta", **place, **delta}
    yield {"type": "response.output_text.done", **place, **text}
    yield {"type": "response.content_part.done", **place, "part": part}
    yield {"type": "response.output_item.done", "item": item}


def _call_events(item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    place = {"item_id": item["id"]}
    begun = {**item, "status": "in_progress", "arguments": ""}
    kind = "response.function_call_arguments"
    yield {"type": "response.output_item.added", "item": begun}
    yield {"type": f"{kind}.delta", **place, "delta": item["arguments"]}
    whole = {"name": item["name"], "arguments": item["arguments"]}
    yield {"type": f"{kind}.done", **place, **whole}
    yield {"type": "response.output_item.done", "item": item}
