"""Serves the policy over HTTP: each trajectory at an address of its own, with a key of its own."""

import asyncio
import json
import os
import secrets
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any

from rl2.config.dropped import explain_dropped
from rl2.engine.base import SamplingParams
from rl2.env.contract import API_KEY
from rl2.rollout.dialects import DIALECTS, Dialect
from rl2.rollout.dialects.form import (
    MALFORMED,
    MODEL,
    ChatAnswer,
    ChatRequest,
    RequestError,
    malformed_error,
    openai_error,
    parse_body,
)
from rl2.rollout.http import MAX_BODY_BYTES, HttpServer, Request, Response

LOCAL_HOST = "127.0.0.1"
MODELS = {
    "object": "list",
    "data": [
        {
            "id": MODEL,
            "object": "model",
            "created": 0,
            "owned_by": "rl2",
            # as Anthropic has it
            "type": "model",
            "display_name": MODEL,
            "created_at": "1970-01-01T00:00:00Z",
        }
    ],
    "has_more": False,
    "first_id": MODEL,
    "last_id": MODEL,
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

    On this machine alone, the key may also be that of the environment, in which clients look for
    it: the addresses are secrets. With another host only the key of the address is good.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, host: str, max_connections: int):
        """OSError if `host` is no address of this machine."""
        self.addresses: dict[str, Address] = {}  # by their secret
        self.shared_key = None if is_exposed(host) else os.environ.get(API_KEY)
        try:
            self._server = HttpServer(loop, host, max_connections, self._answer, self._refuse)
        except OSError as error:
            reason = f"rollout.endpoint_host={host}: this machine cannot serve there: {error}"
            raise OSError(reason) from error
        self._origin = f"http://{_reachable_host(host)}:{self._server.port}"

    def open(
        self, complete: Callable[[ChatRequest], Awaitable[ChatAnswer]], params: SamplingParams
    ) -> Address:
        """Returns a new address, where `complete` answers."""
        address = Address(self._origin, complete, params)
        self.addresses[address.secret] = address
        return address

    async def close(self, address: Address) -> None:
        """The address is not served any more. No request for it may be under way."""
        del self.addresses[address.secret]
        if not self.addresses:  # before, other agents may share connections with this one
            await self._server.close_connections()

    def _refuse(self, request: Request) -> Response | None:
        """What answers a request without a right address and key, whatever its body."""
        try:
            self._find(request)
        except RequestError as error:
            return self._to_error(error, request)
        return None

    async def _answer(self, request: Request) -> Response:
        dialect = _find_dialect(request)
        try:
            address = self._find(request)
            if dialect is None:
                return _to_json(200, MODELS)
            if request.body is None:
                raise RequestError(413, f"a request may have {MAX_BODY_BYTES} bytes")
            try:
                body = parse_body(request.body)
                chat = dialect.read(body, address.params)
            except MALFORMED as error:
                raise malformed_error(error) from error
            whole = dialect.write(await address.complete(chat), body)
        except RequestError as error:
            return self._to_error(error, request)
        if body.get("stream"):
            events = map(_encode_event, dialect.stream(whole, body))
            return Response(200, "text/event-stream", b"".join(events))
        return _to_json(200, whole)

    def _to_error(self, error: RequestError, request: Request) -> Response:
        """The refusal of a request, in its dialect. The address remembers it."""
        secret, _ = _split(request.path)
        if address := self.addresses.get(secret):
            address.refusal = error.reason
        dialect = _find_dialect(request)
        write_error = dialect.write_error if dialect else openai_error
        return _to_json(error.status, write_error(error.status, error.reason))

    def _find(self, request: Request) -> Address:
        """The address that a request is for. RequestError if it may not ask, or not for that."""
        secret, path = _split(request.path)
        address = self.addresses.get(secret)
        is_served = _find_dialect(request) or (request.method, path) == ("GET", "models")
        if address is None or not is_served:
            text = f"/v1/{path} is not served, or `run` has ended"
            raise RequestError(404, explain_dropped(f"/v1/{path}") or text)
        authorization = request.headers.get("Authorization", "")
        given = request.headers.get("X-Api-Key") or authorization.removeprefix("Bearer ")
        for key in filter(None, (address.api_key, self.shared_key)):
            if secrets.compare_digest(given.encode(errors="replace"), key.encode()):
                return address
        raise RequestError(401, "wrong API key: `run` may ask for the argument api_key")


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
    try:
        address = ip_address(host)
    except ValueError:
        return host
    is_v6 = address.version == 6
    if address.is_unspecified:
        # Nothing is sent to these addresses of documentation: they choose an interface.
        family, other = (socket.AF_INET6, "2001:db8::1") if is_v6 else (socket.AF_INET, "192.0.2.1")
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((other, 9))
            except OSError:  # this machine has no network
                return socket.gethostname()
            host = probe.getsockname()[0]
    return f"[{host}]" if is_v6 else host


def _split(path: str) -> tuple[str, str]:
    """(the secret, what stands behind /v1/) in the path of a request."""
    secret, _, rest = path[1:].partition("/v1/")
    # Clients of Anthropic add "v1/" themselves, to whatever they have been given.
    return secret, rest.removeprefix("v1/")


def _find_dialect(request: Request) -> Dialect | None:
    return DIALECTS.get(_split(request.path)[1]) if request.method == "POST" else None


def _to_json(status: int, answer: dict[str, Any]) -> Response:
    return Response(status, "application/json", json.dumps(answer).encode())


def _encode_event(event: dict[str, Any] | str) -> bytes:
    """An event of a stream. In the protocols that name events, the data has the name too."""
    if isinstance(event, str):
        return f"data: {event}\n\n".encode()
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {json.dumps(event)}\n\n".encode()
