"""What a request may cost, and the gate that keeps the rest out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

Result = TypeVar("Result")
DECODERS = 2  # at most two photos, decoded, in memory at a time


@dataclass(frozen=True)
class Limits:
    """What clients may take.

    Attributes:
        bytes, pixels: Of an upload.
        scans: Of a progressive JPEG, each of which costs as much as decoding the whole image. Encoders write about 10.
        queue: Requests that may wait.
        seconds: To wait and be answered.
        connections: That are open at the same time.
        header_seconds, upload_seconds, send_seconds: For the headers, for the body, and to read from the answer again.
        stop_seconds: For running requests when the server is stopped.
        tokens: Bounds the sizes that are offered: softmax takes time, and a look inside memory, as their square.
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


class Refusal(Exception):  # noqa: N818 - an answer, no failure of the program
    """A request that is answered with a status of 4xx (or 504) and one clear sentence."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class Gate:
    """Keeps requests out when too many are inside, and runs their work.

    Work on the model is done one piece at a time: the hooks that read it must not see another forward. Work that is
    out of time is answered at once; it is dropped if it has not begun, but what runs cannot be stopped.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.inside = 0  # waiting or running
        self._jobs: set[Future[Any]] = set()
        self.open()

    def open(self) -> None:
        """Ready for work, again after a `close` too; threads start with the first work."""
        self._model = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._decoders = ThreadPoolExecutor(DECODERS, thread_name_prefix="decode")

    def check_not_full(self) -> None:
        """A Refusal where all places are taken."""
        if self.inside > self.limits.queue:
            raise Refusal(429, f"busy: {self.inside} requests are ahead of this one; try again in a few seconds")

    @contextmanager
    def admit(self) -> Iterator[None]:
        """A place for one request; a Refusal where all are taken."""
        self.check_not_full()
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    async def run(self, work: Callable[[], Result]) -> Result:
        """The result of work on the model."""
        return await self._within_time(self._model, work)

    async def decode(self, work: Callable[[], Result]) -> Result:
        """The result of work on uploaded bytes, which need not wait for the model."""
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
        """Whether a thread is at work."""
        return any(job.running() for job in list(self._jobs))

    def close(self) -> None:
        """Drop what waits; what runs is not waited for, since nothing bounds it."""
        for executor in (self._model, self._decoders):
            executor.shutdown(wait=False, cancel_futures=True)
