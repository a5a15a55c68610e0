"""Many clients at once against `sima serve` -> one row: what they were answered, how fast, and the server's memory."""

from __future__ import annotations

import http.client
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sima_attn.report.rows import cpu_name, today

START_SECONDS = 120  # for the server to load its model
GROWTH = 1.1  # of the memory after a quarter of the time: more is a leak
PAUSE = 0.1  # seconds that a client which was turned away waits, far less than it is asked to
BODY = {"Content-Type": "application/octet-stream"}


@dataclass(frozen=True)
class LoadRow:
    """Answers by their status, latencies of photos that were looked at, and memory of the server in MiB.

    `busy_429` are turned away because the queue is full, `refused_4xx` sent what is no photo, and `no_answer` had their
    connection broken.
    """

    model: str
    clients: int
    seconds: float
    answers: int
    ok_2xx: int
    refused_4xx: int
    busy_429: int
    failed_5xx: int
    no_answer: int
    photos_per_second: float
    p50_ms: float
    p95_ms: float
    start_mib: float
    quarter_mib: float
    peak_mib: float
    end_mib: float
    cores: int
    device: str
    torch: str
    date: str

    def problem(self) -> str | None:
        """What is wrong, None where the server held out: no 5xx, nobody left without an answer, memory flat."""
        if self.failed_5xx or self.no_answer:
            return f"{self.failed_5xx} answers were a 5xx, and {self.no_answer} requests had none"
        if not self.ok_2xx:
            return "no request was answered with a 2xx"
        if self.end_mib > GROWTH * self.quarter_mib:
            return f"memory grew from {self.quarter_mib:.0f} to {self.end_mib:.0f} MiB in three quarters of the time"
        return None

    def summary(self) -> str:
        """The row in one line."""
        return (
            f"{self.answers} answers to {self.clients} clients in {self.seconds:g} s: {self.ok_2xx} 2xx, "
            f"{self.busy_429} busy, {self.refused_4xx} other 4xx, {self.failed_5xx} 5xx, {self.no_answer} without one; "
            f"{self.photos_per_second:.1f} photos a second, p50 {self.p50_ms:.0f} ms, p95 {self.p95_ms:.0f} ms; "
            f"memory {self.start_mib:.0f}, {self.quarter_mib:.0f}, {self.end_mib:.0f} MiB"
        )


@dataclass(frozen=True)
class Ask:
    """A request that clients make, `weight` times as often as one of weight 1."""

    weight: int
    method: str
    path: str
    body: bytes = b""
    is_photo: bool = False


@dataclass
class Tally:
    """What clients were answered; only whole operations on lists, so that threads can share it."""

    statuses: list[int] = field(default_factory=list)  # 0: no answer
    photo_seconds: list[float] = field(default_factory=list)


def bench_load(
    *,
    model: str | None = None,
    clients: int = 64,
    seconds: float = 120.0,
    on_second: Callable[[], object] = lambda: None,
) -> LoadRow:
    """Start a server on a free port, let clients at it for so long, and stop it."""
    if not Path("/proc/self/statm").is_file():
        raise ValueError("the server's memory is read from /proc, which this system does not have: use Linux")
    with _server(model) as (pid, port):
        asks = visits(port)
        name = _facts(port)["name"]
        tally, start = Tally(), time.monotonic()
        threads = [
            threading.Thread(target=_visit, args=(number, port, asks, start + seconds, tally), daemon=True)
            for number in range(clients)
        ]
        memory = [_resident_mib(pid)]
        for thread in threads:
            thread.start()
        while (left := start + seconds - time.monotonic()) > 0:
            time.sleep(min(1.0, left))
            memory.append(_resident_mib(pid))
            on_second()
        for thread in threads:
            thread.join()
        took = time.monotonic() - start  # with the last answers, which came in after the time was up
        memory.append(_resident_mib(pid))
    return summarise(tally, memory, model=name, clients=clients, seconds=seconds, took=took)


