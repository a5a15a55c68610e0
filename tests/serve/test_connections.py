"""The server under clients that are slow, silent, many, or gone: others are still answered, and the log stays short."""

import asyncio
import errno
import http.client
import logging
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import timm

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

from serving import serving
from sima_attn.explain.photo_model import photo_model
from sima_attn.serve.app import create_app
from sima_attn.serve.connections import LoopErrors
from sima_attn.serve.limits import Gate, Limits, Refusal
from sima_attn.serve.run import serve

PATIENT = Limits(queue=2, header_seconds=60, upload_seconds=60, stop_seconds=1)  # nothing ends by a deadline
POST = b"POST /api/analyze HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\n"


@pytest.fixture(scope="module")
def subject():
    vit = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2, "num_classes": 5}
    model = timm.create_model("sima_deit_tiny_patch16_224", **vit).eval()
    return photo_model(model, name="small", trained=False, size=32)


@pytest.fixture
def page(subject, request):
    limits = getattr(request, "param", PATIENT)
    with serving(create_app(subject, limits=limits), limits) as served:
        yield served


def connect(page, data=b"", receive_buffer=None):
    client = socket.socket()
    if receive_buffer is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(20)
    client.connect(("127.0.0.1", page.port))
    client.sendall(data)
    return client


def status(page, method="GET", path="/healthz", body=None):
    """The status of a request that is sent at once, after what was sent before it."""
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=20)
    connection.request(method, path, body)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status


def is_closed(client):
    """Whether the server ends the connection, after an answer or without one."""
    try:
        while client.recv(65536):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return False
    return True


def test_slow_uploads_keep_nobody_out(page):
    slow = [connect(page, POST + b"x") for _ in range(2 * (PATIENT.queue + 1))]
    assert status(page) == 200  # they are all there by now
    assert status(page, "POST", "/api/analyze", b"no photo") == 415  # looked at, not told to come back
    for client in slow:
        client.close()


@pytest.mark.parametrize("page", [Limits(upload_seconds=0.2, stop_seconds=1)], indirect=True)
def test_a_body_has_a_deadline(page):
    with connect(page, POST + b"x") as client:
        assert client.recv(65536).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("page", [Limits(header_seconds=0.2, stop_seconds=1)], indirect=True)
@pytest.mark.parametrize("sent", [b"", b"GET /hea", POST + b"x" * 1001], ids=["nothing", "a part", "a second request"])
def test_headers_have_a_deadline(page, sent):
    with connect(page, sent) as client:
        assert is_closed(client)
    assert status(page) == 200


@pytest.mark.parametrize("page", [Limits(header_seconds=0.6, stop_seconds=1)], indirect=True)
def test_bytes_do_not_put_the_deadline_of_the_headers_off(page):
    with connect(page) as client:
        client.settimeout(0.1)
        for _ in range(100):  # 10 seconds
            try:
                client.sendall(b"G")
                if client.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            pytest.fail("the connection is still open")


@pytest.mark.parametrize("page", [Limits(connections=8, header_seconds=60, upload_seconds=60)], indirect=True)
@pytest.mark.parametrize("sent", [b"", b"GET /", POST + b"x"], ids=["nothing", "headers", "a body"])
def test_a_connection_too_many_takes_the_place_of_the_oldest_that_waits_for_its_client(page, sent):
    clients = [connect(page, sent) for _ in range(40)]
    assert status(page) == 200
    assert len(page.server.server_state.connections) <= 8
    assert all(is_closed(client) for client in clients[:32])
    clients[-1].settimeout(0.05)
    assert not is_closed(clients[-1])
    for client in clients:
        client.close()


