"""Messages of Anthropic: contents are lists of blocks, also calls of tools and their results."""

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
from rl2.data.messages import join_parts
from rl2.engine.base import SamplingParams

USED = (
    "model",
    "messages",
    "system",
    "tools",
    "stop_sequences",
    "stream",
    "max_tokens",
    "cache_control",
)


def read(body: JsonObject, params: SamplingParams) -> ChatRequest:
    """Returns what a request asks for."""
    choice = (body.get("tool_choice") or {}).get("type")
    check_fields(body | {"tool_choice": choice}, USED, params)
    messages = []
    if system := _read_text(body.get("system")):
        messages.append({"role": "system", "content": system})
    for message in body["messages"]:
        messages += _read_message(message)
    return ChatRequest(
        messages=messages,
        tools=[_read_tool(tool) for tool in body.get("tools") or []] or None,
        max_tokens=body["max_tokens"],
        stop=read_stop(body.get("stop_sequences"), params),
    )


def _read_message(message: JsonObject) -> Iterator[JsonObject]:
    """Yields what a message is in chat templates, where each result of a tool is a message."""
    role, content = message["role"], message["content"]
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    texts: list[JsonObject] = []
    calls: list[JsonObject] = []
    for block in content:
        if block["type"] == "tool_result":
            if texts:
                yield {"role": role, "content": _read_text(texts)}
                texts = []
            result = _read_text(block.get("content"))
            yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": result}
        elif block["type"] == "tool_use":
            calls.append(to_call(block["id"], block["name"], block["input"]))
        else:
            texts.append(block)
    if calls:
        yield {"role": role, "content": _read_text(texts), "tool_calls": calls}
    elif texts:
        yield {"role": role, "content": _read_text(texts)}


def _read_text(content: str | list | None) -> str:
    """The text of a content: a text, or a list of blocks of text."""
    return join_parts(content) if isinstance(content, list) else content or ""


def _read_tool(tool: JsonObject) -> JsonObject:
    if tool.get("type") not in (None, "custom"):
        raise ValueError(f"a tool of type {tool['type']!r} is not supported, only 'custom'")
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def write(answer: ChatAnswer) -> JsonObject:
    """Returns the answer as an object of the type `message`: a block of text, then the calls."""
    content: list[JsonObject] = []
    if answer.text.strip() or not answer.calls:
        content.append({"type": "text", "text": answer.text})
    for call in answer.calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        content.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
    reason = "end_turn"
    if answer.calls:
        reason = "tool_use"
    elif answer.is_cut:
        reason = "max_tokens"
    elif answer.stop:
        reason = "stop_sequence"
    return {
        "id": f"msg_{answer.id}",
        "type": "message",
        "role": "assistant",
        "model": MODEL,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": answer.stop if reason == "stop_sequence" else None,
        "usage": {
            "input_tokens": answer.num_prompt,
            "output_tokens": answer.num_sampled,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }


def stream(response: JsonObject) -> Iterator[JsonObject | str]:
    """Yields the events of the blocks, between those of the beginning and the end."""
    usage = response["usage"]
    begun = response | {"content": [], "stop_reason": None, "stop_sequence": None}
    yield {"type": "message_start", "message": begun | {"usage": usage | {"output_tokens": 0}}}
    for index, block in enumerate(response["content"]):
        if block["type"] == "text":
            empty = block | {"text": ""}
            delta = {"type": "text_delta", "text": block["text"]}
        else:
            empty = block | {"input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    end = {name: response[name] for name in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": end, "usage": usage}
    yield {"type": "message_stop"}