def summarise(tally: Tally, memory: list[float], *, model: str, clients: int, seconds: float, took: float) -> LoadRow:
    """The row of what was counted; memory in equal steps of time."""
    statuses = tally.statuses
    classes = [status // 100 for status in statuses]
    p50, p95 = np.percentile(tally.photo_seconds or [float("nan")], [50, 95])
    return LoadRow(
        model=model,
        clients=clients,
        seconds=seconds,
        answers=len(statuses) - statuses.count(0),
        ok_2xx=classes.count(2),
        refused_4xx=classes.count(4) - statuses.count(429),
        busy_429=statuses.count(429),
        failed_5xx=classes.count(5),
        no_answer=statuses.count(0),
        photos_per_second=round(len(tally.photo_seconds) / took, 2),
        p50_ms=round(1e3 * p50, 1),
        p95_ms=round(1e3 * p95, 1),
        start_mib=round(memory[0], 1),
        quarter_mib=round(memory[len(memory) // 4], 1),
        peak_mib=round(max(memory), 1),
        end_mib=round(memory[-1], 1),
        cores=os.cpu_count() or 1,
        device=cpu_name(),
        torch=str(torch.__version__),
        date=today(),
    )


def visits(port: int) -> list[Ask]:
    """What clients ask for: photos of two kinds most of all, the page, and now and then a broken file."""
    from PIL import Image

    noise = np.random.default_rng(0).integers(0, 256, (480, 640, 3), dtype=np.uint8)
    encoded = {}
    for kind in ("JPEG", "PNG"):
        buffer = io.BytesIO()
        Image.fromarray(noise).resize((320, 240)).save(buffer, kind)
        encoded[kind] = buffer.getvalue()
    size = _facts(port)["size"]
    return [
        Ask(40, "POST", "/api/analyse", encoded["JPEG"], is_photo=True),
        Ask(20, "POST", "/api/analyse", encoded["PNG"], is_photo=True),
        Ask(14, "POST", "/api/effect?layer=0&row=0&column=0", encoded["JPEG"], is_photo=True),
        Ask(1, "POST", f"/api/times?size={size}", encoded["JPEG"]),
        Ask(10, "POST", "/api/analyse", encoded["PNG"][:2000]),
        Ask(10, "GET", "/"),
        Ask(5, "GET", "/api/model"),
    ]


def _visit(number: int, port: int, asks: list[Ask], end: float, tally: Tally) -> None:
    """One client, until the time is up: a request after the other on one connection."""
    draw = random.Random(number)
    weights = [ask.weight for ask in asks]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=90)
    while time.monotonic() < end:
        (ask,) = draw.choices(asks, weights)
        start = time.monotonic()
        try:
            connection.request(ask.method, ask.path, ask.body or None, BODY if ask.body else {})
            response = connection.getresponse()
            response.read()
            status = response.status
        except (OSError, http.client.HTTPException):
            connection.close()
            status = 0
        tally.statuses.append(status)
        if status == 200 and ask.is_photo:
            tally.photo_seconds.append(time.monotonic() - start)
        if status in (0, 429):
            time.sleep(PAUSE)
    connection.close()


@contextmanager
def _server(model: str | None) -> Iterator[tuple[int, int]]:
    """Process id and port of a server of our own, stopped when the block ends."""
    command = [sys.executable, "-m", "sima_attn.cli", "serve", "--port", "0", *(["--model", model] if model else [])]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdout is not None
        try:
            too_late = threading.Timer(START_SECONDS, process.kill)
            too_late.start()
            address = process.stdout.readline().split()  # http://127.0.0.1:PORT  (Ctrl-C stops it)
            too_late.cancel()
            if not address:
                log.seek(0)
                raise ValueError(f"the server did not start: {(log.read().strip().splitlines() or ['no word'])[-1]}")
            yield process.pid, int(address[0].rsplit(":", 1)[1])
        finally:
            process.terminate()
            process.wait(60)
            process.stdout.close()


def _facts(port: int) -> dict[str, Any]:
    """What the server says of its model; asking also makes it ready."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=90)
    connection.request("GET", "/api/model")
    facts = json.loads(connection.getresponse().read())
    connection.close()
    return facts


def _resident_mib(pid: int) -> float:
    """Memory that a process holds."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
