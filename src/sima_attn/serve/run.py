"""Runs the page with uvicorn."""

import asyncio
import os
import socket
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from sima_attn.detect.weights import LoadedDetector
from sima_attn.explain.photo_model import PhotoModel
from sima_attn.serve.app import LOCAL, create_app
from sima_attn.serve.connections import BoundedConnection
from sima_attn.serve.in_browser import InBrowser
from sima_attn.serve.limits import Limits

# Also the number of connections that asyncio accepts in one step, before excess ones are closed. The sum with
# `Limits.connections` is below 256, the limit of open files of a process on some systems.
BACKLOG = 64


def serve(
    photo_model: PhotoModel | LoadedDetector,
    *,
    host: str,
    port: int,
    samples: Path | None,
    limits: Limits,
    onnx: Path | None = None,
    onnxruntime_web: Path | None = None,
) -> None:
    """Serve until Ctrl-C or SIGTERM; running requests then have `limits.stop_seconds` to finish."""
    hosts = LOCAL if host in LOCAL else None
    in_browser = InBrowser(onnx, onnxruntime_web)
    app = create_app(photo_model, samples=samples, limits=limits, hosts=hosts, in_browser=in_browser)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(BACKLOG)  # before the address is printed, so that clients can connect at once
        except OSError as error:
            raise ValueError(
                f"cannot listen on {host}:{port}: {error.strerror}; choose another --port, or a --host that is an "
                "address of this machine, such as 127.0.0.1, or 0.0.0.0 for all of them"
            ) from None
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{listener.getsockname()[1]}"
        print(f"{address}  (Ctrl-C to stop)", flush=True)
        if onnx is not None:
            print(in_browser.reason_it_does_not_run or f"{address}/browser  runs {onnx} in the browser", flush=True)
        try:
            uvicorn.Server(server_config(app, limits)).run(sockets=[listener])
        finally:
            if app.state.gate.working:  # Python would wait for that thread without a timeout
                os._exit(1)


def server_config(app: Any, limits: Limits) -> uvicorn.Config:
    """Settings of uvicorn."""

    async def until_stopped(scope: Any, receive: Any, send: Any) -> None:
        with suppress(asyncio.CancelledError):  # the server stops: not an error
            await app(scope, receive, send)

    return uvicorn.Config(
        until_stopped,
        port=0,
        http=partial(BoundedConnection, limits),  # type: ignore[arg-type]  # any factory works
        ws="none",
        backlog=BACKLOG,
        log_level="warning",
        timeout_keep_alive=limits.header_seconds,  # type: ignore[arg-type]  # passed to asyncio, which takes a float
        timeout_graceful_shutdown=limits.stop_seconds,
        server_header=False,
    )
