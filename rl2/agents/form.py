"""The form between the dialects and the rollout: what an agent asks for, and what it gets.

Messages and tools are as chat templates take them: the content of a message is one text, tools are
those of chat completions, and the arguments of calls are objects.
"""

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from rl2.data.messages import check_ends_before_reply, check_messages, check_text
from rl2.engine.base import SamplingParams
from rl2.env.contract import EnvError

JsonObject = dict[str, Any]  # as protocols and chat templates have it
MODEL = "rl2"  # the name of the policy
# Of a request whose fields have other types than the protocol says, and of the chat template.
MALFORMED = (EnvError, ValueError, TypeError, LookupError, AttributeError, RecursionError)
# Fields that would give the answer another form, and the one value that they may have.
FIXED: dict[str, object] = {
    "n": 1,
    "logprobs": False,
    "response_format": {"type": "text"},
    "container": None,
    "mcp_servers": [],
    "output_format": None,
    "output_config": None,
}


class RequestError(Exception):
    """Refuses a request, with a status of HTTP and the reason in words."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status = status
        self.reason = reason


@dataclass(frozen=True)
class ChatRequest:
    """A request for the next message of a conversation."""

    messages: list[JsonObject]
    tools: list[JsonObject] | None = None
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
class ChatAnswer:
    """A message of the policy."""

    id: str  # random
    text: str  # without what stopped it and without the calls
    calls: list[JsonObject]  # of tools, as messages of the assistant have them
    is_cut: bool  # by a limit of tokens
    stop: str | None  # which of the request's texts ended it
    num_prompt: int  # tokens
    num_sampled: int  # tokens

    def message(self) -> JsonObject:
        """Returns it as a message of the conversation."""
        message: JsonObject = {"role": "assistant", "content": self.text}
        if self.calls:
            message["tool_calls"] = self.calls
        return message


def check_fields(body: JsonObject, used: Collection[str], params: SamplingParams) -> None:
    """Refuses a model that there is not, and fields that ask for an answer of another form.

    `used` are the fields that have an effect. Any other field is ignored with a warning, unless it
    says what holds anyway. RequestError or ValueError.
    """
    if body.get("model") != MODEL:
        raise RequestError(404, f"model={body.get('model')!r}: there is {MODEL!r} only")
    for name in body.keys() - set(used):
        value = body[name]
        if value in (None, "auto", FIXED.get(name, getattr(params, name, None))):
            continue
        if name in FIXED:
            raise ValueError(f"{name}={value!r}: only {FIXED[name]!r} is supported")
        text = f"{name} of agents is ignored: the run's own settings hold"
        warnings.warn(text, stacklevel=1)  # Python shows a text once


def read_stop(stop: str | Sequence[str] | None, params: SamplingParams) -> tuple[str, ...]:
    """Returns the texts that end an answer. ValueError for one that does not end turns of the run.

    The engine stops at the same texts in all turns.
    """
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if unknown := set(stops) - set(params.stop):
        raise ValueError(
            f"stop={min(unknown)!r}: add it to rollout.train_sampling_params.stop and to "
            "rollout.test_sampling_params.stop, which hold for all turns"
        )
    return stops


def to_call(call_id: str | None, name: str, arguments: object) -> JsonObject:
    """Returns a call as messages of the assistant have it."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"id": call_id} | call if call_id else call


def write_error(reason: str) -> JsonObject:
    """Returns an error as the protocols have it. Clients go by its status of HTTP."""
    details = {"type": "invalid_request_error", "message": reason, "param": None, "code": None}
    return {"type": "error", "error": details}


def malformed_error(error: Exception) -> RequestError:
    """Returns the refusal of a request for one of the errors of MALFORMED."""
    return RequestError(400, f"the request cannot be answered: {error}")
