"""Limits of a request, and the gate that enforces them."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

Result = TypeVar("Result")
DECODERS = 2  # decoded photos in memory at a time


@dataclass(frozen=True)
class Limits:
    """Limits for clients.

    Attributes:
        bytes, pixels: Size of an upload.
        scans: Scans of a progressive JPEG; each costs as much as decoding the whole image. Encoders write about 10.
        queue: Number of waiting requests.
        seconds: Time of a request, including waiting.
        connections: Number of open connections.
        header_seconds, upload_seconds, send_seconds: Time for the headers, for the body, and to continue reading.
        stop_seconds: Time for running requests when the server stops.
        tokens: Bounds the image sizes: softmax's time and the memory of the maps grow with the square of the tokens.
    """

    bytes: int = 12 * 2**20
    pixels: int = 50_000_000
    scans: int = 100
    queue: int = 16
    seconds: float = 60.0
    connections: int = 128
    header_seconds: float = 10.0
    upload_seconds: float = 20.0
    send_seconds: float = 30.0
    stop_seconds: int = 5
    tokens: int = 2500


class Refusal(Exception):  # noqa: N818 - an answer, not a failure of the program
    """A request that is answered with a status of 4xx (or 504) and one sentence."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class Gate:
    """Rejects requests when too many are waiting, and runs their work.

    Work on the model runs one piece at a time, since its hooks must not see another forward pass. A timeout is answered
    at once; work that has not started is dropped, but running work cannot be stopped.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.inside = 0  # waiting or running
        self._jobs: set[Future[Any]] = set()
        self.open()

    def open(self) -> None:
        """Create the thread pools; also after a `close`."""
        self._model = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._decoders = ThreadPoolExecutor(DECODERS, thread_name_prefix="decode")

    def check_not_full(self) -> None:
        """Raise a Refusal if the queue is full."""
        if self.inside > self.limits.queue:
            raise Refusal(429, f"busy: {self.inside} requests are ahead of this one; try again in a few seconds")

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Count one request in the block; a Refusal if the queue is full."""
        self.check_not_full()
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run work on the model."""
        return await self._within_time(self._model, work)

    async def decode(self, work: Callable[[], Result]) -> Result:
        """Run work on uploaded bytes, which does not wait for the model."""
        return await self._within_time(self._decoders, work)

    async def _within_time(self, executor: ThreadPoolExecutor, work: Callable[[], Result]) -> Result:
        job = executor.submit(work)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(job), self.limits.seconds)
        except TimeoutError:
            raise Refusal(504, f"this took longer than {self.limits.seconds:g} seconds; try a smaller size") from None

    @property
    def working(self) -> bool:
        """Whether any work is running."""
        return any(job.running() for job in list(self._jobs))

    def close(self) -> None:
        """Drop waiting work, without waiting for running work, which has no time limit."""
        for executor in (self._model, self._decoders):
            executor.shutdown(wait=False, cancel_futures=True)
