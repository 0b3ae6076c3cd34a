"""Serves the policy over HTTP: each trajectory at an address of its own, with a key of its own.

The protocols that agents speak are in DIALECTS: modules that translate to and from form.py.
"""

import asyncio
import json
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Protocol

from aiohttp import web

from rl2.agents import anthropic_messages, chat_completions
from rl2.agents.form import (
    MALFORMED,
    MODEL,
    ChatAnswer,
    ChatRequest,
    JsonObject,
    RequestError,
    malformed_error,
    write_error,
)
from rl2.config.dropped import explain_dropped
from rl2.engine.base import SamplingParams
from rl2.env.contract import API_KEY
from rl2.env.results import check_nesting

LOCAL_HOST = "127.0.0.1"
MAX_BODY_BYTES = 2**22  # of a request
IDLE_SECONDS = 600.0  # from one answer to the next request, on a connection that is kept
SILENT = logging.Logger(__name__, logging.CRITICAL)  # aiohttp logs what was sent, and paths
MODELS = {
    "object": "list",
    "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "rl2"}],
}


class Dialect(Protocol):
    """What a module of a protocol has. Its functions keep no state."""

    def read(self, body: JsonObject, params: SamplingParams) -> ChatRequest:
        """Returns what a request asks for. RequestError or one of MALFORMED if rl2 cannot do it."""

    def write(self, answer: ChatAnswer) -> JsonObject:
        """Returns the answer as one JSON object."""

    def stream(self, response: JsonObject) -> Iterator[JsonObject | str]:
        """Yields the data of the events in which a stream has the object that `write` returned."""


# By the path behind /v1/.
DIALECTS: dict[str, Dialect] = {
    "chat/completions": chat_completions,
    "messages": anthropic_messages,
}


@dataclass(eq=False)
class Address:
    """Where one trajectory finds the model."""

    origin: str  # the beginning of its URL
    complete: Callable[[ChatRequest], Awaitable[ChatAnswer]]  # RequestError if it refuses
    params: SamplingParams  # of the run
    secret: str = field(default_factory=secrets.token_urlsafe)  # in its URL
    api_key: str = field(default_factory=secrets.token_urlsafe)
    refusal: str = ""  # why a request for it was refused, the last one that was

    @property
    def base_url(self) -> str:
        return f"{self.origin}/{self.secret}/v1"

    def hide(self, text: str) -> str:
        """Returns a text without the secrets, for logs."""
        return text.replace(self.secret, "SECRET").replace(self.api_key, "API_KEY")


class Endpoint:
    """A server on a free port of `host`, which is an address of this machine or one like 0.0.0.0.

    It runs on `loop`. The request of a client that leaves is cancelled. On this machine alone, the
    key may also be that of the environment, in which clients look for it: the addresses are
    secrets. With another host only the key of the address is good.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, host: str):
        """OSError if `host` is no address of this machine."""
        self.addresses: dict[str, Address] = {}  # by their secret
        self.shared_key = None if is_exposed(host) else os.environ.get(API_KEY)
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            keepalive_timeout=IDLE_SECONDS,
            logger=SILENT,
            access_log=None,
        )
        try:
            loop.run_until_complete(self._start(host))
            self._origin = f"http://{_reachable_host(host)}:{self._runner.addresses[0][1]}"
        except OSError as error:
            reason = f"rollout.endpoint_host={host}: this machine cannot serve there: {error}"
            raise OSError(reason) from error

    async def _start(self, host: str) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port=0).start()

    def open(
        self, complete: Callable[[ChatRequest], Awaitable[ChatAnswer]], params: SamplingParams
    ) -> Address:
        """Returns a new address, where `complete` answers."""
        address = Address(self._origin, complete, params)
        self.addresses[address.secret] = address
        return address

    def close(self, address: Address) -> None:
        """The address is not served any more. No request for it may be under way."""
        del self.addresses[address.secret]
        server = self._runner.server
        if server and not self.addresses:  # before, other agents may share connections with it
            server.pre_shutdown()  # closes the connections that are kept; new ones may come

    async def _answer(self, request: web.Request) -> web.Response:
        # Clients of Anthropic add "v1/" themselves, to whatever they have been given.
        secret, _, rest = request.path[1:].partition("/v1/")
        path = rest.removeprefix("v1/")
        address = self.addresses.get(secret)
        dialect = DIALECTS.get(path) if request.method == "POST" else None
        try:
            is_served = dialect or (request.method, path) == ("GET", "models")
            if address is None or not is_served:
                text = f"/v1/{path} is not served, or `run` has ended"
                raise RequestError(404, explain_dropped(f"/v1/{path}") or text)
            self._check_key(address, request)  # before the body is read
            if dialect is None:
                return web.json_response(MODELS)
            chat, is_stream = await _read_chat(request, dialect, address.params)
            whole = dialect.write(await address.complete(chat))
        except RequestError as error:
            if address:
                address.refusal = error.reason
            return web.json_response(write_error(error.reason), status=error.status)
        if not is_stream:
            return web.json_response(whole)
        events = "".join(map(_encode_event, dialect.stream(whole)))
        return web.Response(text=events, content_type="text/event-stream")

    def _check_key(self, address: Address, request: web.Request) -> None:
        """RequestError unless the request has a key that is good for the address."""
        authorization = request.headers.get("Authorization", "")
        given = request.headers.get("X-Api-Key") or authorization.removeprefix("Bearer ")
        for key in filter(None, (address.api_key, self.shared_key)):
            if secrets.compare_digest(given.encode(errors="replace"), key.encode()):
                return
        raise RequestError(401, "wrong API key: `run` may ask for the argument api_key")


async def _read_chat(
    request: web.Request, dialect: Dialect, params: SamplingParams
) -> tuple[ChatRequest, bool]:
    """(what a request asks for, whether as a stream). RequestError if rl2 cannot do it."""
    try:
        body = json.loads(await request.read())
        json.dumps(body, ensure_ascii=False).encode()  # lone surrogates are no text
        if not isinstance(body, dict):
            raise ValueError("expected a JSON object")
        check_nesting(body)
        return dialect.read(body, params), bool(body.get("stream"))
    except web.HTTPRequestEntityTooLarge as error:
        raise RequestError(413, f"a request may have {MAX_BODY_BYTES} bytes") from error
    except MALFORMED as error:
        raise malformed_error(error) from error


def is_exposed(host: str) -> bool:
    """Returns whether a server on `host` can be reached from other machines or containers."""
    if host == "localhost":
        return False
    try:
        return not ip_address(host).is_loopback
    except ValueError:  # a name
        return True


def _reachable_host(host: str) -> str:
    """The host of URLs. That of all interfaces becomes the address that others see."""
    if host in ("0.0.0.0", "::"):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Nothing is sent to this address of documentation: it chooses an interface.
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
    return f"[{host}]" if ":" in host else host


def _encode_event(event: JsonObject | str) -> str:
    """An event of a stream. In the protocols that name events, the data has the name too."""
    if isinstance(event, str):
        return f"data: {event}\n\n"
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {json.dumps(event)}\n\n"
