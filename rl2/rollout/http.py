"""HTTP by aiohttp, on the loop of an engine: whole requests in, whole answers out, with limits.

aiohttp cancels the answer for a client that leaves, closes idle connections, and stops reading from
a client that sends more than it keeps. The rest is here. Nothing is logged: paths are secrets.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

from aiohttp import web

MAX_BODY_BYTES = 2**22  # of a request
REQUEST_SECONDS = 120.0  # in which the body of a request must arrive, and an answer be taken
# From one answer to the headers of the next request. Those of agents that have ended are closed.
IDLE_SECONDS = 600.0
LOOK_SECONDS = 0.5  # between two looks at what a client does
CLOSE_SECONDS = 1.0  # that an answer under way may take when the connections are closed
SILENT = logging.Logger(__name__, logging.CRITICAL)  # aiohttp logs errors, with what was sent


@dataclass(frozen=True)
class Request:
    """A request of a client."""

    method: str
    path: str  # without a query
    headers: Mapping[str, str]  # whatever the case of a name
    body: bytes | None = None  # None before it is read, and if it has more than MAX_BODY_BYTES


@dataclass(frozen=True)
class Response:
    """What a client gets."""

    status: int
    content_type: str
    body: bytes


class HttpServer:
    """Answers requests with `answer` on a free port of `host`.

    `refuse` may answer before the body is read, so that nobody keeps memory who may not ask.
    A client that sends or reads too slowly, or sends too much while it waits, is disconnected, and
    so is one beyond `max_connections`.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        host: str,
        max_connections: int,
        answer: Callable[[Request], Awaitable[Response]],
        refuse: Callable[[Request], Response | None] = lambda _: None,
    ):
        """OSError if `host` is no address of this machine."""
        self._answer = answer
        self._refuse = refuse
        self._max_connections = max_connections
        self._server = web.Server(
            self._handle,
            loop=loop,
            handler_cancellation=True,
            keepalive_timeout=IDLE_SECONDS,
            logger=SILENT,
            access_log=None,
            auto_decompress=False,  # a small body may become a large one
        )
        serving = loop.create_server(self._connect, host, 0)
        self.port: int = loop.run_until_complete(serving).sockets[0].getsockname()[1]

    @property
    def num_connections(self) -> int:
        return len(self._server.connections)

    async def close_connections(self) -> None:
        """Closes all connections. New ones may come."""
        connections = self._server.connections
        for connection in connections:
            connection.close()
        closing = [connection.shutdown(CLOSE_SECONDS) for connection in connections]
        await asyncio.gather(*closing)

    def _connect(self) -> asyncio.BaseProtocol:
        return _Refusal() if self.num_connections >= self._max_connections else self._server()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers a request. CancelledError closes its connection without a further word."""
        transport = request.transport
        if transport is None:  # the client has left
            raise asyncio.CancelledError
        transport.set_write_buffer_limits(0)  # what is in the buffer has not been taken
        head = Request(request.method, request.path, request.headers)
        response = self._refuse(head)
        if response is None:
            try:
                async with asyncio.timeout(REQUEST_SECONDS):
                    body = await _read_body(request)
            except (TimeoutError, web.RequestPayloadError):
                raise asyncio.CancelledError from None
            answering = self._answer(replace(head, body=body))
            response = await _wait_for_answer(answering, transport)
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                return await _send(response, request, transport)
        except TimeoutError:
            transport.abort()
            raise asyncio.CancelledError from None


class _Refusal(asyncio.Protocol):
    """Closes a connection at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


async def _read_body(request: web.BaseRequest) -> bytes | None:
    body = bytearray()
    async for part in request.content.iter_any():
        body += part
        if len(body) > MAX_BODY_BYTES:
            return None
    return bytes(body)


async def _wait_for_answer(answer: Awaitable[Response], transport: asyncio.Transport) -> Response:
    """The answer, unless the client sends so much meanwhile that aiohttp stops reading."""
    work = asyncio.ensure_future(answer)
    try:
        while not work.done():
            await asyncio.wait([work], timeout=LOOK_SECONDS)
            if not transport.is_reading():
                transport.abort()
                raise asyncio.CancelledError
        return work.result()
    finally:
        work.cancel()


async def _send(
    response: Response, request: web.BaseRequest, transport: asyncio.Transport
) -> web.StreamResponse:
    """Sends an answer, until the client has taken it."""
    headers = {"Content-Type": response.content_type}
    stream = web.StreamResponse(status=response.status, headers=headers)
    stream.content_length = len(response.body)
    await stream.prepare(request)
    await stream.write(response.body)
    while transport.get_write_buffer_size():
        await asyncio.sleep(LOOK_SECONDS)
    return stream