class Held:
    """An application that answers when it is let go, with as much as it is told to."""

    def __init__(self, size=2):
        self.size, self.go = size, asyncio.Event()

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            raise RuntimeError("no lifespan")
        await receive()
        if scope["path"] == "/held":
            await self.go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(self.size):
            await send({"type": "http.response.body", "body": bytes(65536), "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def test_a_request_at_work_keeps_its_connection():
    app = Held()
    limits = Limits(connections=2, header_seconds=60)
    with serving(app, limits) as page:
        held = [connect(page, b"GET /held HTTP/1.1\r\nHost: x\r\n\r\n") for _ in range(2)]
        while len(page.requests) < 2:
            time.sleep(0.01)
        with connect(page) as third:
            assert is_closed(third)
        page.server.servers[0].get_loop().call_soon_threadsafe(app.go.set)
        assert all(client.recv(100).startswith(b"HTTP/1.1 200") for client in held)
        for client in held:
            client.close()


def test_a_request_that_is_cut_off_at_the_end_leaves_no_trace_in_the_log(capfd):
    with serving(Held(), Limits(stop_seconds=0)) as page:
        client = connect(page, b"GET /held HTTP/1.1\r\nHost: x\r\n\r\n")
        while not page.requests:
            time.sleep(0.01)
    client.close()
    log = capfd.readouterr().err  # uvicorn's
    assert "Cancel 1 running task(s)" in log
    assert "Traceback" not in log


def test_a_client_that_does_not_read_is_disconnected():
    with serving(Held(size=400), Limits(send_seconds=0.2, stop_seconds=1)) as page:
        client = connect(page, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", receive_buffer=4096)
        while not page.requests:
            time.sleep(0.01)
        end = time.monotonic() + 10
        while page.server.server_state.connections and time.monotonic() < end:
            time.sleep(0.02)
        assert not page.server.server_state.connections
        client.close()


def test_a_client_that_goes_away_leaves_no_trace_in_the_log(page, caplog, capfd):
    for data in (POST, POST + b"x" * 500, POST + b"x" * 1000, b"GET /api/model HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"):
        client = connect(page, data)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset, not an end
        client.close()
        assert status(page) == 200
    while page.server.server_state.tasks:
        time.sleep(0.01)
    assert caplog.records == []
    assert capfd.readouterr().err == ""  # uvicorn's


def test_accept_errors_are_one_line_a_minute(caplog):
    async def fail():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(LoopErrors())
        for _ in range(1000):
            full = OSError(errno.EMFILE, "Too many open files")
            loop.call_exception_handler({"message": "socket.accept() out of system resource", "exception": full})
        assert len(caplog.records) == 1
        loop.call_exception_handler({"message": "another", "exception": RuntimeError("another")})

    asyncio.run(fail())
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.ERROR]
    assert caplog.records[0].exc_info is None
    assert "Too many open files; raise the limit with `ulimit -n`" in caplog.records[0].message


STUCK = """
import time, timm
from sima_attn.explain.photo_model import photo_model
from sima_attn.serve.limits import Gate, Limits, Refusal
from sima_attn.serve.run import serve
from sima_attn.serve.analysis import Analyzer
from sima_attn.serve.run import serve

def stuck(*_):
    print("stuck", flush=True)
    time.sleep(1000)

Analyzer.analyze = stuck
vit = dict(img_size=32, patch_size=8, embed_dim=32, depth=1, num_heads=2, num_classes=5)
model = timm.create_model("sima_deit_tiny_patch16_224", **vit).eval()
subject = photo_model(model, name="small", trained=False, size=32)
serve(subject, host="127.0.0.1", port=0, samples=None, limits=Limits(stop_seconds=1))
"""
PIXEL = bytes.fromhex("424d1e000000000000001a0000000c000000010001000100180000ff00ff")  # a BMP of one pixel


def test_it_stops_while_work_is_stuck_and_after_more_connections_than_it_has_descriptors():
    def few_descriptors():
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

    command, pipe = [sys.executable, "-c", STUCK], subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=few_descriptors)
    clients = []

    def connect():
        clients.append(socket.create_connection(("127.0.0.1", port), timeout=20))
        return clients[-1]

    try:
        port = int(re.search(r":(\d+)", process.stdout.readline())[1])
        connect().sendall(POST.replace(b"1000", str(len(PIXEL)).encode()) + PIXEL)
        assert process.stdout.readline() == "stuck\n"
        for _ in range(300):
            connect()
        connect().sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert clients[-1].recv(100).startswith(b"HTTP/1.1 200")
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            _, errors = process.communicate(timeout=30)  # the work is stuck for 1000 seconds
        finally:
            process.kill()
            for client in clients:
                client.close()
    assert "Traceback" not in errors
    assert len(errors) < 1000, errors


@pytest.mark.parametrize("stuck", [True, False])
def test_ctrl_c_does_not_wait_for_a_thread(subject, monkeypatch, stuck):
    """SIGTERM ends the process by itself; KeyboardInterrupt would have Python join the threads."""

    class Ended(BaseException):
        pass

    def stop(*_, **__):
        raise KeyboardInterrupt

    def end(status):
        raise Ended

    monkeypatch.setattr("uvicorn.Server.run", stop)
    monkeypatch.setattr("os._exit", end)
    monkeypatch.setattr(Gate, "working", stuck)
    with pytest.raises(Ended if stuck else KeyboardInterrupt):
        serve(subject, host="127.0.0.1", port=0, samples=None, limits=Limits())


def test_the_gate_knows_whether_a_thread_is_at_work_and_closes_at_once():
    gate, release = Gate(Limits(seconds=0.05)), threading.Event()

    async def scene():
        assert not gate.working
        with pytest.raises(Refusal, match="longer than"):
            await gate.run(release.wait)
        assert gate.working
        gate.close()  # does not wait
        assert gate.working

    try:
        asyncio.run(scene())
    finally:
        release.set()
    while gate.working:
        time.sleep(0.01)
