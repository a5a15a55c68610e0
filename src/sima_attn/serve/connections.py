"""What a connection may cost: no client is waited for without end, and none of them fills the process or its log."""

from __future__ import annotations

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
    """Calls `expire` when it has run for so many seconds without being stopped."""

    def __init__(self, seconds: float, expire: Callable[[], object]) -> None:
        self.seconds, self.expire = seconds, expire
        self.timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start it, unless it runs already."""
        if self.timer is None:
            self.timer = asyncio.get_running_loop().call_later(self.seconds, self.expire)

    def stop(self) -> None:
        """Stop it, if it runs."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class BoundedConnection(H11Protocol):
    """uvicorn's HTTP connection with the deadlines that it lacks; that of a body is in the application.

    - The headers of a request arrive within `limits.header_seconds`.
    - A client that reads nothing of its answer for `limits.send_seconds` is disconnected.
    - At most `limits.connections` are open. A new one then takes the place of the oldest that waits for its client, so
      that clients who send nothing, or very slowly, cannot keep others out.
    """

    connections: set[Any]  # of the server, all of this class

    def __init__(self, limits: Limits, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.limits = limits
        self.opened = time.monotonic()
        self.header_deadline = Deadline(limits.header_seconds, self.disconnect)
        self.send_deadline = Deadline(limits.send_seconds, self.disconnect)

    @property
    def in_request(self) -> bool:
        """Whether the headers of a request are here and its answer is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def awaits_client(self) -> bool:
        """Whether the client is the next to act: to send headers or a body, or to read the answer."""
        return not self.in_request or self.cycle.more_body or self.flow.write_paused

    def disconnect(self) -> None:
        """Close at once, without waiting for the client to read what is left."""
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline of the headers; make room where there are too many connections."""
        super().connection_made(transport)
        self.header_deadline.start()
        if len(self.connections) > self.limits.connections:
            oldest = min((one for one in self.connections if one.awaits_client), key=lambda one: one.opened)
            self.connections.discard(oldest)  # at once: more may be accepted before its `connection_lost`
            oldest.disconnect()

    def data_received(self, data: bytes) -> None:
        """Pass the bytes on; the deadline runs until they complete the headers."""
        super().data_received(data)
        if self.in_request:
            self.header_deadline.stop()
        else:
            self.header_deadline.start()

    def timeout_keep_alive_handler(self) -> None:
        """End a connection on which no further request came."""
        self.disconnect()

    def pause_writing(self) -> None:
        """Start the deadline of a client that does not read."""
        super().pause_writing()
        self.send_deadline.start()

    def resume_writing(self) -> None:
        """Stop it: the client reads again."""
        super().resume_writing()
        self.send_deadline.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the deadlines."""
        self.header_deadline.stop()
        self.send_deadline.stop()
        super().connection_lost(exc)


class LoopErrors:
    """Errors of the event loop go to the log; connections that cannot be accepted in one line per minute.

    asyncio retries these every second, and would write a stack trace for each connection that waits.
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
            log.warning("connections cannot be accepted: %s; raise the limit with `ulimit -n`", error.strerror)
