"""The page's server in a thread, as `sima serve` runs it."""

import threading
from contextlib import contextmanager

import uvicorn

from sima_attn.serve.limits import Limits
from sima_attn.serve.run import server_config


class Served:
    """A running server: its address, and every request it got as (method, path)."""

    def __init__(self, app, limits):
        self.requests = []

        async def noting(scope, receive, send):
            if scope["type"] == "http":
                self.requests.append((scope["method"], scope["path"]))
            await app(scope, receive, send)

        self.server = uvicorn.Server(server_config(noting, limits))
        self.thread = threading.Thread(target=self.server.run, daemon=True)

    @property
    def port(self):
        return self.server.servers[0].sockets[0].getsockname()[1]

    @property
    def address(self):
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def serving(app, limits=None):
    """The application in a thread of its own until the block ends."""
    served = Served(app, limits or Limits(stop_seconds=2))
    served.thread.start()
    while not served.server.started:
        assert served.thread.is_alive(), "the server did not start"
        served.thread.join(0.02)
    try:
        yield served
    finally:
        served.server.should_exit = True
        served.thread.join(20)
