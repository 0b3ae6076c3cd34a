"""The form between the dialects and the rollout: what an agent asks for, and what it gets.

Messages and tools are as chat templates take them: the content of a message is one text, tools are
those of chat completions, and the arguments of calls are objects.
"""

import json
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rl2.data.messages import check_ends_before_reply, check_messages, check_text
from rl2.engine.base import SamplingParams
from rl2.env.contract import EnvError
from rl2.env.results import MAX_NESTING, check_nesting

MODEL = "rl2"  # the name of the policy
# Of a request whose fields have other types than the protocol says, and of the chat template.
MALFORMED = (EnvError, ValueError, TypeError, LookupError, AttributeError, RecursionError)
# Fields that change nothing in what is sampled, and need no warning.
WITHOUT_EFFECT = frozenset(
    {
        "include",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "user",
    }
)


class RequestError(Exception):
    """Refuses a request, with a status of HTTP and the reason in words."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status = status
        self.reason = reason


@dataclass(frozen=True)
class ChatRequest:
    """A request for the next message of a conversation."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    max_tokens: int | None = None  # the run's own limit holds too
    stop: tuple[str, ...] = ()  # texts that end the answer and are hidden from the agent

    def __post_init__(self) -> None:
        """ValueError for what no chat template can show."""
        check_messages(self.messages)
        check_ends_before_reply(self.messages)
        for tool in self.tools or []:
            check_text(tool["function"]["name"], "name of a tool")
        most = self.max_tokens
        if most is not None and (type(most) is not int or most < 1):
            raise ValueError(f"max_tokens={most}, expected a whole number above 0")


@dataclass(frozen=True)
class Call:
    """A call of a tool that the agent is asked to make."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class ChatAnswer:
    """A message of the policy."""

    id: str  # random
    text: str  # without what stopped it and without the calls
    calls: tuple[Call, ...]
    is_cut: bool  # by a limit of tokens
    stop: str | None  # which of the request's texts ended it
    num_prompt: int  # tokens
    num_sampled: int  # tokens

    def message(self) -> dict[str, Any]:
        """Returns it as a message of the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.calls:
            calls = [to_call(call.id, call.name, call.arguments) for call in self.calls]
            message["tool_calls"] = calls
        return message


def parse_body(body: bytes) -> dict[str, Any]:
    """Returns the JSON object of a request. One of MALFORMED if it is none."""
    request = json.loads(body)
    json.dumps(request, ensure_ascii=False).encode()  # lone surrogates are no text
    if not isinstance(request, dict):
        raise ValueError("expected a JSON object")
    check_nesting(request, MAX_NESTING)
    return request


def check_fields(
    body: dict[str, Any],
    used: Collection[str],
    fixed: Mapping[str, Any],
    params: SamplingParams,
) -> None:
    """Refuses a model that there is not, and fields that cannot have another value.

    `used` are the fields that have an effect, `fixed` those of one possible value. Any other field
    is ignored with a warning, unless it says what holds anyway. RequestError or ValueError.
    """
    if body.get("model") != MODEL:
        raise RequestError(404, f"model={body.get('model')!r}: there is {MODEL!r} only")
    for name in body.keys() - {*used} - WITHOUT_EFFECT:
        value = body[name]
        if value in (None, "auto", fixed.get(name, getattr(params, name, None))):
            continue
        if name in fixed:
            raise ValueError(f"{name}={value!r}: only {fixed[name]!r} is supported")
        text = f"{name} of agents is ignored: the run's own sampling parameters hold"
        warnings.warn(text, stacklevel=1)  # Python shows a text once


def read_stop(stop: Any, params: SamplingParams) -> tuple[str, ...]:
    """Returns the texts that end an answer. ValueError for one that does not end turns of the run.

    The engine stops at the same texts in all turns.
    """
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if unknown := {*stops} - {*params.stop}:
        raise ValueError(
            f"stop={min(unknown)!r}: add it to rollout.train_sampling_params.stop and to "
            "rollout.test_sampling_params.stop, which hold for all turns"
        )
    return stops


def read_text(content: Any) -> str:
    """Returns the text of a content: a text, or a list of parts of the type `text`."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.get("type", "text") != "text":
            raise ValueError(f"content of type {part['type']!r} is not supported, only text")
    return "".join(part["text"] for part in content)


def join_turns(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages, with those of the assistant in a row as one.

    Protocols have a message for each text and each call of a turn, or allow it.
    """
    joined: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "assistant" or not joined or joined[-1]["role"] != "assistant":
            joined.append(message)
            continue
        turn = joined[-1]
        turn["content"] += message["content"]
        if calls := message.get("tool_calls"):
            turn.setdefault("tool_calls", []).extend(calls)
    return joined


def to_call(call_id: str | None, name: str, arguments: Any) -> dict[str, Any]:
    """Returns a call as messages of the assistant have it."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": call_id, **call} if call_id else call


def malformed_error(error: Exception) -> RequestError:
    """Returns the refusal of a request for one of the errors of MALFORMED."""
    return RequestError(400, f"the request cannot be answered: {error}")


def openai_error(status: int, reason: str) -> dict[str, Any]:
    """Returns an error as both protocols of OpenAI have it."""
    details = {"message": reason, "type": "invalid_request_error", "param": None, "code": None}
    return {"error": details}
