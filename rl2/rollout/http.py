"""HTTP/1.1 of one connection: whole requests in, whole answers out, one after another."""

import asyncio
from collections.abc import Awaitable, Callable

import h11
from h11 import Request

MAX_BODY_BYTES = 2**22  # of a request; no more than one byte beyond is kept
# That a client sends while it waits for an answer. Reading continues, to see whether it leaves.
MAX_EARLY_BYTES = 2**16
REQUEST_SECONDS = 120.0  # in which a request that has begun must be whole
IDLE_SECONDS = 600.0  # between requests; the connections of agents that have ended are closed

# (request line and headers, body) -> (status, JSON)
Answer = Callable[[Request, bytes], Awaitable[tuple[int, bytes]]]


class Connection(asyncio.Protocol):
    """Answers the requests of a client with `answer`, which is cancelled if the client leaves.

    A client that sends too slowly, or too much while it waits, is disconnected.
    """

    def __init__(self, answer: Answer):
        self._answer = answer
        self._http = h11.Connection(h11.SERVER)
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_arriving = False  # a request that is not whole yet
        self._num_early = 0  # bytes that came during the answer
        self._body = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._set_timer(IDLE_SECONDS)

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_timer()
        if self._task:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        if self._task:
            self._num_early += len(data)
            if self._num_early > MAX_EARLY_BYTES:
                self._transport.abort()
                return
        elif not self._is_arriving:
            self._is_arriving = True
            self._set_timer(REQUEST_SECONDS)  # for all of it, so that single bytes do not help
        self._http.receive_data(data)
        self._read()

    def _read(self) -> None:
        """Reads what has arrived, and starts the answer when a request is whole."""
        try:
            while True:
                event = self._http.next_event()
                if isinstance(event, Request):
                    self._request = event
                    self._body.clear()
                elif isinstance(event, h11.Data):
                    self._body += event.data[: MAX_BODY_BYTES + 1 - len(self._body)]
                elif isinstance(event, h11.EndOfMessage):
                    self._stop_timer()
                    self._is_arriving = False
                    self._task = asyncio.ensure_future(self._respond())
                else:  # the rest has not arrived, an answer is under way, or the client has left
                    return
        except h11.RemoteProtocolError:  # this is not HTTP, or its headers are too large
            self._close()

    async def _respond(self) -> None:
        try:
            status, body = await self._answer(self._request, bytes(self._body))
            headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
            response = h11.Response(status_code=status, headers=headers)
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self._transport.write(self._http.send(event) or b"")
            self._http.start_next_cycle()  # LocalProtocolError if the connection has to close
        except (Exception, asyncio.CancelledError):
            self._close()
            return
        self._task = None
        self._is_arriving = self._num_early > 0
        self._num_early = 0
        self._set_timer(REQUEST_SECONDS if self._is_arriving else IDLE_SECONDS)
        self._read()

    def _close(self) -> None:
        """Closes the connection once the client has read what was sent."""
        self._transport.close()
        self._set_timer(REQUEST_SECONDS)

    def _set_timer(self, seconds: float) -> None:
        """Disconnects the client after some seconds, unless another timer is set before."""
        self._stop_timer()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._transport.abort)

    def _stop_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
