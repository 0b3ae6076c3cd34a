"""The protocols that agents speak. Each is a module that translates to and from form.py."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from rl2.agents import anthropic_messages, chat_completions
from rl2.agents.form import ChatAnswer, ChatRequest
from rl2.engine.base import SamplingParams


class Dialect(Protocol):
    """What a module of a protocol has. Its functions keep no state."""

    def read(self, body: dict[str, Any], params: SamplingParams) -> ChatRequest:
        """Returns what a request asks for. RequestError or one of MALFORMED if rl2 cannot do it."""

    def write(self, answer: ChatAnswer) -> dict[str, Any]:
        """Returns the answer as one JSON object."""

    def stream(self, response: dict[str, Any]) -> Iterator[dict[str, Any] | str]:
        """Yields the data of the events in which a stream has the object that `write` returned."""

    def write_error(self, status: int, reason: str) -> dict[str, Any]:
        """Returns the JSON object of an error with this status of HTTP."""


DIALECTS: Mapping[str, Dialect] = MappingProxyType(
    {
        "chat/completions": chat_completions,
        "messages": anthropic_messages,
    }
)
"""By the path behind /v1/."""
