"""Load test of `sima serve` -> one row: status codes, latency, and the server's memory (Linux only).

    python benchmarks/serve_load.py --clients 8 --seconds 10 --out serve.csv

Many clients send requests at once. The script fails if an answer was a 5xx, a request had no answer, or memory grew.
"""

import argparse
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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sima_attn.report.rows import provenance_columns, write_rows

START_SECONDS = 120  # for the server to load its model
MAX_GROWTH = 1.1  # memory at the end over memory after a quarter of the time; more is a leak
PAUSE = 0.1  # seconds that a rejected client waits, far less than the server asks for
BODY = {"Content-Type": "application/octet-stream"}


@dataclass(frozen=True)
class LoadRow:
    """Answers by status, latencies of analyzed photos, and memory of the server in MiB.

    `busy_429`: rejected because the queue is full. `refused_4xx`: the body is not a photo. `no_answer`: the connection
    broke.
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
        """What failed, or None: there must be no 5xx, an answer to each request, and constant memory."""
        if self.failed_5xx or self.no_answer:
            return f"{self.failed_5xx} answers were a 5xx, and {self.no_answer} requests had no answer"
        if not self.ok_2xx:
            return "no request was answered with a 2xx"
        if self.end_mib > MAX_GROWTH * self.quarter_mib:
            return f"memory grew from {self.quarter_mib:.0f} MiB after a quarter of the time to {self.end_mib:.0f} MiB"
        return None

    def summary(self) -> str:
        """The row in one line."""
        return (
            f"{self.answers} answers to {self.clients} clients in {self.seconds:g} s: {self.ok_2xx} 2xx, "
            f"{self.busy_429} busy, {self.refused_4xx} other 4xx, {self.failed_5xx} 5xx, {self.no_answer} unanswered; "
            f"{self.photos_per_second:.1f} photos/s, p50 {self.p50_ms:.0f} ms, p95 {self.p95_ms:.0f} ms; "
            f"memory {self.start_mib:.0f}, {self.quarter_mib:.0f}, {self.end_mib:.0f} MiB"
        )


@dataclass(frozen=True)
class Request:
    """A request that clients send, `weight` times as often as one of weight 1."""

    weight: int
    method: str
    path: str
    body: bytes = b""
    is_photo: bool = False


@dataclass
class Tally:
    """Answers of all clients. Threads share it: appending to a list is atomic."""

    statuses: list[int] = field(default_factory=list)  # 0: no answer
    photo_seconds: list[float] = field(default_factory=list)


def bench_load(*, model: str | None = None, clients: int = 64, seconds: float = 120.0) -> LoadRow:
    """Start a server on a free port, send requests from `clients` threads for `seconds`, and stop it."""
    with _server(model) as (pid, port):
        facts = _model_facts(port)
        requests = create_requests(facts["size"])
        tally, start = Tally(), time.monotonic()
        threads = [
            threading.Thread(target=_run_client, args=(seed, port, requests, start + seconds, tally), daemon=True)
            for seed in range(clients)
        ]
        memory = [_resident_mib(pid)]
        for thread in threads:
            thread.start()
        while (left := start + seconds - time.monotonic()) > 0:
            time.sleep(min(1.0, left))
            memory.append(_resident_mib(pid))
        for thread in threads:
            thread.join()
        took = time.monotonic() - start  # includes the answers that arrived after `seconds`
        memory.append(_resident_mib(pid))
    return summarize(tally, memory, model=facts["name"], clients=clients, seconds=seconds, took=took)


def summarize(tally: Tally, memory: list[float], *, model: str, clients: int, seconds: float, took: float) -> LoadRow:
    """The row of a tally and of memory sampled at equal intervals."""
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
        **provenance_columns("cpu"),
    )


def create_requests(size: int) -> list[Request]:
    """Mostly photos in two formats; also the page, the model's facts, and some truncated files."""
    noise = np.random.default_rng(0).integers(0, 256, (480, 640, 3), dtype=np.uint8)
    encoded = {}
    for kind in ("JPEG", "PNG"):
        buffer = io.BytesIO()
        Image.fromarray(noise).resize((320, 240)).save(buffer, kind)
        encoded[kind] = buffer.getvalue()
    return [
        Request(40, "POST", "/api/analyze", encoded["JPEG"], is_photo=True),
        Request(20, "POST", "/api/analyze", encoded["PNG"], is_photo=True),
        Request(14, "POST", "/api/effect?layer=0&row=0&column=0", encoded["JPEG"], is_photo=True),
        Request(1, "POST", f"/api/times?size={size}", encoded["JPEG"]),
        Request(10, "POST", "/api/analyze", encoded["PNG"][:2000]),
        Request(10, "GET", "/"),
        Request(5, "GET", "/api/model"),
    ]


def _run_client(seed: int, port: int, requests: list[Request], end: float, tally: Tally) -> None:
    """One client: one request after the other on one connection, until the time is up."""
    draw = random.Random(seed)
    weights = [request.weight for request in requests]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=90)
    while time.monotonic() < end:
        (request,) = draw.choices(requests, weights)
        start = time.monotonic()
        try:
            connection.request(request.method, request.path, request.body or None, BODY if request.body else {})
            response = connection.getresponse()
            response.read()
            status = response.status
        except (OSError, http.client.HTTPException):
            connection.close()
            status = 0
        tally.statuses.append(status)
        if status == 200 and request.is_photo:
            tally.photo_seconds.append(time.monotonic() - start)
        if status in (0, 429):
            time.sleep(PAUSE)
    connection.close()


@contextmanager
def _server(model: str | None) -> Iterator[tuple[int, int]]:
    """Process id and port of a new server, stopped at the end of the block."""
    command = [sys.executable, "-m", "sima_attn.cli", "serve", "--port", "0", *(["--model", model] if model else [])]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdout is not None
        try:
            timeout = threading.Timer(START_SECONDS, process.kill)
            timeout.start()
            address = process.stdout.readline().split()  # http://127.0.0.1:PORT  (Ctrl-C to stop)
            timeout.cancel()
            if not address:
                log.seek(0)
                raise RuntimeError(
                    f"the server did not start: {(log.read().strip().splitlines() or ['no output'])[-1]}"
                )
            yield process.pid, int(address[0].rsplit(":", 1)[1])
        finally:
            process.terminate()
            process.wait(60)
            process.stdout.close()


def _model_facts(port: int) -> dict[str, Any]:
    """The answer of /api/model; the server has loaded its model when it answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=90)
    connection.request("GET", "/api/model")
    facts = json.loads(connection.getresponse().read())
    connection.close()
    return facts


def _resident_mib(pid: int) -> float:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main(arguments: list[str] | None = None) -> None:
    """Measure, write the row, fail if the server did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/serve.csv"), help="CSV file for the row")
    parser.add_argument("--model", help="as in `sima serve` (default: the shipped model)")
    parser.add_argument("--clients", type=int, default=64, help="number of concurrent clients")
    parser.add_argument("--seconds", type=float, default=120.0, help="duration")
    given = parser.parse_args(arguments)
    row = bench_load(model=given.model, clients=given.clients, seconds=given.seconds)
    write_rows(given.out, [row])
    print(f"{row.summary()}\nRow: {given.out}")
    problem = row.problem()
    if problem is not None:
        raise SystemExit(f"error: {problem}")


if __name__ == "__main__":
    main()
