"""Limits of a connection: timeouts for slow clients, a maximum number of connections, and a short log."""

import asyncio
import errno
import logging
import time
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from sima_attn.serve.limits import Limits

OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
LOG_INTERVAL = 60.0
log = logging.getLogger("sima_attn.serve")


class Deadline:
    """Calls `expire` after `seconds`, unless stopped before."""

    def __init__(self, seconds: float, expire: Callable[[], object]) -> None:
        self.seconds, self.expire = seconds, expire
        self.timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start it, unless it is running."""
        if self.timer is None:
            self.timer = asyncio.get_running_loop().call_later(self.seconds, self.expire)

    def stop(self) -> None:
        """Stop it, if it is running."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class BoundedConnection(H11Protocol):
    """uvicorn's HTTP connection with additional limits; the application limits the time of an upload.

    - The headers of a request must arrive within `limits.header_seconds`.
    - A client that does not read its answer for `limits.send_seconds` is disconnected.
    - At most `limits.connections` are open. A new one replaces the oldest that waits for its client, so that clients
      that send nothing, or very slowly, do not block others.
    """

    connections: set[Any]  # all connections of the server

    def __init__(self, limits: Limits, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.limits = limits
        self.opened = time.monotonic()
        self.header_deadline = Deadline(limits.header_seconds, self.disconnect)
        self.send_deadline = Deadline(limits.send_seconds, self.disconnect)

    @property
    def in_request(self) -> bool:
        """Whether a request has been received (its headers at least) and not yet answered."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def awaits_client(self) -> bool:
        """Whether the server waits for the client: for headers, for a body, or for it to read the answer."""
        return not self.in_request or self.cycle.more_body or self.flow.write_paused

    def disconnect(self) -> None:
        """Close at once, without waiting for the client to read the rest."""
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline of the headers; close the oldest connection if there are too many."""
        super().connection_made(transport)
        self.header_deadline.start()
        if len(self.connections) > self.limits.connections:
            oldest = min((one for one in self.connections if one.awaits_client), key=lambda one: one.opened)
            self.connections.discard(oldest)  # now: more may be accepted before its `connection_lost`
            oldest.disconnect()

    def data_received(self, data: bytes) -> None:
        """Handle received bytes; the deadline runs until the headers are complete."""
        super().data_received(data)
        if self.in_request:
            self.header_deadline.stop()
        else:
            self.header_deadline.start()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection."""
        self.disconnect()

    def pause_writing(self) -> None:
        """Start the deadline of a client that does not read."""
        super().pause_writing()
        self.send_deadline.start()

    def resume_writing(self) -> None:
        """Stop the deadline: the client reads again."""
        super().resume_writing()
        self.send_deadline.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the deadlines."""
        self.header_deadline.stop()
        self.send_deadline.stop()
        super().connection_lost(exc)


class LoopErrors:
    """Logs errors of the event loop; connections that cannot be accepted are logged once per minute.

    asyncio retries them each second, and would log a stack trace for each waiting connection.
    """

    def __init__(self) -> None:
        self.silent_until = -1.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The exception handler of a loop."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in OUT_OF_RESOURCES):
            loop.default_exception_handler(context)
        elif loop.time() > self.silent_until:
            self.silent_until = loop.time() + LOG_INTERVAL
            log.warning("cannot accept connections: %s; raise the limit with `ulimit -n`", error.strerror)
