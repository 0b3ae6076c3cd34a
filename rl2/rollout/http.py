"""HTTP/1.1 of one connection: whole requests in, whole answers out, one after another."""

import asyncio
from collections.abc import Awaitable, Callable

import h11
from h11 import Request

MAX_BODY_BYTES = 2**22  # of a request; no more than one byte beyond is kept

# (request line and headers, body) -> (status, JSON)
Answer = Callable[[Request, bytes], Awaitable[tuple[int, bytes]]]


class Connection(asyncio.Protocol):
    """Answers the requests of a client with `answer`, which is cancelled if the client leaves."""

    def __init__(self, answer: Answer):
        self._answer = answer
        self._http = h11.Connection(h11.SERVER)
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._task:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._http.receive_data(data)
        self._read()

    def _read(self) -> None:
        """Reads what has arrived, and starts the answer when a request is whole."""
        try:
            while True:
                event = self._http.next_event()
                if isinstance(event, Request):
                    self._request = event
                    self._body = b""
                elif isinstance(event, h11.Data):
                    self._body = (self._body + event.data)[: MAX_BODY_BYTES + 1]
                elif isinstance(event, h11.EndOfMessage):
                    self._task = asyncio.ensure_future(self._respond())
                else:  # the rest has not arrived, an answer is under way, or the client has left
                    return
        except h11.RemoteProtocolError:  # this is not HTTP, or its headers are too large
            self._transport.close()

    async def _respond(self) -> None:
        try:
            status, body = await self._answer(self._request, self._body)
            headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
            response = h11.Response(status_code=status, headers=headers)
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self._transport.write(self._http.send(event) or b"")
            self._http.start_next_cycle()  # LocalProtocolError if the connection has to close
        except (Exception, asyncio.CancelledError):
            self._transport.close()
            return
        self._task = None
        self._read()
